// Times of prefetch and of its stages. One line a figure, tab-separated: name, value, unit, name of the control, control,
// goal ("-" where there is none); clo_jax/bench/native.py makes a results file of them. Other lines are for people.
#include "prefetch_timing.h"

namespace {

using clo::Retriever;
using clo::test::kSelected;
using clo::test::PrefetchTiming;
using clo::test::Stage;
using clo::test::Transfers;

void row(const std::string& name, double us, double control, const char* control_name, const char* goal) {
  std::printf("%s\t%.4g\tus\t%s\t%.4g\t%s\n", name.c_str(), us, control_name, control, goal);
  std::fflush(stdout);
}

const char* name_of(Retriever r) { return r == Retriever::kHata ? "hata" : "sign"; }

}  // namespace

int main() {
  const char* const kRead = "plain read of the codes of all heads";
  const char* const kCopy = "contiguous cudaMemcpyAsync of the bytes moved";
  const auto rows_us = [](PrefetchTiming& b, double share) {
    return b.copy(static_cast<size_t>(share * static_cast<double>(b.heads * kSelected)) * 512);
  };
  {
    PrefetchTiming b(1, 6);
    const double read = b.read();
    std::printf("two events with nothing between them %.2f us (taken off), plain read %.2f us\n", b.nothing, read);
    for (Retriever r : {Retriever::kHata, Retriever::kSign}) {
      b.seek(r, 0.26);
      const double lookup = b.stage(r, Stage::kLookup), selection = b.stage(r, Stage::kSelection);
      const double whole = b.stage(r, Stage::kWhole);
      std::printf("%s: lookup and projection %.2f us, selection %.2f us, difference %.2f us, whole %.2f us (without transfers)\n",
                  name_of(r), lookup, selection - lookup, whole - selection, whole);
      const std::string prefix = std::string("prefetch, ") + name_of(r) + ", 8 x 131072, every head missed";
      const double waiting = b.prefetch(r, false, Transfers::kWaiting);
      row(prefix + ", " + b.new_rows() + ", beside a transfer kernel that waits", waiting, read, kRead, "<= 30 us");
      const double copying = b.prefetch(r, false, Transfers::kCopying);
      row(prefix + ", " + b.new_rows() + ", beside one that copies", copying, read, kRead, "-");
      row(prefix + ", whole sets, beside a transfer kernel that waits", b.prefetch(r, true, Transfers::kWaiting), read, kRead,
          "-");
      const double in_line = b.prefetch(r, false, Transfers::kInLine), share = b.new_share();
      const std::string moved = b.new_rows();
      row(prefix + ", " + moved + ", transfer in line", in_line, rows_us(b, share), kCopy, "-");
    }
    row("prefetch, hata, 8 x 131072, every head missed, whole sets, transfer in line",
        b.prefetch(Retriever::kHata, true, Transfers::kInLine), rows_us(b, 1), kCopy, "-");
    b.make_queries(4);
    const double other = b.prefetch(Retriever::kHata, false, Transfers::kWaiting);
    row("prefetch, hata, 8 x 131072, every head missed, " + b.new_rows() + ", beside a transfer kernel that waits", other, read,
        kRead, "-");
    b.miss(2);
    for (Retriever r : {Retriever::kHata, Retriever::kSign}) {
      b.seek(r, 0.26);
      const double few = b.prefetch(r, false, Transfers::kWaiting);
      const clo::Counters c = b.engine.counters();
      row(std::string("prefetch, ") + name_of(r) + ", 8 x 131072, 23 % of the heads missed, " + b.new_rows() +
              ", beside a transfer kernel that waits",
          few, read, kRead, "-");
      std::printf("  missed %.3f of the heads\n", static_cast<double>(c.misses) / static_cast<double>(c.misses + c.hits));
    }
    b.miss(0);
    row("prefetch, 8 x 131072, no head missed, beside a transfer kernel that waits",
        b.prefetch(Retriever::kHata, false, Transfers::kWaiting), read, kRead, "-");
  }
  {
    PrefetchTiming b(4, 2);
    const double read = b.read();
    for (Retriever r : {Retriever::kHata, Retriever::kSign}) {
      b.seek(r, 0.26);
      const double lookup = b.stage(r, Stage::kLookup), selection = b.stage(r, Stage::kSelection);
      const double whole = b.stage(r, Stage::kWhole);
      std::printf("%s, B 4: lookup and projection %.2f us, selection %.2f us, difference %.2f us, whole %.2f us\n", name_of(r),
                  lookup, selection - lookup, whole - selection, whole);
      const double waiting = b.prefetch(r, false, Transfers::kWaiting);
      row(std::string("prefetch, ") + name_of(r) + ", 32 x 131072, every head missed, " + b.new_rows() +
              ", beside a transfer kernel that waits",
          waiting, read, kRead, "-");
    }
  }
  return 0;
}
