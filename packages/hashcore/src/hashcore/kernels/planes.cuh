// Quantises rows of real weights to levels (docs/algorithm.md, eq. 5), one warp per row: lane j of word w has dimension
// 32 w + j.
//
// Arithmetic is float32 in the order of hashcore.reference: the division is correctly rounded, and 2 floor(x) + 1 is
// exact, fused or not.
#pragma once
#include "common.cuh"

constexpr float TINY = 0x1p-126f;  // the smallest normal float32: the scale of a row of zeros

constexpr u32 HUGE_BITS = 0x7f7fffffu;  // the largest float32, which replaces infinity; NaN counts as 0

// The scale of a row: its levels are odd multiples of it.
__device__ __forceinline__ float row_scale(const float* w, i64 size, int lane, float top) {
  u32 peak = 0;  // magnitudes order like their bits, with NaN above infinity
  for (i64 i = lane; i < size; i += 32) {
    u32 magnitude = __float_as_uint(w[i]) & 0x7fffffffu;
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

// The planes' words, `apart` words from each other, of 32 numbers of a row, by one warp.
__device__ __forceinline__ void quantise_word(const float* w, float scale, i32 count, int lane, u32* to, i64 apart) {
  const int digits = plane_digits(w[lane], scale, float((1 << count) - 1));
  for (int p = 0; p < count; p++) {
    const u32 word = __ballot_sync(FULL_WARP, digits >> p & 1);
    if (lane == p) to[p * apart] = word;
  }
}

// Whether plane p of `count` has the bit that `set` of a group's codes have (eq. 3). The last weight is irregular, group
// - (2^(count - 1) - 1), so its bit is set only if the other planes cannot represent the count; they can represent the
// rest.
__device__ __forceinline__ bool has_vote(int set, int group, int count, int p) {
  const int small = (1 << (count - 1)) - 1;
  const bool carry = set > small;
  return p == count - 1 ? carry : (carry ? set - (group - small) : set) >> p & 1;
}
