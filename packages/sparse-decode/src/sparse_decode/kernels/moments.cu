// One decode step of the sums behind the remainder (docs/algorithm.md, eq. 16): a token joins them, and each query head
// gets its value of what a selection will leave out.
//
//     spread' = spread + (n - 1) / n (k - mean k)(v - mean v)^T       means of the n - 1 tokens before
//     rest_h  = mean' v + slope_h / n  spread'^T q_h
//
// Sums f64 [B][Hkv][D] and [B][Hkv][Dv], spread f32 [B][Hkv][D][Dv]; q [B][Hq][D] without gaps; the token's k and v by
// strides; mean_keys f32 [B][Hkv][D], rest f32 [B][Hq][Dv]. New sums go to memory of their own: whoever was given the
// old ones may keep them.
//
// add_token, grid B x Hkv, 256 threads: a thread has a column of the spread, or every PARTS-th row of one. Bytes: the
// spread twice, 128 KB a head of 128 x 128.
//
// SPARSE_DIM: D. SPARSE_VALUE_DIM: Dv, at most 256. SPARSE_BF16: type of q, k and v.
#include "mma.cuh"

constexpr int DIM = SPARSE_DIM, VALUE_DIM = SPARSE_VALUE_DIM;
constexpr int THREADS = 256, PARTS = THREADS / VALUE_DIM, MAX_GROUP = 16;
static_assert(PARTS >= 1);

struct Sums {
  const double* keys;
  const double* values;
  const float* spread;
};

struct Results {
  double* keys;
  double* values;
  float* spread;
  float* mean_keys;
  float* rest;
};

struct Token {
  const Half* k;
  const Half* v;
  i64 key_batch;  // numbers from one to the next
  i64 key_head;
  i64 value_batch;
  i64 value_head;
  const Half* q;
  const float* slopes;  // of each query head, times the factor on the logits
  i32 kv_heads;
  i32 group;  // query heads a KV head
  i32 count;  // n
};

extern "C" __global__ void __launch_bounds__(THREADS) add_token(Token token, Sums sums, Results to) {
  __shared__ float far_k[DIM], far_v[VALUE_DIM], mean_v[VALUE_DIM], steep[MAX_GROUP][DIM], partial[PARTS][VALUE_DIM];
  const int thread = threadIdx.x, batch = blockIdx.x / token.kv_heads, head = blockIdx.x % token.kv_heads;
  const i64 of_keys = i64(blockIdx.x) * DIM, of_values = i64(blockIdx.x) * VALUE_DIM;
  const i64 first = (i64(batch) * token.kv_heads + head) * token.group;  // query head
  const double n = token.count, before = n > 1.0 ? n - 1.0 : 1.0;
  for (int d = thread; d < DIM; d += THREADS) {
    const float x = real(token.k[batch * token.key_batch + head * token.key_head + d]);
    const double sum = sums.keys[of_keys + d];
    far_k[d] = float(x - sum / before) * float((n - 1.0) / n);
    to.keys[of_keys + d] = sum + x;
    to.mean_keys[of_keys + d] = float((sum + x) / n);
  }
  for (int i = thread; i < VALUE_DIM; i += THREADS) {
    const float x = real(token.v[batch * token.value_batch + head * token.value_head + i]);
    const double sum = sums.values[of_values + i];
    far_v[i] = float(x - sum / before);
    to.values[of_values + i] = sum + x;
    mean_v[i] = float((sum + x) / n);
  }
  for (int i = thread; i < token.group * DIM; i += THREADS) {
    const int g = i / DIM, d = i % DIM;
    steep[g][d] = real(token.q[(first + g) * DIM + d]) * token.slopes[head * token.group + g] / float(n);
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
