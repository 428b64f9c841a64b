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
// [B][Hkv][D]; q [B][Hq][D] contiguous; k and v with strides; mean_keys f32 [B][Hkv][D], rest f32 [B][Hq][Dv]. New sums
// may be written in place or to other memory: a block reads and writes those of its head alone.
//
// With padding, n differs by row (`visible`), and only tokens that the row sees (`shown`) count. The sums must cover
// exactly the earlier tokens that are visible now. If not, results are NaN, and so are sums written then: the host
// could only recompute them after waiting for the device. The blocks of a row share this check.
//
// add_token, grid B x Hkv, 256 threads: a thread has a column of the spread, or every PARTS-th row of one. Bytes: the
// levels, up to FOLD keys and values, and two per token of a row with padding; 25 KB per head of 128 x 128, and every
// FOLD steps the spread twice.
//
// SPARSE_DIM: D. SPARSE_VALUE_DIM: Dv, at most 256. SPARSE_BF16: dtype of q, k and v. SPARSE_FOLD: FOLD.
#include "mma.cuh"

using u8 = unsigned char;
using i8 = signed char;

constexpr int DIM = SPARSE_DIM, VALUE_DIM = SPARSE_VALUE_DIM, FOLD = SPARSE_FOLD;
constexpr int THREADS = 256, WARPS = THREADS / 32, PARTS = THREADS / VALUE_DIM, MAX_GROUP = 16, BLOCKS_PER_SM = 3;
static_assert(PARTS >= 1);
static_assert(FOLD <= 32);

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
  i64* summed;        // replaces Token's, [B][Hkv]: each block reads and writes its own
};

// Whether the sums of a row do not cover exactly the visible tokens before `at`; each block checks its share of them.
__device__ __forceinline__ bool is_changed(const Padding& row, int batch, int head, int heads, i64 at) {
  bool changed = false;
  if (row.shown || row.before) {
    const int share = (int(at) + heads - 1) / heads, end = share * (head + 1) < int(at) ? share * (head + 1) : int(at);
    for (int i = share * head + threadIdx.x; i < end; i += THREADS) {
      const bool now = !row.shown || row.shown[batch * row.shown_batch + i];
      const bool then = !row.before || row.before[batch * row.before_batch + i];
      changed |= now != then;
    }
  }
  return __syncthreads_or(changed);
}

// The tokens that are not in the sums, and what the means of keys or values are.
template <int SIZE>
struct Centred {
  Half fresh[FOLD][SIZE];
  float base[SIZE];   // mean of the tokens in the sums
  float drift[SIZE];  // how far the others move it

  __device__ __forceinline__ float far(int t, int i) const { return real(fresh[t][i]) - base[i]; }
};

// Fill `x`, and write means and new sums where wanted. Tokens with shown[t] = 0 are not read.
template <int SIZE>
__device__ __forceinline__ void centre(Centred<SIZE>& x, const Half* from, i64 step, int count, const u8* shown,
                                       const double* sums, double share, double old_share, float spoilt, float* means,
                                       double* to) {
  for (int i = threadIdx.x; i < SIZE; i += THREADS) {
    const double sum = sums[i];
    double whole = sum;
    for (int t = 0; t < count; t++) {
      if (!shown[t]) continue;
      const Half one = from[t * step + i];
      x.fresh[t][i] = one;
      whole += real(one);
    }
    x.base[i] = float(sum * old_share);
    x.drift[i] = float(whole * share - sum * old_share);
    means[i] = float(whole * share) + spoilt;
    if (to) to[i] = spoilt == spoilt ? whole : double(spoilt);
  }
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

// Round each row of a spread [DIM][VALUE_DIM] to levels; a warp has a row.
__device__ __forceinline__ void round_rows(const float* spread, i8* levels, float* scales, float spoilt) {
  const int lane = threadIdx.x % 32;
  for (int d = threadIdx.x / 32; d < DIM; d += WARPS) {
    float top = 0.0f;
    for (int i = lane; i < VALUE_DIM; i += 32) top = fmaxf(top, fabsf(spread[d * VALUE_DIM + i]));
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
    const float scale = divide(top, 127.0f);
    for (int i = lane; i < VALUE_DIM; i += 32) {
      levels[d * VALUE_DIM + i] = scale > 1e-30f ? i8(rintf(divide(spread[d * VALUE_DIM + i], scale))) : i8(0);
    }
    if (lane == 0) scales[d] = scale + spoilt;
  }
}

// An A100's shared memory holds three blocks of 256 components. Without this number the compiler aims at as many blocks
// as registers allow, and spills some.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    add_token(Token token, Padding row, Sums sums, Results to) {
  __shared__ Centred<DIM> keys;
  __shared__ Centred<VALUE_DIM> values;
  __shared__ float mean_v[VALUE_DIM], scales[DIM], steep[MAX_GROUP][DIM], dots[MAX_GROUP][FOLD + 1];
  __shared__ float partial[PARTS][VALUE_DIM];
  __shared__ u8 shown[FOLD];
  __shared__ double shares[2];
  const int thread = threadIdx.x, batch = blockIdx.x / token.kv_heads, head = blockIdx.x % token.kv_heads;
  const i64 end = row.length ? *row.length : i64(token.tokens);
  const i64 first = row.summed ? row.summed[blockIdx.x] : i64(token.summed);
  const bool lost = end <= first || end > first + FOLD;
  const int count = lost ? 0 : int(end - first);
  if (thread < FOLD) {
    shown[thread] = thread < count && (!row.shown || row.shown[batch * row.shown_batch + first + thread]);
  }
  const bool changed = is_changed(row, batch, head, token.kv_heads, lost ? 0 : first);
  const float spoilt = lost || changed ? __uint_as_float(0x7fc00000u) : 0.0f;
  const double n = row.visible ? double(row.visible[batch]) : double(end);
  if (thread < 2) {
    int joined = 0;
    for (int t = 0; t < count; t++) joined += shown[t];
    const double tokens = thread ? n - joined : n;
    shares[thread] = reciprocal(tokens > 1.0 ? tokens : 1.0);
  }
  __syncthreads();
  const double share = shares[0], old_share = shares[1];
  const i64 of_keys = i64(blockIdx.x) * DIM, of_values = i64(blockIdx.x) * VALUE_DIM;
  const i64 query = (i64(batch) * token.kv_heads + head) * token.group;  // first query head
  const bool folds = to.spread && count == FOLD;
  const Half* k = token.k + batch * token.key_batch + head * token.key_head + first * token.key_token;
  const Half* v = token.v + batch * token.value_batch + head * token.value_head + first * token.value_token;
  centre(keys, k, token.key_token, count, shown, sums.keys + of_keys, share, old_share, spoilt, to.mean_keys + of_keys,
         folds ? to.keys + of_keys : nullptr);
  centre(values, v, token.value_token, count, shown, sums.values + of_values, share, old_share, spoilt, mean_v,
         folds ? to.values + of_values : nullptr);
  for (int d = thread; d < DIM; d += THREADS) scales[d] = sums.scales[of_keys + d];
  for (int i = thread; i < token.group * DIM; i += THREADS) {
    const int g = i / DIM, d = i % DIM;
    steep[g][d] = real(token.q[(query + g) * DIM + d]) * token.slopes[head * token.group + g] * float(share);
  }
  __syncthreads();

  // The query along each new token, and along the drift.
  for (int p = thread / 32; p < token.group * (count + 1); p += WARPS) {
    const int g = p / (count + 1), t = p % (count + 1);
    float dot = 0.0f;
    if (t == count || shown[t]) {
      for (int d = thread % 32; d < DIM; d += 32) {
        dot += steep[g][d] * (t == count ? -float(n) * keys.drift[d] : keys.far(t, d));
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) dot += __shfl_xor_sync(FULL_WARP, dot, step);
    if (thread % 32 == 0) dots[g][t] = dot;
  }
  __syncthreads();

  const int part = thread / VALUE_DIM, column = thread % VALUE_DIM;
  float along[MAX_GROUP];
#pragma unroll
  for (int g = 0; g < MAX_GROUP; g++) along[g] = 0.0f;
  if (part < PARTS) {
#pragma unroll 4
    for (int d = part; d < DIM; d += PARTS) {
      const float x = float(sums.levels[(of_keys + d) * VALUE_DIM + column]) * scales[d];
#pragma unroll
      for (int g = 0; g < MAX_GROUP; g++) {
        if (g < token.group) along[g] += steep[g][d] * x;
      }
    }
    for (int t = part; t <= count; t += PARTS) {
      if (t < count && !shown[t]) continue;
      const float x = t < count ? values.far(t, column) : values.drift[column];
#pragma unroll
      for (int g = 0; g < MAX_GROUP; g++) {
        if (g < token.group) along[g] += dots[g][t] * x;
      }
    }
  }
#pragma unroll
  for (int g = 0; g < MAX_GROUP; g++) {
    if (g < token.group) {
      if (part < PARTS) partial[part][column] = along[g];
      __syncthreads();
      if (part == 0) {
        float sum = mean_v[column];
        for (int p = 0; p < PARTS; p++) sum += partial[p][column];
        to.rest[(query + g) * VALUE_DIM + column] = sum;
      }
      __syncthreads();
    }
  }
  if (!folds) return;

  if (part < PARTS) {
    for (int d = part; d < DIM; d += PARTS) {
      const i64 at = (of_keys + d) * VALUE_DIM + column;
      float x = sums.spread[at] - float(n) * keys.drift[d] * values.drift[column];
      for (int t = 0; t < FOLD; t++) {
        if (shown[t]) x += keys.far(t, d) * values.far(t, column);
      }
      to.spread[at] = x + spoilt;
    }
  }
  __syncthreads();
  round_rows(to.spread + of_keys * VALUE_DIM, to.levels + of_keys * VALUE_DIM, to.scales + of_keys, spoilt);
  if (head == 0 && row.summed && thread < FOLD) {
    row.before[batch * row.before_batch + first + thread] = shown[thread];
  }
  if (thread == 0) {
    if (head == 0) to.tokens[batch] = n;
    if (row.summed) row.summed[blockIdx.x] = end;
  }
}
