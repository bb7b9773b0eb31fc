// Exact selection of the k largest 16-bit keys.
#pragma once

#include <cstdint>

namespace clo {

// Writes offset + i for the k largest of keys[0, count), ascending in i; of equal keys the first are taken. 0 < k <= count.
// `keys` must have room for a multiple of kScoreBlock keys; those after `count` are ignored.
void topk(const uint16_t* keys, int64_t count, int64_t k, int32_t offset, int32_t* indices);

}  // namespace clo
