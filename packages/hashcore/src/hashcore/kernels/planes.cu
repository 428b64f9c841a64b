// Queries as weighted bit planes: real weights quantised (docs/algorithm.md, eq. 5).
//
// One warp per row (planes.cuh). A row of weights is read twice, first for its largest magnitude; the second read hits
// the L1 cache. A decode step has few rows, so latency matters, not bandwidth.
#include "planes.cuh"

constexpr int PLANES_THREADS = 128;

extern "C" __global__ void __launch_bounds__(PLANES_THREADS)
    quantise_rows(const float* __restrict__ w, u32* __restrict__ planes, i32 rows, i32 words, i32 count) {
  const int row = blockIdx.x * (PLANES_THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;  // the whole warp
  w += i64(row) * words * 32;
  planes += i64(row) * count * words;
  const float scale = row_scale(w, i64(words) * 32, lane, float((1 << count) - 1));
  for (int i = 0; i < words; i++) quantise_word(w + 32 * i, scale, count, lane, planes + i, words);
}
