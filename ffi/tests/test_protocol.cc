// Every interleaving of one poster, the transfer threads and one waiter over the protocol's atomic steps. The queue is
// the engine's own (host/transfer_queue.h): each of its calls is one step, because the engine makes it under the mutex.
// The order of steps around it is a model of transfers.cc: claim, copy the chunk's rows, then finish and, for the last
// chunk, publish ready in the same critical section. Checked in every state: a waiter that sees ready sees all rows of
// that request. Checked at every end: everything is delivered, each chunk was copied once. Parking and waking are not
// modelled: they are condition variables whose conditions change under the mutex.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <set>
#include <vector>

#include "check.h"
#include "host/transfer_queue.h"

namespace {

constexpr int64_t kLayers = 2, kThreads = 3, kPosts = 3;
// The poster's program: layer 0, layer 1, then layer 0 again as soon as its waiter has seen it ready.
constexpr std::array<int64_t, kPosts> kLayerOf = {0, 1, 0};
constexpr std::array<int64_t, kPosts> kChunksOf = {3, 2, 3};
constexpr std::array<uint64_t, kPosts> kSequenceOf = {1, 1, 2};

// When a thread publishes ready: with its finish (the engine), or one step earlier (a broken engine, which the search
// must catch, so that it is known to be able to).
enum class Publish { kWithFinish, kBeforeCopy };

struct Thread {
  enum { kIdle, kClaimed, kCopied } at = kIdle;
  clo::TransferQueue::Claim claim{};
};

struct State {
  clo::TransferQueue queue{kLayers};
  std::array<uint64_t, kLayers> ready{};               // the flags
  std::array<std::array<int, 4>, kPosts> copies{};     // how often each chunk of each post was copied
  std::array<Thread, kThreads> threads{};
  int64_t posted = 0, waited = 0;                      // programs of poster and waiter

  // Tells states apart. The queue needs no part in it: what is posted, claimed and copied determines it.
  std::vector<int64_t> key() const {
    std::vector<int64_t> k = {posted, waited};
    for (uint64_t r : ready) k.push_back(static_cast<int64_t>(r));
    for (const auto& c : copies) k.insert(k.end(), c.begin(), c.end());
    // The threads are alike: states that differ only in who is who are one.
    std::array<std::array<int64_t, 4>, kThreads> t;
    for (size_t i = 0; i < threads.size(); ++i) {
      const Thread& thread = threads[i];
      const bool idle = thread.at == Thread::kIdle;
      t[i] = {thread.at, idle ? 0 : thread.claim.layer, idle ? 0 : thread.claim.chunk,
              idle ? 0 : static_cast<int64_t>(thread.claim.sequence)};
    }
    std::sort(t.begin(), t.end());
    for (const auto& one : t) k.insert(k.end(), one.begin(), one.end());
    return k;
  }
};

class Search {
 public:
  explicit Search(Publish publish) : publish_(publish) {}

  // True when no reachable state breaks the promise.
  bool run() { return visit(State{}); }

  int64_t states = 0, ends = 0, steps = 0;

 private:
  static int64_t post_of(const clo::TransferQueue::Claim& claim) {
    for (int64_t p = 0; p < kPosts; ++p)
      if (kLayerOf[p] == claim.layer && kSequenceOf[p] == claim.sequence) return p;
    CHECK(!"a claim of a request that nobody posted");
    return -1;
  }

  bool visit(const State& s) {
    if (!seen_.insert(s.key()).second) return true;
    ++states;
    bool moved = false;
    const auto step = [&](const State& next) {
      moved = true;
      ++steps;
      return visit(next);
    };
    // The poster posts a layer again only after the waiter has seen its previous request (token order).
    if (s.posted < kPosts && (s.posted < 2 || s.waited > 0)) {
      State next = s;
      const int64_t p = next.posted++;
      CHECK(!next.queue.outstanding(kLayerOf[p]));
      CHECK(next.queue.post(kLayerOf[p], kChunksOf[p]) == kSequenceOf[p]);
      if (!step(next)) return false;
    }
    // The waiter reads the flags of the requests in the order in which they are posted.
    if (s.waited < s.posted && s.ready[kLayerOf[s.waited]] >= kSequenceOf[s.waited]) {
      for (int64_t c = 0; c < kChunksOf[s.waited]; ++c)
        if (s.copies[s.waited][c] == 0) return false;
      State next = s;
      ++next.waited;
      if (!step(next)) return false;
    }
    for (int64_t t = 0; t < kThreads; ++t) {
      State next = s;
      Thread& thread = next.threads[t];
      switch (thread.at) {
        case Thread::kIdle:
          if (!next.queue.has_work()) continue;
          thread.claim = next.queue.claim();
          thread.at = Thread::kClaimed;
          if (publish_ == Publish::kBeforeCopy) finish(next, thread.claim);
          break;
        case Thread::kClaimed:
          ++next.copies[post_of(thread.claim)][thread.claim.chunk];
          thread.at = Thread::kCopied;
          break;
        case Thread::kCopied:
          if (publish_ == Publish::kWithFinish) finish(next, thread.claim);
          thread.at = Thread::kIdle;
          break;
      }
      if (!step(next)) return false;
    }
    if (!moved) {
      ++ends;
      CHECK(s.posted == kPosts && s.waited == kPosts && !s.queue.has_work());
      for (int64_t p = 0; p < kPosts; ++p)
        for (int64_t c = 0; c < kChunksOf[p]; ++c) CHECK(s.copies[p][c] == 1);
    }
    return true;
  }

  static void finish(State& s, const clo::TransferQueue::Claim& claim) {
    if (s.queue.finish(claim)) s.ready[claim.layer] = claim.sequence;
  }

  const Publish publish_;
  std::set<std::vector<int64_t>> seen_;
};

}  // namespace

int main() {
  Search engine(Publish::kWithFinish);
  CHECK(engine.run());
  CHECK(engine.states > 100 && engine.ends >= 1);
  CHECK(!Search(Publish::kBeforeCopy).run());
  std::printf("%lld states, %lld steps, %lld ends: ready never precedes the rows\n",
              static_cast<long long>(engine.states), static_cast<long long>(engine.steps),
              static_cast<long long>(engine.ends));
}
