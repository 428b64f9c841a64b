// Adds a decode step's token to the sums of the remainder (docs/algorithm.md, eq. 16), and computes the remainder's
// value for each query head.
//
//     spread' = spread + (n - 1) / n (k - mean k)(v - mean v)^T       means of the n - 1 tokens before
//     rest_h  = mean' v + slope_h / n  spread'^T q_h
//
// Sums f64 [B][Hkv][D] and [B][Hkv][Dv], spread f32 [B][Hkv][D][Dv]; q [B][Hq][D] contiguous; k and v with strides;
// mean_keys f32 [B][Hkv][D], rest f32 [B][Hq][Dv]. New sums may be written in place or to other memory: each number is
// read and written by one thread.
//
// With padding, n differs by row (`visible`), and the token is added only in rows that see it (`shown`). The sums must
// cover exactly the earlier tokens that are visible now. If the mask of earlier tokens has changed, results and sums
// become NaN permanently, because the host could only recompute the sums after waiting for the device. The blocks of a
// row share this check.
//
// add_token, grid B x Hkv, 256 threads: a thread has a column of the spread, or every PARTS-th row of one. Bytes: the
// spread twice, 128 KB per head of 128 x 128, and two per token of a row with padding.
//
// SPARSE_DIM: D. SPARSE_VALUE_DIM: Dv, at most 256. SPARSE_BF16: dtype of q, k and v.
#include "mma.cuh"

using u8 = unsigned char;

constexpr int DIM = SPARSE_DIM, VALUE_DIM = SPARSE_VALUE_DIM;
constexpr int THREADS = 256, PARTS = THREADS / VALUE_DIM, MAX_GROUP = 16;
static_assert(PARTS >= 1);

struct Sums {
  const double* keys;
  const double* values;
  const float* spread;
};

struct Results {
  double* tokens;  // f64 [B]: number of tokens
  double* keys;
  double* values;
  float* spread;
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
};

// Masks that differ by row; null pointers: no mask.
struct Padding {
  const i64* visible;  // n of each row
  const u8* shown;     // which tokens a row sees
  i64 shown_batch;
  u8* before;  // which tokens the sums cover
  i64 before_batch;
  const i64* length;  // replaces `tokens` for a static cache, whose length the host does not know
  i64* summed;        // number of tokens that the sums of each row cover, including padding
};

// Whether the sums of a row do not cover exactly the visible tokens before `at`; each block checks its share of them.
__device__ __forceinline__ bool is_changed(const Padding& row, int batch, int head, int heads, i64 at) {
  bool changed = head == 0 && row.summed && row.summed[batch] != at;
  if (row.shown || row.before) {
    const int share = (int(at) + heads - 1) / heads, end = share * (head + 1) < int(at) ? share * (head + 1) : int(at);
#pragma unroll 8
    for (int i = share * head + threadIdx.x; i < end; i += THREADS) {
      const bool now = !row.shown || row.shown[batch * row.shown_batch + i];
      const bool then = !row.before || row.before[batch * row.before_batch + i];
      changed |= now != then;
    }
  }
  return __syncthreads_or(changed);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    add_token(Token token, Padding row, Sums sums, Results to) {
  __shared__ float far_k[DIM], far_v[VALUE_DIM], mean_v[VALUE_DIM], steep[MAX_GROUP][DIM], partial[PARTS][VALUE_DIM];
  const int thread = threadIdx.x, batch = blockIdx.x / token.kv_heads, head = blockIdx.x % token.kv_heads;
  __shared__ double shares[2];
  const i64 at = (row.length ? *row.length : i64(token.tokens)) - 1;
  const bool joins = !row.shown || row.shown[batch * row.shown_batch + at];
  const double n = row.visible ? double(row.visible[batch]) : double(at + 1), before = n - joins;
  if (thread < 2) {  // early, with few live registers: a double division is a call, which would spill them
    const double count = thread ? before : n;
    shares[thread] = 1.0 / (count > 1.0 ? count : 1.0);
  }
  const float spoilt = is_changed(row, batch, head, token.kv_heads, at) ? __uint_as_float(0x7fc00000u) : 0.0f;
  const double share = shares[0], old_share = shares[1];
  const i64 of_keys = i64(blockIdx.x) * DIM, of_values = i64(blockIdx.x) * VALUE_DIM;
  const i64 first = (i64(batch) * token.kv_heads + head) * token.group;  // query head
  const float weight = joins ? float(before * share) : 0.0f;
  const Half* key = token.k + batch * token.key_batch + head * token.key_head + at * token.key_token;
  const Half* value = token.v + batch * token.value_batch + head * token.value_head + at * token.value_token;
  for (int d = thread; d < DIM; d += THREADS) {
    const float x = real(key[d]);
    const double sum = sums.keys[of_keys + d], whole = joins ? sum + x : sum;
    far_k[d] = joins ? float(x - sum * old_share) * weight : 0.0f;
    to.keys[of_keys + d] = whole;
    to.mean_keys[of_keys + d] = float(whole * share) + spoilt;
  }
  for (int i = thread; i < VALUE_DIM; i += THREADS) {
    const float x = real(value[i]);
    const double sum = sums.values[of_values + i], whole = joins ? sum + x : sum;
    far_v[i] = joins ? float(x - sum * old_share) : 0.0f;
    to.values[of_values + i] = whole;
    mean_v[i] = float(whole * share) + spoilt;
  }
  for (int i = thread; i < token.group * DIM; i += THREADS) {
    const int g = i / DIM, d = i % DIM;
    steep[g][d] = real(token.q[(first + g) * DIM + d]) * token.slopes[head * token.group + g] * float(share);
  }
  if (spoilt != spoilt) {  // each thread overwrites its own results
    for (int d = thread; d < DIM; d += THREADS) to.keys[of_keys + d] = spoilt;
    for (int i = thread; i < VALUE_DIM; i += THREADS) to.values[of_values + i] = spoilt;
  }
  if (head == 0 && thread == 0) {
    to.tokens[batch] = n;
    if (row.summed) row.before[batch * row.before_batch + at] = joins;
    if (row.summed) row.summed[batch] = at + 1;  // only this block reads it
  }
  __syncthreads();

  const int part = thread / VALUE_DIM, column = thread % VALUE_DIM;
  float along[MAX_GROUP];
#pragma unroll
  for (int g = 0; g < MAX_GROUP; g++) along[g] = 0.0f;
  if (part < PARTS) {
    const float mine = far_v[column];
#pragma unroll 4
    for (int d = part; d < DIM; d += PARTS) {
      const i64 at = (of_keys + d) * VALUE_DIM + column;
      const float x = sums.spread[at] + far_k[d] * mine;
      to.spread[at] = x;
#pragma unroll
      for (int g = 0; g < MAX_GROUP; g++) {
        if (g < token.group) along[g] += steep[g][d] * x;
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
        to.rest[(first + g) * VALUE_DIM + column] = sum;
      }
      __syncthreads();
    }
  }
}
