// Scores of 128-bit codes by the tensor cores' product of bits (docs/algorithm.md, eq. 4), which runs natively from
// compute capability 8.0 to 9.0. With `and` alone, as xor is emulated on 9.0:
//
//     sum_p w_p popc(~(B_p xor c)) = sum_p w_p (128 - popc(B_p)) + sum_p 2 w_p popc(B_p & c) - (sum_p w_p) popc(c)
//
// One product m16n8k128 counts popc(B_p & c) of 16 keys and up to 7 planes, and popc(c) in the column of ones. A warp
// needs a third of the instructions of the counter in common.cuh; that reaches its limit before memory does.
//
// Fragments as PTX lays them out: lane = 4 g + t holds
//     A 16 x 128: a[0] = bits 32 t on of row g, a[1] = the same of row g + 8
//     B 128 x 8:  b = bits 32 t on of column g
//     C 16 x 8:   c[0], c[1] = row g, columns 2 t, 2 t + 1; c[2], c[3] = row g + 8
#pragma once
#include "lists.cuh"

#ifdef HOSTSIM
__device__ inline void count_common_bits(int (&c)[4], u32 first, u32 second, u32 b) {
  __shared__ u32 held[32][32][3];
  u32(*warp)[3] = held[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  warp[lane][0] = first, warp[lane][1] = second, warp[lane][2] = b;
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    c[i] = 0;
    for (int k = 0; k < 4; k++) c[i] += __popc(warp[4 * g + k][i / 2] & warp[4 * (2 * t + i % 2) + k][2]);
  }
  __syncwarp();
}
#else
__device__ __forceinline__ void count_common_bits(int (&c)[4], u32 first, u32 second, u32 b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(first), "r"(second), "r"(b), "r"(0));
}
#endif

// A row's planes as a lane holds them. The whole warp must call its functions.
template <int PLANES>
struct TensorQuery {
  static_assert(PLANES <= 7);
  u32 column;  // word t of plane g; of the column of ones for g = 7
  int factor[2];  // of columns 2 t, 2 t + 1
  u32 fixed;      // what does not depend on the key, for both halves of a word; in lane t = 0

  __device__ __forceinline__ TensorQuery(const u32* from, int lane, const Weights& weights) {
    const int g = lane / 4, t = lane % 4;
    column = g < PLANES ? __ldg(from + 4 * g + t) : g == 7 ? ~0u : 0u;
    int own = 0, sum = 0;  // the weight of plane g, and of all
    factor[0] = factor[1] = 0;
#pragma unroll
    for (int p = 0; p < PLANES; p++) {  // no index into an argument: that would need a copy in local memory
      sum += weights.of[p];
      if (p == g) own = weights.of[p];
      if (p / 2 == t) factor[p % 2] = 2 * weights.of[p];
    }
    if (t == 3) factor[1] = -sum;
    int unset = own * __popc(~column);
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) unset += __shfl_xor_sync(FULL_WARP, unset, step);
    fixed = t == 0 ? u32(unset) * 0x10001u : 0;
  }

  // The score of each lane's key.
  __device__ __forceinline__ int score(const u32 (&key)[4]) const {
    const int t = threadIdx.x % 4;
    const bool odd = t & 1, high = t & 2;
    // Four lanes exchange words, so that lane t holds word t of each of their four keys.
    const u32 one = __shfl_xor_sync(FULL_WARP, odd ? key[0] : key[1], 1);
    const u32 two = __shfl_xor_sync(FULL_WARP, odd ? key[2] : key[3], 1);
    const u32 a = odd ? one : key[0], b = odd ? key[1] : one, c = odd ? two : key[2], d = odd ? key[3] : two;
    const u32 three = __shfl_xor_sync(FULL_WARP, high ? a : c, 2), four = __shfl_xor_sync(FULL_WARP, high ? b : d, 2);
    const u32 near = sums_of(high ? three : a, high ? four : b), far = sums_of(high ? c : three, high ? d : four);
    // Two scores to a word, below 2^16 each: a sum over four lanes, of which each needs that of its own key.
    u32 both = (high ? far : near) + __shfl_xor_sync(FULL_WARP, high ? near : far, 2);
    both += __shfl_xor_sync(FULL_WARP, both, 1);
    return odd ? both >> 16 : both & 0xffffu;
  }

 private:
  // This lane's share of the scores of two keys.
  __device__ __forceinline__ u32 sums_of(u32 first, u32 second) const {
    int count[4];
    count_common_bits(count, first, second, column);
    const int low = count[0] * factor[0] + count[1] * factor[1];
    return u32(low) + fixed + u32(count[2] * factor[0] + count[3] * factor[1]) * 0x10000u;
  }
};
