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

struct Sums {
  const double* keys;
  const double* values;
  const float* spread;
  const i8* levels;
  const float* scales;
};

// What is written; the sums after the step: null if not wanted.
struct Results {
  float* mean_keys;
  float* rest;
  double* tokens;  // f64 [B]: number of tokens
  double* keys;
  double* values;
  float* spread;
  i8* levels;
  float* scales;
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

// Masks that differ by row; null pointers: no mask.
struct Padding {
  const i64* visible;  // n of each row
  const u8* shown;     // which tokens a row sees
  i64 shown_batch;
  u8* before;  // which tokens the sums cover
  i64 before_batch;
  const i64* length;  // replaces `tokens` for a static cache, whose length the host does not know
  i64* summed;        // replaces Token's, [B][Hkv], with `length`: each block reads and writes its own
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

__device__ __forceinline__ bool is_aligned(const void* at) { return reinterpret_cast<i64>(at) % 16 == 0; }

// Eight numbers.
template <bool ALIGNED>
__device__ __forceinline__ uint4 eight(const Half* from) {
  if constexpr (ALIGNED) {
    return *reinterpret_cast<const uint4*>(from);
  } else {
    u32 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = u32(from[2 * i].bits) | u32(from[2 * i + 1].bits) << 16;
    return {x[0], x[1], x[2], x[3]};
  }
}

// The pieces of a thread that it has; the others are zeros.
template <int COUNT>
__device__ __forceinline__ void load(const Half* const (&from)[COUNT], const bool (&has)[COUNT], bool aligned,
                                     uint4 (&to)[COUNT]) {
#pragma unroll
  for (int j = 0; j < COUNT; j++) to[j] = {0, 0, 0, 0};
  if (aligned) {
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      if (has[j]) to[j] = eight<true>(from[j]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      if (has[j]) to[j] = eight<false>(from[j]);
    }
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
  const i64 keys = token.key_batch | token.key_head | token.key_token;
  const i64 values = token.value_batch | token.value_head | token.value_token;
  load(from, has, is_aligned(token.k) && is_aligned(token.v) && (keys | values) % 8 == 0, to);
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

// Whether the sums of a row do not cover exactly the visible tokens before `at`, in this thread's part of the block's
// share of them. Torch's bools are 0 or 1, and a missing mask is all ones.
__device__ __forceinline__ bool is_changed(const Padding& row, int batch, int head, int heads, int at) {
  if (!row.shown && !row.before) return false;
  const bool is_masked = row.shown, was_masked = row.before;
  const u8* now = is_masked ? row.shown + batch * row.shown_batch : nullptr;
  const u8* then = was_masked ? row.before + batch * row.before_batch : nullptr;
  const int share = int((u32(at) + u32(heads) - 1) / u32(heads) + 15) / 16 * 16, thread = threadIdx.x;
  const int begin = share * head < at ? share * head : at, end = begin + share < at ? begin + share : at;
  const int wide = is_aligned(now) && is_aligned(then) ? begin + (end - begin) / 16 * 16 : begin;
  constexpr int AT_ONCE = 4;  // loads in flight
  const uint4 all = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
  u32 other = 0;
#pragma unroll 1
  for (int i = begin + 16 * thread; i < wide; i += 16 * THREADS * AT_ONCE) {
    uint4 a[AT_ONCE], b[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int at = i + 16 * THREADS * j;
      a[j] = b[j] = all;
      if (is_masked && at < wide) a[j] = *reinterpret_cast<const uint4*>(now + at);
      if (was_masked && at < wide) b[j] = *reinterpret_cast<const uint4*>(then + at);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      other |= (a[j].x ^ b[j].x) | (a[j].y ^ b[j].y) | (a[j].z ^ b[j].z) | (a[j].w ^ b[j].w);
    }
  }
#pragma unroll 1
  for (int i = wide + thread; i < end; i += THREADS * AT_ONCE) {
    u32 a[AT_ONCE], b[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int at = i + THREADS * j;
      a[j] = b[j] = 1;
      if (is_masked && at < end) a[j] = now[at];
      if (was_masked && at < end) b[j] = then[at];
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) other |= a[j] ^ b[j];
  }
  return other;
}
