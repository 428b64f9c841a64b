// The second kernel of gather.cu, grid tasks x group: combines the splits of a head, its learned sink and the remainder.
// The remainder (eq. 15, 16) is one more token. Its value is given; its weight is estimated from coefficients f32 [Hq][5], mean keys
// f32 [B][Hkv][Q][D], values f32 [B][Hq][Q][Dv] and visible tokens i64 [B][Q] (null: all N). There is no remainder if
// the other pointers are null. `lse` f32 [2][B][Q][Hq] gets the mean logit and the log-sum-exp.
#pragma once
#include "slots.cuh"

constexpr int COMBINE_THREADS = 128;

struct LeftOut {
  const float* coefficients;
  const float* mean_keys;
  const float* values;
  const i64* visible;
};

// Return the dot product of a row of q and a row of floats to every thread of a block; `partial`: one float per thread.
__device__ __forceinline__ float sum_of_products(const Half* q, const float* x, float* partial) {
  float sum = 0.0f;
  for (int d = threadIdx.x; d < DIM; d += COMBINE_THREADS) sum += real(q[d]) * x[d];
  partial[threadIdx.x] = sum;
  __syncthreads();
  for (int half = COMBINE_THREADS / 2; half; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  return partial[0];
}

// The softmax share of the `visible - used` unselected tokens together; none gets more than the mean selected one.
__device__ __forceinline__ float share_left_out(const float* c, float mean, float lse, float mean_key, i64 visible,
                                                int used) {
  if (!used || visible <= used) return 0.0f;
  const float log_used = logf(float(used));
  const float typical = c[0] + c[1] * mean + c[2] * mean_key + c[3] * logf(float(visible)) + c[4] * log_used;
  const float weight = fminf(typical, lse - log_used) + logf(float(visible - used));
  return 1.0f / (1.0f + __expf(lse - weight));
}

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    combine(const float* __restrict__ outs, const float* __restrict__ stats, const i32* __restrict__ counts,
            const float* __restrict__ sinks, u16* __restrict__ out, float* __restrict__ lse, i32 splits, i32 tasks,
            Shape shape, const Half* __restrict__ q, LeftOut left_out) {
  __shared__ float partial[COMBINE_THREADS];
  wait_for_predecessor();
  const Task task(shape, blockIdx.x);
  const int head = blockIdx.y, heads = shape.sets * shape.group, query_head = task.set * shape.group + head;
  const i64 first = i64(blockIdx.x) * splits;
  const float sink = sinks ? sinks[query_head] : -INFINITE;
  float top = sink, total = 0.0f, logit = 0.0f;
  int used = 0;
  for (int s = 0; s < splits; s++) top = fmaxf(top, stats[3 * ((first + s) * shape.group + head)]);
  const float base = top == -INFINITE ? 0.0f : top;
  for (int s = 0; s < splits; s++) {
    const float* of = stats + 3 * ((first + s) * shape.group + head);
    total += of[1] * __expf(of[0] - base);
    logit += of[2];
    used += counts[first + s];
  }
  total += __expf(sink - base);
  const i64 row = (i64(task.batch) * shape.queries + task.query) * heads + query_head;
  const i64 of_query = (i64(task.batch) * heads + query_head) * shape.queries + task.query;
  float share = 0.0f;
  if (left_out.coefficients) {
    const int kv_heads = heads / shape.heads_per_kv, kv = query_head / shape.heads_per_kv;
    const i64 of_keys = (i64(task.batch) * kv_heads + kv) * shape.queries + task.query;
    const float dot = sum_of_products(q + of_query * DIM, left_out.mean_keys + of_keys * DIM, partial);
    const i64 visible =
        left_out.visible ? left_out.visible[i64(task.batch) * shape.queries + task.query] : i64(shape.tokens);
    share = share_left_out(left_out.coefficients + 5 * query_head, logit / float(used), base + logf(total),
                           shape.scaling * dot, visible, used);
  }
  for (int d = threadIdx.x; d < VALUE_DIM; d += COMBINE_THREADS) {
    float x = 0.0f;
    for (int s = 0; s < splits; s++) {
      const i64 part = (first + s) * shape.group + head;
      x += outs[part * VALUE_DIM + d] * __expf(stats[3 * part] - base);
    }
    x /= total;
    if (share > 0.0f) x += share * (left_out.values[of_query * VALUE_DIM + d] - x);
    out[row * VALUE_DIM + d] = used ? narrow(x) : u16(0);
  }
  if (threadIdx.x == 0) {
    lse[row] = used ? logit / float(used) : 0.0f;
    lse[i64(tasks / shape.sets) * heads + row] = used ? base + logf(total) : -INFINITE;
  }
}
