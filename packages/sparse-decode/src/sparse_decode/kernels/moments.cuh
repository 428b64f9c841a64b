// What add_token (moments.cu) is given, and its loads, all of which are issued before the first result is used.
#pragma once
#include "mma.cuh"

using u8 = unsigned char;
using i8 = signed char;

constexpr int DIM = SPARSE_DIM, VALUE_DIM = SPARSE_VALUE_DIM, SIZE = DIM + VALUE_DIM, FOLD = SPARSE_FOLD;
constexpr int THREADS = 256, WARPS = THREADS / 32, MAX_GROUP = 16, HEADS = 4;
__device__ constexpr int up(int a, int b) { return (a + b - 1) / b; }
constexpr int COMPONENTS = up(SIZE, THREADS);                        // of keys and values, to a thread
constexpr int PIECES = up(FOLD * SIZE / 8, THREADS);                 // 8 numbers of fresh keys or values, to a thread
constexpr int QUERIES = up(MAX_GROUP * DIM / 8, THREADS);            // 8 numbers of q, to a thread
constexpr int LANES = VALUE_DIM / 4, PARTS = THREADS / LANES;        // threads of a row of levels; rows at once
constexpr int TURNS = up(DIM / 4, PARTS);                            // 4 rows of levels, to a thread
constexpr bool EVEN = THREADS % LANES == 0 && DIM / 4 % PARTS == 0;  // every turn of every thread has rows
constexpr int DOT_LANES = 8;                                         // threads that share a token's products
constexpr int BLOCKS_PER_SM = SIZE > 256 ? 1 : 2;                    // at most 255 and 128 registers
static_assert(DIM % 16 == 0 && VALUE_DIM % 16 == 0 && DIM <= THREADS && VALUE_DIM <= THREADS);
static_assert(FOLD < THREADS / DOT_LANES && FOLD % 4 == 0);
static_assert(MAX_GROUP % HEADS == 0);

// The sums: read, and every FOLD steps written in place, where each block has those of its head.
struct State {
  double* keys;
  double* values;
  float* spread;
  i8* levels;
  float* scales;
};

struct Results {
  float* mean_keys;
  float* rest;
};

struct Token {
  const Half* k;
  const Half* v;
  i64 key_batch;  // strides in elements
  i64 key_head;
  i64 key_token;
  i64 value_batch;
  i64 value_head;
  i64 value_token;
  const Half* q;
  const float* slopes;  // per query head, times the factor on the logits
  i32 kv_heads;
  i32 group;   // query heads per KV head
  i32 tokens;  // including the new one and padding
  i32 summed;  // in the sums, including padding
};

// What differs by row; null pointers: rows see all tokens, and the sums begin with the first.
struct Bounds {
  const i64* interval;  // [B][2]: first and last (exclusive) of the tokens that a row sees
  const i64* starts;    // [B]: first token of the sums
  i64* summed;          // [B][Hkv]: replaces Token's, which the host does not know; each block has its own
};

// One 16-byte access.
struct __align__(16) Four {
  float at[4];
};

__device__ __forceinline__ Four four(const float* from) { return *reinterpret_cast<const Four*>(from); }

__device__ __forceinline__ Four four(const Half* from) {
  const uint2 x = *reinterpret_cast<const uint2*>(from);
  return {real(Half{u16(x.x)}), real(Half{u16(x.x >> 16)}), real(Half{u16(x.y)}), real(Half{u16(x.y >> 16)})};
}

// The tokens that are not in the sums, and what the means are. A row has a key, then a value.
struct Fresh {
  Half token[FOLD][SIZE];
  float base[SIZE];   // mean of the tokens in the sums
  float drift[SIZE];  // how far the others move it

  __device__ __forceinline__ float far(int t, int i) const { return real(token[t][i]) - base[i]; }
  __device__ __forceinline__ Four fars(int t, int i) const {
    Four x = four(token[t] + i);
    const Four mean = four(base + i);
#pragma unroll
    for (int c = 0; c < 4; c++) x.at[c] -= mean.at[c];
    return x;
  }
};

// The pieces of a thread that it has, 8 numbers each; the others are zeros.
template <int COUNT>
__device__ __forceinline__ void load(const Half* const (&from)[COUNT], const bool (&has)[COUNT], uint4 (&to)[COUNT]) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) to[j] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < COUNT; j++) {
    if (has[j]) to[j] = *reinterpret_cast<const uint4*>(from[j]);
  }
}

// A thread's pieces of `count` keys and values from token `first` on; zeros after these.
template <class Position>
__device__ __forceinline__ void load_fresh(const Token& token, int batch, int head, Position first, int count,
                                           uint4 (&to)[PIECES]) {
  const Half* from[PIECES];
  bool has[PIECES];
#pragma unroll
  for (int j = 0; j < PIECES; j++) {
    const u32 i = threadIdx.x + j * THREADS, t = i / (SIZE / 8), c = i % (SIZE / 8) * 8;
    const bool is_key = c < DIM;
    const i64 row = batch * (is_key ? token.key_batch : token.value_batch) +
                    head * (is_key ? token.key_head : token.value_head) +
                    (i64(first) + t) * (is_key ? token.key_token : token.value_token);
    from[j] = (is_key ? token.k : token.v) + (row + c - (is_key ? 0 : DIM));
    has[j] = int(t) < count;
  }
  load(from, has, to);
}

// A thread's 4 columns of levels of its rows; zeros after the last row.
__device__ __forceinline__ void load_levels(const i8* levels, u32 (&to)[TURNS][4]) {
  const int part = threadIdx.x / LANES, column = threadIdx.x % LANES * 4;
  const i8* const from = levels + (4 * part * VALUE_DIM + column);
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      to[turn][i] = 0;
      if (EVEN || (part < PARTS && 4 * (part + PARTS * turn) < DIM)) {
        to[turn][i] = *reinterpret_cast<const u32*>(from + (4 * PARTS * turn + i) * VALUE_DIM);
      }
    }
  }
}

// The compiler computes nothing from x before this place.
__device__ __forceinline__ void hold(u32& x) {
#ifndef HOSTSIM
  asm volatile("" : "+r"(x));
#endif
}
