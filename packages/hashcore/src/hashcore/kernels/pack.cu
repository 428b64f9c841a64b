// Bit codes (docs/algorithm.md, eq. 1): bit j of word w = [x_{32 w + j} > 0]; -0.0 and NaN are 0.
//
// x is a flat array of 32 * words numbers, because a code's words are contiguous. A warp computes 32 words: it reads
// one number per lane and word, with eight coalesced loads in flight; a ballot makes each a word; lane i keeps word i,
// and the words are written as one 128-byte store. Bytes per word: 32 * sizeof(T) read, 4 written; reads are the limit.
#include "common.cuh"

constexpr int PACK_THREADS = 256;
constexpr int BATCH = 8;

// Whether x is positive, from its bits, without conversion.
__device__ __forceinline__ bool positive(Float16 x) { return x.bits - 1u < 0x7c00u; }   // 0x7c00 is +inf
__device__ __forceinline__ bool positive(BFloat16 x) { return x.bits - 1u < 0x7f80u; }  // 0x7f80 is +inf
template <class T>
__device__ __forceinline__ bool positive(T x) {
  return x > T(0);
}

template <class T>
__device__ __forceinline__ void pack(const T* __restrict__ x, u32* __restrict__ codes, i64 words) {
  const int lane = threadIdx.x & 31;
  const i64 first = (i64(blockIdx.x) * (PACK_THREADS / 32) + (threadIdx.x >> 5)) * 32;
  u32 mine = 0;
#pragma unroll 1
  for (int base = 0; base < 32; base += BATCH) {
    if (first + base >= words) break;  // the same for the whole warp
    T value[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const i64 word = first + base + i;
      value[i] = word < words ? x[word * 32 + lane] : T();
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const u32 word = __ballot_sync(FULL_WARP, positive(value[i]));
      if (lane == base + i) mine = word;
    }
  }
  if (first + lane < words) codes[first + lane] = mine;
}

#define PACK_KERNEL(name, T)                                              \
  extern "C" __global__ void __launch_bounds__(PACK_THREADS)              \
      name(const T* __restrict__ x, u32* __restrict__ codes, i64 words) { \
    pack(x, codes, words);                                                \
  }

PACK_KERNEL(pack_f32, float)
PACK_KERNEL(pack_f64, double)
PACK_KERNEL(pack_f16, Float16)
PACK_KERNEL(pack_bf16, BFloat16)
PACK_KERNEL(pack_u8, unsigned char)
PACK_KERNEL(pack_i8, signed char)
PACK_KERNEL(pack_i16, short)
PACK_KERNEL(pack_i32, int)
PACK_KERNEL(pack_i64, i64)
