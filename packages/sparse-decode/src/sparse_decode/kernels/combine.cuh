// The second kernel of gather.cu, grid tasks x group: combines a head's splits, its learned sink and the remainder.
// The remainder (eq. 15, 16) is one more token. Its value is given; its weight is estimated from coefficients f32
// [Hq][5], mean keys f32 [B][Hkv][Q][D], values f32 [B][Hq][Q][Dv] and visible tokens i64 [B][Q] (null: all N). There
// is no remainder if the other pointers are null.
//
// A block has little to do but to wait for memory, so it issues all its reads first:
//   (1) A thread reads the statistics of its splits, its share of q . mean_key, and four columns of every PARTS-th
//       split, eight splits at a time.
//   (2) Sums over the block, by shuffles in each warp and then in the order of the warps, give every split's weight.
//   (3) Weighted sums of the columns, over a thread's splits and then over threads, in a fixed order.
#pragma once
#include "slots.cuh"

constexpr int COMBINE_THREADS = 256, COMBINE_WARPS = COMBINE_THREADS / 32;
constexpr int MOST_SPLITS = 512, OWN = MOST_SPLITS / COMBINE_THREADS;  // the host makes no more splits
constexpr int TERMS = 5;  // of a weight of the remainder
constexpr int COLUMNS = VALUE_DIM / 4, PARTS = COMBINE_THREADS / COLUMNS, IN_FLIGHT = 8;
static_assert(DIM <= COMBINE_THREADS && VALUE_DIM <= COMBINE_THREADS);

struct LeftOut {
  const float* coefficients;
  const float* mean_keys;
  const float* values;
  const i64* visible;
};

__device__ __forceinline__ float over_warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
  return x;
}

// The softmax share of the `visible - used` unselected tokens together; none gets more than the mean selected one.
__device__ __forceinline__ float share_left_out(const float (&c)[TERMS], float mean, float lse, float mean_key,
                                                i32 visible, i32 used) {
  if (!used || visible <= used) return 0.0f;
  const float number = logf(float(used)), selected = lse - number;
  const float typical = c[0] + c[1] * mean + c[2] * mean_key + c[3] * selected + c[4] * number;
  const float weight = fminf(typical, selected) + logf(float(visible - used));
  return 1.0f / (1.0f + __expf(lse - weight));
}

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    combine(const float* __restrict__ outs, const float* __restrict__ stats, const i32* __restrict__ counts,
            const float* __restrict__ sinks, u16* __restrict__ out, i32 splits, Shape shape,
            const Half* __restrict__ q, LeftOut left_out) {
  __shared__ float weights[MOST_SPLITS];
  __shared__ __align__(16) float columns[PARTS][VALUE_DIM];
  __shared__ float coefficients[TERMS];
  __shared__ float tops[COMBINE_WARPS], totals[COMBINE_WARPS], logits[COMBINE_WARPS], dots[COMBINE_WARPS];
  __shared__ i32 numbers[COMBINE_WARPS];
  const Task task(shape, blockIdx.x);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int head = blockIdx.y, heads = shape.sets * shape.group, query_head = task.set * shape.group + head;
  const i64 first = i64(blockIdx.x) * splits;
  const i64 row = (i64(task.batch) * shape.queries + task.query) * heads + query_head;
  const i64 of_query = (i64(task.batch) * heads + query_head) * shape.queries + task.query;
  stats += 3 * (first * shape.group + head), outs += (first * shape.group + head) * VALUE_DIM, counts += first;
  const int mine = thread < PARTS * COLUMNS ? thread / COLUMNS : splits;  // the first split whose columns are read
  outs += 4 * (thread % COLUMNS);
  if (left_out.coefficients) {
    const int kv_heads = heads / shape.heads_per_kv, kv = query_head / shape.heads_per_kv;
    left_out.coefficients += TERMS * query_head, left_out.values += of_query * VALUE_DIM;
    left_out.mean_keys += ((i64(task.batch) * kv_heads + kv) * shape.queries + task.query) * DIM;
    q += of_query * DIM;
  }

  wait_for_predecessor();  // nothing above reads memory
  let_dependents_start();  // they wait, too: for the end of this kernel
  // Step (1).
  float own_top[OWN], own_total[OWN], own_logit[OWN];
  int own_count[OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int s = thread + COMBINE_THREADS * i;
    own_top[i] = -INFINITE, own_total[i] = 0.0f, own_logit[i] = 0.0f, own_count[i] = 0;
    if (s < splits) {
      const float* of = stats + i64(3) * s * shape.group;
      own_top[i] = of[0], own_total[i] = of[1], own_logit[i] = of[2], own_count[i] = counts[s];
    }
  }
  float held[IN_FLIGHT][4];
  const auto read_columns = [&](int from) {
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const int s = from + PARTS * i;
#pragma unroll
      for (int c = 0; c < 4; c++) held[i][c] = 0.0f;
      if (s < splits) get(outs + i64(s) * shape.group * VALUE_DIM, held[i]);
    }
  };
  read_columns(mine);
  const float sink = sinks ? sinks[query_head] : -INFINITE;
  float coefficient = 0.0f, dot = 0.0f, rest = 0.0f;
  i32 visible = i32(shape.tokens);
  if (left_out.coefficients) {
    if (thread < TERMS) coefficient = left_out.coefficients[thread];
    if (thread < DIM) dot = real(q[thread]) * left_out.mean_keys[thread];
    if (thread < VALUE_DIM) rest = left_out.values[thread];
    if (left_out.visible) visible = i32(left_out.visible[i64(task.batch) * shape.queries + task.query]);
  }

  // Step (2).
  float top = own_top[0];
#pragma unroll
  for (int i = 1; i < OWN; i++) top = fmaxf(top, own_top[i]);
#pragma unroll
  for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, step));
  if (lane == 0) tops[warp] = top;
  if (thread < TERMS) coefficients[thread] = coefficient;
  __syncthreads();
  top = sink;
#pragma unroll
  for (int w = 0; w < COMBINE_WARPS; w++) top = fmaxf(top, tops[w]);
  const float base = top == -INFINITE ? 0.0f : top;
  float total = 0.0f, logit = 0.0f;
  int used = 0;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int s = thread + COMBINE_THREADS * i;
    if (s >= splits) break;
    const float weight = __expf(own_top[i] - base);
    weights[s] = weight;
    total += own_total[i] * weight;
    logit += own_logit[i];
    used += own_count[i];
  }
  total = over_warp_sum(total), logit = over_warp_sum(logit), dot = over_warp_sum(dot);
#pragma unroll
  for (int step = 16; step; step /= 2) used += __shfl_xor_sync(FULL_WARP, used, step);
  if (lane == 0) totals[warp] = total, logits[warp] = logit, dots[warp] = dot, numbers[warp] = used;
  __syncthreads();
  total = 0.0f, logit = 0.0f, dot = 0.0f, used = 0;
#pragma unroll
  for (int w = 0; w < COMBINE_WARPS; w++)
    total += totals[w], logit += logits[w], dot += dots[w], used += numbers[w];
  total += __expf(sink - base);

  // Step (3).
  float sum[4] = {};
#pragma unroll 1
  for (int from = mine; from < splits; from += PARTS * IN_FLIGHT) {
    if (from != mine) read_columns(from);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      const int s = from + PARTS * i;
      if (s >= splits) break;
      const float weight = weights[s];
#pragma unroll
      for (int c = 0; c < 4; c++) sum[c] += weight * held[i][c];
    }
  }
  if (thread < PARTS * COLUMNS) put(&columns[thread / COLUMNS][4 * (thread % COLUMNS)], sum);
  __syncthreads();
  const float mean = logit / float(used), known = base + logf(total);
  if (thread < VALUE_DIM) {
    float x = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) x += columns[p][thread];
    x /= total;
    float share = 0.0f;
    if (left_out.coefficients) share = share_left_out(coefficients, mean, known, shape.scaling * dot, visible, used);
    if (share > 0.0f) x += share * (rest - x);
    out[row * VALUE_DIM + thread] = used ? narrow(x) : u16(0);
  }
}
