// One warp's matrix product of 16-bit floats, and the conversions around it; for the CPU, the same by definition.
//
// Fragments as PTX lays them out (mma.m16n8k16): lane = 4 g + t holds
//     A 16 x 16: a[0] = row g, a[1] = row g + 8, both columns 2t, 2t + 1; a[2], a[3] = the same rows, columns 8 further
//     B 16 x 8:  b[0] = rows 2t, 2t + 1 of column g; b[1] = rows 8 further
//     C 16 x 8:  c[0], c[1] = row g, columns 2t, 2t + 1; c[2], c[3] = row g + 8
// with the first of two 16-bit numbers in the lower half of a word.
//
// SPARSE_BF16: 1 for bfloat16, 0 for float16.
#pragma once
#include "common.cuh"

#if SPARSE_BF16
using Half = BFloat16;
#else
using Half = Float16;
#endif

struct Rows {
  i64 batch;  // strides in elements
  i64 head;
  i64 token;
};

#ifdef HOSTSIM

inline u16 narrow(float x) {  // to the nearest, ties to even
  const u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return u16(sign | 0x7fffu);  // NaN
#if SPARSE_BF16
  return u16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#else
  if (magnitude >= 0x477ff000u) return u16(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) return u16(sign | u32(std::nearbyint(__uint_as_float(magnitude) * 0x1p24f)));
  return u16(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
#endif
}

inline u32 narrow2(float low, float high) { return u32(narrow(low)) | u32(narrow(high)) << 16; }

inline float half_of(u32 word, int upper) { return real(Half{u16(upper ? word >> 16 : word)}); }

__device__ inline void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  __shared__ u32 held[32][32][6];
  u32(*warp)[6] = held[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; i++) warp[lane][i] = a[i];
  for (int i = 0; i < 2; i++) warp[lane][4 + i] = b[i];
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int below = i / 2, column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++) {
      const int from = k % 8 / 2, far = k / 8;
      c[i] += half_of(warp[4 * g + from][2 * far + below], k % 2) * half_of(warp[4 * column + from][4 + far], k % 2);
    }
  }
  __syncwarp();
}

#else

__device__ __forceinline__ u32 narrow2(float low, float high) {
  u32 both;
#if SPARSE_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
  return both;
}

__device__ __forceinline__ u16 narrow(float x) { return u16(narrow2(x, 0.0f)); }

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if SPARSE_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
