// The remainder's values in a decode step (docs/algorithm.md, eq. 16), from sums over all but the last few tokens.
//
//     rest_h = mean v + slope_h / n (S^T q_h + sum of (q_h . (k - m_k)) (v - m_v)) - slope_h (q_h . d_k) d_v
//
// over the T tokens not in the sums; S is the spread of the others, m their means, d how far the T tokens move them. A
// step reads S rounded, 8 bits a number and a factor a row. Every FOLD tokens it also adds them to the sums:
//
//     S' = S + sum of (k - m_k)(v - m_v)^T - n d_k d_v^T
//
// Sums f64 [B][Hkv][D] and [B][Hkv][Dv], spread f32 [B][Hkv][D][Dv], levels i8 of the same shape, scales f32
// [B][Hkv][D]; q [B][Hq][D] contiguous; k and v with strides; mean_keys f32 [B][Hkv][D], rest f32 [B][Hq][Dv]. Spread
// and levels start at multiples of 16 bytes, as torch allocates them; q, k and v may lie anywhere, but are read faster
// if their rows start at such. New sums may be written in place or to other memory: a block reads and writes those of
// its head alone.
//
// With padding, n differs by row (`visible`), and only tokens that the row sees (`shown`) count. The sums must cover
// exactly the earlier tokens that are visible now. If not, results are NaN, and so are sums written then: the host
// could only recompute them after waiting for the device. The blocks of a row share this check.
//
// add_token, grid B x Hkv, 256 threads. There are few blocks, so latency is what a step costs: all loads are issued
// before the first result is used, and what follows reads shared memory and registers.
//   (1) A thread loads 4 columns of the levels of some rows, 8 numbers of fresh keys or values and of q, and one sum.
//   (2) A thread per component: means, drift and new sums.
//   (3) Four query heads at a time: the query along the levels, and along the fresh keys and the drift.
//   (4) The sum of both for a column.
//   (5) Every FOLD steps: a warp reads rows of the spread, adds the tokens, and rounds each row in its registers.
// Bytes: the levels, up to FOLD keys and values, and two per token of a row with padding; 25 KB per head of 128 x 128,
// and every FOLD steps the spread twice.
//
// SPARSE_DIM: D. SPARSE_VALUE_DIM: Dv. Multiples of 16, up to 256. SPARSE_BF16: dtype of q, k and v. SPARSE_FOLD: FOLD.
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

// a / b as IEEE 754 rounds it, for b and quotients far from the ends of float32's range. The operator is a call for
// such ends, around which registers would be spilled.
__device__ __forceinline__ float divide(float a, float b) {
#ifdef HOSTSIM
  return a / b;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = fmaf(fmaf(-b, r, 1.0f), r, r);
  const float quotient = a * r;
  return fmaf(fmaf(-b, quotient, a), r, quotient);
#endif
}

// 1 / b likewise, for a number of tokens.
__device__ __forceinline__ double reciprocal(double b) {
#ifdef HOSTSIM
  return 1.0 / b;
#else
  double r = divide(1.0f, float(b));
  for (int step = 0; step < 3; step++) r = fma(fma(-b, r, 1.0), r, r);
  return r;
#endif
}

// Add the tokens to the spread, and round each row to levels; a warp has ROWS rows at a time.
__device__ __forceinline__ void fold(const float* spread, const Fresh& fresh, u32 joined, float n, float spoilt,
                                     float* to, i8* levels, float* scales) {
  constexpr int FOURS = up(VALUE_DIM, 128), ROWS = FOURS == 1 ? 8 : 4;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int d = threadIdx.x / 32 * ROWS; d < DIM; d += WARPS * ROWS) {
    Four x[ROWS][FOURS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int j = 0; j < FOURS; j++) {
        const int column = 4 * (lane + 32 * j);
        if (column < VALUE_DIM) x[r][j] = four(spread + (d + r) * VALUE_DIM + column);
      }
    }
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
      const int column = 4 * (lane + 32 * j);
      if (column >= VALUE_DIM) continue;
      const Four drift = four(fresh.drift + DIM + column);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float along = n * fresh.drift[d + r];
#pragma unroll
        for (int c = 0; c < 4; c++) x[r][j].at[c] -= along * drift.at[c];
      }
#pragma unroll 2
      for (int t = 0; t < FOLD; t++) {
        if (!(joined >> t & 1)) continue;
        const Four value = fresh.fars(t, DIM + column);
#pragma unroll
        for (int r = 0; r < ROWS; r += 4) {
          const Four key = fresh.fars(t, d + r);
#pragma unroll
          for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) x[r + i][j].at[c] += key.at[i] * value.at[c];
          }
        }
      }
    }
    float top[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int j = 0; j < FOURS; j++) {
        const int column = 4 * (lane + 32 * j);
#pragma unroll
        for (int c = 0; c < 4; c++) {
          x[r][j].at[c] += spoilt;
          top[r] = fmaxf(top[r], fabsf(x[r][j].at[c]));
        }
        if (column < VALUE_DIM) *reinterpret_cast<Four*>(to + (d + r) * VALUE_DIM + column) = x[r][j];
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {  // of all rows at once: a shuffle waits for the one before
#pragma unroll
      for (int r = 0; r < ROWS; r++) top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], step));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float scale = divide(top[r], 127.0f);
#pragma unroll
      for (int j = 0; j < FOURS; j++) {
        const int column = 4 * (lane + 32 * j);
        u32 word = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float level = scale > 1e-30f ? divide(x[r][j].at[c], scale) : 0.0f;
          word |= u32(u8(i8(rintf(level)))) << 8 * c;
        }
        if (column < VALUE_DIM) *reinterpret_cast<u32*>(levels + (d + r) * VALUE_DIM + column) = word;
      }
      if (lane == 0) scales[d + r] = scale + spoilt;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    add_token(Token token, Padding row, Sums sums, Results to) {
  __shared__ __align__(16) Fresh fresh;
  __shared__ __align__(16) float scales[DIM], steep[HEADS][DIM], dots[FOLD + 1][HEADS];
  __shared__ __align__(16) float partial[PARTS][HEADS][VALUE_DIM];
  __shared__ float mean_v[VALUE_DIM];
  __shared__ double shares[2];
  const int thread = threadIdx.x, batch = blockIdx.x / token.kv_heads, head = blockIdx.x % token.kv_heads;
  const i64 of_keys = i64(blockIdx.x) * DIM, of_values = i64(blockIdx.x) * VALUE_DIM;
  const i64 query = i64(blockIdx.x) * token.group;  // first query head

  // Step (1).
  wait_for_predecessor();
  u32 levels[TURNS][4];
  load_levels(sums.levels + of_keys * VALUE_DIM, levels);
  double sum[COMPONENTS];
#pragma unroll
  for (int j = 0; j < COMPONENTS; j++) {
    const int c = thread + j * THREADS;
    if (c < SIZE) sum[j] = *(c < DIM ? sums.keys + of_keys + c : sums.values + of_values + (c - DIM));
  }
  float scale = 0.0f, slope[QUERIES];
  if (thread < DIM) scale = sums.scales[of_keys + thread];
  const Half* from_q[QUERIES];
  bool has_q[QUERIES];
#pragma unroll
  for (int j = 0; j < QUERIES; j++) {
    const u32 i = threadIdx.x + j * THREADS, g = i / (DIM / 8);
    from_q[j] = token.q + query * DIM + 8 * i;
    has_q[j] = g < token.group;
    slope[j] = 0.0f;
    if (has_q[j]) slope[j] = token.slopes[head * token.group + g];
  }
  uint4 queries[QUERIES], pieces[PIECES];
  load(from_q, has_q, is_aligned(token.q), queries);
  i64 first, end;
  int count = 0;
  // The branches are for waits: values in one register cannot be told apart, and a step without a static cache or
  // without a mask would wait for all loads so far, too.
  if (row.summed) {
    first = row.summed[blockIdx.x], end = *row.length;
    if (first < end && end <= first + FOLD) count = int(end - first);
    load_fresh(token, batch, head, first, count, pieces);
  } else {
    first = token.summed, end = token.tokens;
    if (token.summed < token.tokens && token.tokens <= token.summed + FOLD) count = token.tokens - token.summed;
    load_fresh(token, batch, head, token.summed, count, pieces);
  }
  i64 tokens = end;
  u32 joined = (1u << count) - 1;  // bit t: the row sees fresh token t
  bool changed = !count;
  if (row.visible || row.shown || row.before) {
    const int lane = thread % 32;
    u32 joins = lane < count;
    if (row.visible) tokens = row.visible[batch];
    if (joins && row.shown) joins = row.shown[batch * row.shown_batch + first + lane];
    changed |= is_changed(row, batch, head, token.kv_heads, count ? int(first) : 0);
    hold(joins);
    joined = __ballot_sync(FULL_WARP, joins);
  }
  if (thread < 2) {
    const double n = double(tokens), divisor = thread ? n - __popc(joined) : n;
    shares[thread] = reciprocal(divisor > 1.0 ? divisor : 1.0);
  }
#pragma unroll
  for (int j = 0; j < PIECES; j++) {
    const int i = thread + j * THREADS;
    if (i < FOLD * SIZE / 8) *reinterpret_cast<uint4*>(&fresh.token[0][0] + 8 * i) = pieces[j];
  }
  if (thread < DIM) scales[thread] = scale;
  const float spoilt = __syncthreads_or(changed) ? __uint_as_float(0x7fc00000u) : 0.0f;
  let_dependents_start();  // what follows reads the spread only, every FOLD steps

  // Step (2).
  const double share = shares[0], old_share = shares[1];
  const float n = float(tokens);
  const bool folds = to.spread && count == FOLD;
#pragma unroll
  for (int j = 0; j < COMPONENTS; j++) {
    const int c = thread + j * THREADS;
    if (c >= SIZE) continue;
    double whole = sum[j];
#pragma unroll 1
    for (int from = 0; from < count; from += 4) {
#pragma unroll
      for (int t = from; t < from + 4; t++) {
        if (joined >> t & 1) whole += real(fresh.token[t][c]);
      }
    }
    fresh.base[c] = float(sum[j] * old_share);
    fresh.drift[c] = float(whole * share - sum[j] * old_share);
    const float mean = float(whole * share) + spoilt;
    if (c < DIM) {
      to.mean_keys[of_keys + c] = mean;
    } else {
      mean_v[c - DIM] = mean;
    }
    double* const later = c < DIM ? to.keys + of_keys + c : to.values + of_values + (c - DIM);
    if (folds) *later = spoilt == spoilt ? whole : double(spoilt);
  }

#pragma unroll 1
  for (int heads = 0; heads < token.group; heads += HEADS) {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {  // else all levels become float32 before the loop, and are spilled
#pragma unroll
      for (int i = 0; i < 4; i++) hold(levels[turn][i]);
    }
#pragma unroll
    for (int j = 0; j < QUERIES; j++) {
      const int i = thread + j * THREADS, g = i / (DIM / 8) - heads, d = i % (DIM / 8) * 8;
      if (g < 0 || g >= HEADS) continue;
      const u32 words[4] = {queries[j].x, queries[j].y, queries[j].z, queries[j].w};
#pragma unroll
      for (int w = 0; w < 4; w++) {
        steep[g][d + 2 * w] = real(Half{u16(words[w])}) * slope[j] * float(share);
        steep[g][d + 2 * w + 1] = real(Half{u16(words[w] >> 16)}) * slope[j] * float(share);
      }
    }
    __syncthreads();

    // Step (3). Token FOLD is the drift.
    if (thread / 32 * (32 / DOT_LANES) <= FOLD) {
      const int t = thread / DOT_LANES;
      const bool seen = t < FOLD && joined >> t & 1;
      const Half* const one = fresh.token[seen ? t : 0];
      const float *const mean = t < FOLD ? fresh.base : fresh.drift, factor = t < FOLD ? 0.0f : -n;
      Four dot = {};
#pragma unroll
      for (int d = thread % DOT_LANES * 4; d < DIM; d += 4 * DOT_LANES) {
        Four x = four(one + d);
        const Four y = four(mean + d);
#pragma unroll
        for (int c = 0; c < 4; c++) x.at[c] = seen ? x.at[c] - y.at[c] : factor * y.at[c];
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
          const Four query = four(steep[g] + d);
#pragma unroll
          for (int c = 0; c < 4; c++) dot.at[g] += query.at[c] * x.at[c];
        }
      }
#pragma unroll
      for (int step = DOT_LANES / 2; step > 0; step >>= 1) {
#pragma unroll
        for (int g = 0; g < HEADS; g++) dot.at[g] += __shfl_xor_sync(FULL_WARP, dot.at[g], step);
      }
      if (t <= FOLD && thread % DOT_LANES == 0) *reinterpret_cast<Four*>(dots[t]) = dot;
    }
    const int part = thread / LANES, columns = thread % LANES * 4;
    if (EVEN || part < PARTS) {
      Four along[HEADS] = {};
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        const int d = 4 * (part + PARTS * turn);
        if (!EVEN && d >= DIM) break;
        const Four factor = four(scales + d);
        Four y[HEADS];
#pragma unroll
        for (int g = 0; g < HEADS; g++) y[g] = four(steep[g] + d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
          for (int c = 0; c < 4; c++) {
            const float x = float(i8(levels[turn][i] >> 8 * c)) * factor.at[i];
#pragma unroll
            for (int g = 0; g < HEADS; g++) along[g].at[c] += y[g].at[i] * x;
          }
        }
      }
#pragma unroll
      for (int g = 0; g < HEADS; g++) *reinterpret_cast<Four*>(partial[part][g] + columns) = along[g];
    }
    __syncthreads();

    // Step (4). A thread has two heads.
    for (int i = thread; i < HEADS / 2 * VALUE_DIM; i += THREADS) {
      const int g = i / VALUE_DIM * 2, column = i % VALUE_DIM;
      float rest[2] = {mean_v[column], mean_v[column]};
#pragma unroll 8
      for (int p = 0; p < PARTS; p++) {
        rest[0] += partial[p][g][column];
        rest[1] += partial[p][g + 1][column];
      }
      const float drift = fresh.drift[DIM + column];
      rest[0] += dots[FOLD][g] * drift;
      rest[1] += dots[FOLD][g + 1] * drift;
#pragma unroll 1
      for (int from = 0; from < count; from += 4) {
#pragma unroll
        for (int t = from; t < from + 4; t++) {
          const float x = joined >> t & 1 ? fresh.far(t, DIM + column) : 0.0f;
          rest[0] += dots[t][g] * x;
          rest[1] += dots[t][g + 1] * x;
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (heads + g + h < token.group) to.rest[(query + heads + g + h) * VALUE_DIM + column] = rest[h];
      }
    }
  }
  if (!folds) return;

  // Step (5).
  const i64 at = of_keys * VALUE_DIM;
  fold(sums.spread + at, fresh, joined, n, spoilt, to.spread + at, to.levels + at, to.scales + of_keys);
  if (head == 0 && row.summed && thread < FOLD) {
    row.before[batch * row.before_batch + end - FOLD + thread] = joined >> thread & 1;
  }
  if (thread == 0) {
    if (head == 0) to.tokens[batch] = double(tokens);
    if (row.summed) row.summed[blockIdx.x] = end;
  }
}
