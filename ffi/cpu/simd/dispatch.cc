#include "cpu/simd/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/simd/codes.h"
#include "cpu/simd/rows.h"
#include "cpu/simd/scores.h"

namespace clo {
namespace {

enum class Isa { kGeneric, kAvx2, kAvx512 };

constexpr const char* kNames[] = {"generic", "avx2", "avx512"};

Isa best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#define CLO_HAS(feature) (__builtin_cpu_supports(feature) != 0)
  const bool avx2 = CLO_HAS("avx2") && CLO_HAS("fma") && CLO_HAS("bmi") && CLO_HAS("bmi2");
  const bool avx512 = avx2 && CLO_HAS("avx512f") && CLO_HAS("avx512bw") && CLO_HAS("avx512dq") && CLO_HAS("avx512vl") &&
                      CLO_HAS("avx512cd") && CLO_HAS("avx512vpopcntdq") && CLO_HAS("avx512vbmi") &&
                      CLO_HAS("avx512vnni");
#undef CLO_HAS
  return avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kGeneric;
#else
  return Isa::kGeneric;
#endif
}

Isa choose() {
  const Isa best = best_isa();
  const char* text = std::getenv("CLO_JAX_ISA");
  if (text == nullptr || *text == '\0') return best;
  for (const Isa isa : {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512}) {
    if (std::string(text) != kNames[static_cast<int>(isa)]) continue;
    if (isa > best)
      throw std::invalid_argument("CLO_JAX_ISA: got '" + std::string(text) + "', but this machine supports only " +
                                  kNames[static_cast<int>(best)] + " and less");
    return isa;
  }
  throw std::invalid_argument("CLO_JAX_ISA: got '" + std::string(text) + "', wanted generic, avx2 or avx512");
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

#if defined(__x86_64__)
#define CLO_PICK(name)                                   \
  (isa() == Isa::kAvx512 ? *name##_table_avx512()        \
                         : isa() == Isa::kAvx2 ? *name##_table_avx2() : *name##_table_generic())
#else
#define CLO_PICK(name) (*name##_table_generic())
#endif

}  // namespace

const char* isa_name() { return kNames[static_cast<int>(isa())]; }

const CodesTable& codes_table() { return CLO_PICK(codes); }
const RowsTable& rows_table() { return CLO_PICK(rows); }
const ScoresTable& scores_table() { return CLO_PICK(scores); }

}  // namespace clo
