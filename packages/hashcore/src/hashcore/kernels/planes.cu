// Queries as weighted bit planes: real weights quantised (docs/algorithm.md, eq. 5), one-bit groups merged (eq. 3).
//
// One warp a row; lane j of word w is dimension 32 w + j. A row of weights is read twice, first for its largest
// magnitude; the second read comes from the L1 cache. A decode step has a few rows: latency is what this costs, not
// bandwidth. Arithmetic is float32 in the order of hashcore.reference: the division is correctly rounded, and twice a
// floor plus one is exact whether it is fused or not.
#include "common.cuh"

constexpr int PLANES_THREADS = 128;
constexpr float TINY = 0x1p-126f;  // the smallest normal float32: the scale of a row of zeros

constexpr u32 HUGE_BITS = 0x7f7fffffu;  // the largest float32; infinity counts as it, NaN as 0

// The scale of a row: its levels are odd multiples of it.
template <class T>
__device__ __forceinline__ float row_scale(const T* __restrict__ w, i64 size, int lane, float top) {
  u32 peak = 0;  // magnitudes order like their bits, and NaN lies above infinity
  for (i64 i = lane; i < size; i += 32) {
    u32 magnitude = __float_as_uint(real(w[i])) & 0x7fffffffu;
    magnitude = magnitude > HUGE_BITS + 1 ? 0 : magnitude > HUGE_BITS ? HUGE_BITS : magnitude;
    peak = peak > magnitude ? peak : magnitude;
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const u32 other = __shfl_xor_sync(FULL_WARP, peak, step);
    peak = peak > other ? peak : other;
  }
  const float scale = (top < 63.0f ? 0.8f : 1.0f) * __uint_as_float(peak) / top;  // 63: six planes
  return scale < TINY ? TINY : scale;
}

// (level + m) / 2, the number whose binary digits the planes hold. The level of NaN is -1.
__device__ __forceinline__ int plane_digits(float w, float scale, float top) {
  const float huge = __uint_as_float(HUGE_BITS);
  w = w > huge ? huge : w < -huge ? -huge : w;
  const float level = 2.0f * floorf(w / scale * 0.5f) + 1.0f;
  const float clamped = level < -top ? -top : level > top ? top : level;
  return w == w ? (int(clamped) + int(top)) >> 1 : int(top) >> 1;
}

template <class T>
__device__ __forceinline__ void quantise_row(const T* __restrict__ w, u32* __restrict__ planes, i32 rows, i32 words,
                                             i32 count) {
  const int row = blockIdx.x * (PLANES_THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;  // the whole warp
  w += i64(row) * words * 32;
  planes += i64(row) * count * words;
  const float top = float((1 << count) - 1);
  const float scale = row_scale(w, i64(words) * 32, lane, top);
  for (int i = 0; i < words; i++) {
    const int digits = plane_digits(real(w[32 * i + lane]), scale, top);
    for (int p = 0; p < count; p++) {
      const u32 word = __ballot_sync(FULL_WARP, digits >> p & 1);
      if (lane == p) planes[p * words + i] = word;
    }
  }
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
    quantise_row(w, planes, rows, words, count);                                                \
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

// Lane j counts bit j over the codes of the group. The last weight is irregular, group - (2^(count - 1) - 1), so its
// bit is set only where the lighter planes cannot hold the count; what is left then fits them.
extern "C" __global__ void __launch_bounds__(PLANES_THREADS)
    group_planes(const u32* __restrict__ codes, u32* __restrict__ planes, i32 rows, i32 group, i32 words, i32 count) {
  const int row = blockIdx.x * (PLANES_THREADS / 32) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;
  codes += i64(row) * group * words;
  planes += i64(row) * count * words;
  const int small = (1 << (count - 1)) - 1, last = group - small;
  for (int i = 0; i < words; i++) {
    int set = 0;
    for (int g = 0; g < group; g++) set += codes[i64(g) * words + i] >> lane & 1;
    const bool carry = set > small;
    if (carry) set -= last;
    for (int p = 0; p < count; p++) {
      const u32 word = __ballot_sync(FULL_WARP, p == count - 1 ? carry : set >> p & 1);
      if (lane == p) planes[p * words + i] = word;
    }
  }
}
