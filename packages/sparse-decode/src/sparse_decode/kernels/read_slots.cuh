// What a warp of gather.cu reads of its slots: the words of keys and values, all of which are issued together.
#pragma once
#include "mma.cuh"
#include "slots.cuh"

#ifndef SPARSE_HEADS
#define SPARSE_HEADS 8
#endif

constexpr int GATHER_THREADS = 128, WARPS = GATHER_THREADS / 32, SLOTS = 16;
constexpr int HEADS = SPARSE_HEADS, SIDES = HEADS / 8;  // heads g and g + 8 of a lane 4 g + t
static_assert(HEADS == 8 || HEADS == 16);

// Words (of two numbers) per read of a lane: 16 bytes if the row length allows it.
constexpr int KEY_WORDS = DIM % 32 == 0 ? 4 : 2;
constexpr int VALUE_WORDS = VALUE_DIM % 64 == 0 ? 4 : VALUE_DIM % 32 == 0 ? 2 : 1;
constexpr int KEY_READS = DIM / (8 * KEY_WORDS), STEPS = DIM / 16;  // four lanes share a key
constexpr int VALUE_READS = VALUE_DIM / (16 * VALUE_WORDS), TILES = VALUE_DIM / 16;  // eight lanes share a value
constexpr int SUMS = TILES * SIDES * 4;                                   // registers of a lane
constexpr int MIN_BLOCKS = DIM + VALUE_DIM <= 256 && SIDES == 1 ? 3 : 2;  // limited by these, and by loads in flight

// The reads of values that are issued with those of keys, as registers allow; other values are read when the keys have
// been multiplied. Addresses, logits and the like take about 45, and 30 more with two sides.
constexpr int FREE = (MIN_BLOCKS == 3 ? 112 : 176) - 32 * (SIDES - 1) - SUMS - 2 * KEY_READS * KEY_WORDS;
constexpr int FIT = FREE > 0 ? FREE / (4 * VALUE_WORDS) : 0, EARLY_READS = FIT < VALUE_READS ? FIT : VALUE_READS;

// Sums in shared memory: a lane has CHUNK neighbouring columns of two heads per side. Lanes of equal t write next to
// each other, and the padding of rows puts those of other t into other banks.
constexpr int CHUNK = VALUE_WORDS > 1 ? 4 : 2, CHUNKS = VALUE_DIM / CHUNK, SUMS_ROW = VALUE_DIM + 4;

// Read words if `used`, without a branch: else a lane's next loads would not be issued until the branch is decided.
template <int WORDS>
__device__ __forceinline__ void read(const Half* from, bool used, u32 (&to)[WORDS]) {
  static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4);
#pragma unroll
  for (int w = 0; w < WORDS; w++) to[w] = 0;  // of unused slots: 0 * NaN is NaN
#ifdef HOSTSIM
  if (reinterpret_cast<u64>(from) % (4 * WORDS)) __builtin_trap();
  for (int w = 0; used && w < WORDS; w++) to[w] = reinterpret_cast<const u32*>(from)[w];
#else
  // volatile: in the order of the program, so before the products
  if constexpr (WORDS == 4) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                 : "l"(from), "r"(u32(used)));
  } else if constexpr (WORDS == 2) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.v2.u32 {%0, %1}, [%2];}"
                 : "+r"(to[0]), "+r"(to[1])
                 : "l"(from), "r"(u32(used)));
  } else {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u32 %0, [%1];}"
                 : "+r"(to[0])
                 : "l"(from), "r"(u32(used)));
  }
#endif
}

// The column of q that lane 4 g + t holds in word `part` (0 or 1) of step `step`, matching the key's words.
__device__ __forceinline__ int key_column(int step, int t, int part) {
  constexpr int IN_READ = KEY_WORDS / 2;  // steps that one read feeds
  return 8 * KEY_WORDS * (step / IN_READ) + 2 * KEY_WORDS * t + 4 * (step % IN_READ) + 2 * part;
}

// The running sums of one warp: index [side] is head g + 8 side, but out[tile][side] has the heads 2t and 2t + 1, of
// which [0] and [1] are column g of the tile's first half, [2] and [3] that of its second half.
struct Sums {
  float out[TILES][SIDES][4];
  float top[SIDES], total[SIDES], logits[SIDES];
};

__device__ __forceinline__ float over_quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ __forceinline__ float over_quad_sum(float x) {
  x += __shfl_xor_sync(FULL_WARP, x, 1);
  return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// The component of a value in row g of half a tile.
__device__ __forceinline__ int value_column(int half, int g) {
  constexpr int IN_READ = 2 * VALUE_WORDS;  // halves that one read feeds
  return IN_READ * (8 * (half / IN_READ) + g) + half % IN_READ;
}

// The slots of one step of a warp.
struct Slots {
  i32 key[2];       // the places of those whose keys this lane reads, or -1
  i32 value[2][2];  // of those whose values it reads, whose logits it holds: [tile][column]
};

// Step (1): what a lane reads of its slots.
struct Words {
  u32 keys[2][KEY_READS][KEY_WORDS];
  u32 values[VALUE_READS][2][2][VALUE_WORDS];
};

__device__ __forceinline__ void read_keys(const Half* keys, const Rows& at, const Slots& slots, const Pages& pages,
                                          Words& words) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    const i32 place = slots.key[tile];
    const Half* row = row_at(keys, at, place < 0 ? 0 : place, pages) + 2 * KEY_WORDS * t;
#pragma unroll
    for (int r = 0; r < KEY_READS; r++) read(row + 8 * KEY_WORDS * r, place >= 0, words.keys[tile][r]);
  }
}

template <int FROM, int TO>
__device__ __forceinline__ void read_values(const Half* values, const Rows& at, const Slots& slots, const Pages& pages,
                                            Words& words) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < (FROM < TO ? 4 : 0); i++) {
    const i32 place = slots.value[i / 2][i % 2];
    const Half* row = row_at(values, at, place < 0 ? 0 : place, pages) + 2 * VALUE_WORDS * g;
#pragma unroll
    for (int r = FROM; r < TO; r++) read(row + 16 * VALUE_WORDS * r, place >= 0, words.values[r][i / 2][i % 2]);
  }
}
