// Queries as weighted bit planes: real weights quantised (docs/algorithm.md, eq. 5), one-bit groups merged (eq. 3).
//
// One warp per row (planes.cuh). A row of weights is read twice, first for its largest magnitude; the second read hits
// the L1 cache. A decode step has few rows, so latency matters, not bandwidth.
#include "planes.cuh"

constexpr int PLANES_THREADS = 128;
template <class T>
__device__ __forceinline__ void quantise_rows(const T* __restrict__ w, u32* __restrict__ planes, i32 rows, i32 words,
                                              i32 count) {
  const int row = blockIdx.x * (PLANES_THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;  // the whole warp
  w += i64(row) * words * 32;
  planes += i64(row) * count * words;
  const float scale = row_scale(w, i64(words) * 32, lane, float((1 << count) - 1));
  for (int i = 0; i < words; i++) quantise_word(w + 32 * i, scale, count, lane, planes + i, words);
}

// Levels instead of planes: any row length, levels as i16.
template <class T>
__device__ __forceinline__ void quantise_levels(const T* __restrict__ w, short* __restrict__ levels,
                                                float* __restrict__ scales, i32 rows, i64 size, i32 count) {
  const int row = blockIdx.x * (PLANES_THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;
  w += row * size;
  levels += row * size;
  const float top = float((1 << count) - 1), scale = row_scale(w, size, lane, top);
  for (i64 i = lane; i < size; i += 32) levels[i] = short(2 * plane_digits(real(w[i]), scale, top) - int(top));
  if (lane == 0) scales[row] = scale;
}

#define PLANES_KERNEL(name, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(PLANES_THREADS)                                  \
      name(const T* __restrict__ w, u32* __restrict__ planes, i32 rows, i32 words, i32 count) { \
    quantise_rows(w, planes, rows, words, count);                                               \
  }

#define LEVELS_KERNEL(name, T)                                                                                  \
  extern "C" __global__ void __launch_bounds__(PLANES_THREADS)                                                  \
      name(const T* __restrict__ w, short* __restrict__ levels, float* __restrict__ scales, i32 rows, i64 size, \
           i32 count) {                                                                                         \
    quantise_levels(w, levels, scales, rows, size, count);                                                      \
  }

LEVELS_KERNEL(levels_f32, float)
LEVELS_KERNEL(levels_f16, Float16)
LEVELS_KERNEL(levels_bf16, BFloat16)
PLANES_KERNEL(planes_f32, float)
PLANES_KERNEL(planes_f16, Float16)
PLANES_KERNEL(planes_bf16, BFloat16)

// Lane j counts bit j over the codes of the group.
extern "C" __global__ void __launch_bounds__(PLANES_THREADS)
    group_planes(const u32* __restrict__ codes, u32* __restrict__ planes, i32 rows, i32 group, i32 words, i32 count) {
  const int row = blockIdx.x * (PLANES_THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;
  codes += i64(row) * group * words;
  planes += i64(row) * count * words;
  for (int i = 0; i < words; i++) {
    int set = 0;
    for (int g = 0; g < group; g++) set += codes[i64(g) * words + i] >> lane & 1;
    for (int p = 0; p < count; p++) {
      const u32 word = __ballot_sync(FULL_WARP, has_vote(set, group, count, p));
      if (lane == p) planes[p * words + i] = word;
    }
  }
}
