// Softmax attention over selected tokens (docs/algorithm.md, eq. 8), for a decode step: few query rows, many tokens.
//
//     l_j = scaling q_h . k_j, or c tanh(scaling q_h . k_j / c)      out_h = sum_j exp(l_j) v_j / sum_j exp(l_j)
//
// q [B][Hq][Q][D] and indices i64 [B][S][Q][width] contiguous; k [B][Hkv][N][D], v [B][Hkv][N][Dv] with strides and
// contiguous components. A task is one (batch row, index set, query row), with `group` = Hq / S <= 16 query heads.
// Indices outside [0, N), such as -1, are unused. A task's slots are: `sink` slots with the first tokens, or with those
// of `always` i64 [B][sink] if it is not null; the `width` slots of indices; `recent` slots with the last tokens.
//
// gather, grid tasks x splits, 4 warps. A block processes one split of a task's slots, each warp 16 slots at a time:
//   (1) A lane reads the index of a slot, and shuffles tell the others. The loads of the slots' keys and values are
//       issued together, because a decode step has too few slots to hide a second latency.
//   (2) S = Q K^T by mma, with heads as rows and slots as columns. The sum over D may run in any order, so a lane reads
//       16 consecutive bytes of a key instead of 4 x 4 bytes, and Q is permuted accordingly in shared memory.
//   (3) Online softmax: largest logit and sum per head; sums are rescaled when the largest logit grows.
//   (4) O^T += V^T P^T: with heads as columns, up to 8 heads need half the registers. The fragment of S is used as that
//       of P^T. A lane reads 16 bytes of each of its four values' rows, whose columns are assigned to mma fragments so
//       that no data moves between lanes.
//   (5) The warps put their sums into shared memory. All threads add them, in the order of the warps, and write them as
//       float32 with largest logit, sum and sum of logits.
// combine (combine.cuh) makes the result of these. Both may start before their predecessors end, and wait for these.
//
// Keys and values are read once, from memory to registers, 16 bytes per lane, and only selected rows. Bytes per slot:
// 2 (D + Dv) + 8. Times: docs/gpu.md.
//
// SPARSE_DIM: D. SPARSE_VALUE_DIM: Dv. Multiples of 16, up to 256. SPARSE_BF16: dtype of q, k, v and the result.
// SPARSE_HEADS: 8 (default) or 16, at least `group`.
// HASHCORE_PAGES: keys and values are in pages [M][Hkv][2^shift][D] and [M][Hkv][2^shift][Dv] with strides; Rows.batch is
// that of pages, and the table of a batch row gives its pages (hashcore's pages.cuh). N is the tokens of a table.
#include "read_slots.cuh"

// Step (2): the logits of 16 slots, in two tiles of 8.
__device__ __forceinline__ void multiply_keys(const Words& words, const u32 (*query)[32][2 * SIDES], float (&s)[2][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[tile][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    constexpr int IN_READ = KEY_WORDS / 2;
    u32 a[4] = {};
    if constexpr (SIDES == 2) {
      const uint4 q = *reinterpret_cast<const uint4*>(query[step][lane]);
      a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
    } else {
      const uint2 q = *reinterpret_cast<const uint2*>(query[step][lane]);
      a[0] = q.x, a[2] = q.y;
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const u32 b[2] = {words.keys[tile][step / IN_READ][2 * (step % IN_READ)],
                        words.keys[tile][step / IN_READ][2 * (step % IN_READ) + 1]};
      mma(s[tile], a, b);
    }
  }
}

// Step (3): replace logits by weights; unused slots get weight 0.
__device__ __forceinline__ void weigh(const Shape& shape, const Slots& slots, float (&s)[2][4], Sums& sums) {
  const int t = threadIdx.x % 4;
  const float per_cap = shape.softcap > 0.0f ? 1.0f / shape.softcap : 0.0f;
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    float top = sums.top[side];
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
#pragma unroll
      for (int column = 0; column < 2; column++) {
        float& x = s[tile][2 * side + column];
        const bool used = slots.value[tile][column] >= 0;
        x *= shape.scaling;
        if (shape.softcap > 0.0f) x = shape.softcap * tanhf(x * per_cap);
        if (used) sums.logits[side] += x;
        if (!used) x = -INFINITE;
        top = fmaxf(top, x);
      }
    }
    top = over_quad_max(top);
    const float base = top == -INFINITE ? 0.0f : top;  // without a used slot: -inf - -inf would be NaN
    const float shrink = __expf(sums.top[side] - base);
    sums.top[side] = top;
    sums.total[side] *= shrink;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float of_head = __shfl_sync(FULL_WARP, shrink, 4 * (2 * t + i));
#pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        sums.out[tile][side][i] *= of_head, sums.out[tile][side][2 + i] *= of_head;
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
#pragma unroll
      for (int column = 0; column < 2; column++) {
        float& x = s[tile][2 * side + column];
        x = __expf(x - base);
        sums.total[side] += x;
      }
    }
  }
}

// Step (4): add weighted values.
__device__ __forceinline__ void add_values(const Words& words, const float (&s)[2][4], Sums& sums) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int half = 2 * tile + i % 2, far = i / 2, r = half / (2 * VALUE_WORDS), j = half % (2 * VALUE_WORDS);
      const u32 first = words.values[r][far][0][j / 2], second = words.values[r][far][1][j / 2];
      a[i] = j % 2 ? (first >> 16) | (second & 0xffff0000u) : (first & 0xffffu) | (second << 16);
    }
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      const u32 b[2] = {narrow2(s[0][2 * side], s[0][2 * side + 1]), narrow2(s[1][2 * side], s[1][2 * side + 1])};
      mma(sums.out[tile][side], a, b);
    }
  }
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, MIN_BLOCKS)
    gather(const Half* __restrict__ q, const Half* __restrict__ k, const Half* __restrict__ v,
           const i64* __restrict__ indices, float* __restrict__ outs, float* __restrict__ stats,
           i32* __restrict__ counts, Rows key_rows, Rows value_rows, Shape shape,
           const i64* __restrict__ always, Pages table) {
  __shared__ __align__(16) u32 query[STEPS][32][2 * SIDES];
  __shared__ __align__(16) float merged[WARPS][8][SUMS_ROW];  // of 8 heads at a time
  __shared__ float tops[WARPS][HEADS], totals[WARPS][HEADS], logits[WARPS][HEADS];
  __shared__ i32 used_slots[WARPS];
  const Task task(shape, blockIdx.x);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int first_head = task.set * shape.group, heads = shape.sets * shape.group;
  const int kv = first_head / shape.heads_per_kv;
  if constexpr (PAGED) {
    k += kv * key_rows.head, v += kv * value_rows.head;
    table.table += task.batch * table.width;
  } else {
    k += task.batch * key_rows.batch + kv * key_rows.head;
    v += task.batch * value_rows.batch + kv * value_rows.head;
  }
  indices += ((i64(task.batch) * shape.sets + task.set) * shape.queries + task.query) * shape.width;
  if (always) always += i64(task.batch) * shape.sink;
  const int begin = blockIdx.y * shape.slots, all = shape.sink + shape.width + shape.recent;
  const int end = begin + shape.slots < all ? begin + shape.slots : all;
  int from = begin + SLOTS * warp;
  q += (i64(task.batch) * heads + first_head) * shape.queries * DIM + task.query * DIM;

  wait_for_predecessor();  // nothing above reads memory
  let_dependents_start();  // they wait, too: for the end of this kernel
  const auto token_at = [&](int first) {
    const int slot = first + lane % SLOTS;
    return slot < end ? token_of(indices, always, slot, shape) : i64(-1);
  };
  i64 token = token_at(from);  // before q is waited for
  constexpr int Q_WORDS = STEPS * 64 * SIDES, Q_READS = (Q_WORDS + GATHER_THREADS - 1) / GATHER_THREADS;
  u32 own[Q_READS][1];
#pragma unroll
  for (int i = 0; i < Q_READS; i++) {
    const int at = thread + GATHER_THREADS * i, step = at / (64 * SIDES), holder = at / (2 * SIDES) % 32;
    const int head = holder / 4 + 8 * (at % SIDES), column = key_column(step, holder % 4, at / SIDES % 2);
    const bool is_one = head < shape.group && at < Q_WORDS;
    read(q + i64(head) * shape.queries * DIM + column, is_one, own[i]);
  }
#pragma unroll
  for (int i = 0; i < Q_READS; i++) {
    const int at = thread + GATHER_THREADS * i;
    if (at < Q_WORDS) query[at / (64 * SIDES)][at / (2 * SIDES) % 32][at % (2 * SIDES)] = own[i][0];
  }
  __syncthreads();

  Sums sums;
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    sums.top[side] = -INFINITE, sums.total[side] = 0.0f, sums.logits[side] = 0.0f;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
      for (int i = 0; i < 4; i++) sums.out[tile][side][i] = 0.0f;
    }
  }
  int seen = 0;
#pragma unroll 1
  for (; from < end; from += SLOTS * WARPS) {
    const i32 place = place_of(token, shape.tokens, table);
    seen += __popc(__ballot_sync(FULL_WARP, place >= 0) & ((1u << SLOTS) - 1));  // lanes 16 further have the same
    Slots slots;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      slots.key[tile] = __shfl_sync(FULL_WARP, place, 8 * tile + g);
#pragma unroll
      for (int column = 0; column < 2; column++)
        slots.value[tile][column] = __shfl_sync(FULL_WARP, place, 8 * tile + 2 * t + column);
    }
    Words words;
    read_keys(k, key_rows, slots, table, words);
    read_values<0, EARLY_READS>(v, value_rows, slots, table, words);
    // The next iteration's, whose branches also keep the loads above before the products. Two sides lack registers.
    if constexpr (SIDES == 1) token = token_at(from + SLOTS * WARPS);
    float s[2][4];
    multiply_keys(words, query, s);
    if constexpr (SIDES == 2) token = token_at(from + SLOTS * WARPS);
    read_values<EARLY_READS, VALUE_READS>(v, value_rows, slots, table, words);
    weigh(shape, slots, s, sums);
    add_values(words, s, sums);
  }

  // Step (5): the largest logit is known to the whole quad; sums are still per lane.
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    const float total = over_quad_sum(sums.total[side]), logit = over_quad_sum(sums.logits[side]);
    if (t == 0) {
      tops[warp][g + 8 * side] = sums.top[side];
      totals[warp][g + 8 * side] = total;
      logits[warp][g + 8 * side] = logit;
    }
  }
  if (lane == 0) used_slots[warp] = seen;
  const i64 part = i64(blockIdx.x) * gridDim.y + blockIdx.y;
  outs += part * shape.group * VALUE_DIM;
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    const int rows = shape.group - 8 * side < 8 ? shape.group - 8 * side : 8;
    if (rows <= 0) break;
    if (side) __syncthreads();  // the sums of the first heads have been read
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (2 * t + i >= rows) continue;
#pragma unroll
      for (int j = 0; j < 2 * TILES / CHUNK; j++) {
        float x[CHUNK];
#pragma unroll
        for (int c = 0; c < CHUNK; c++)
          x[c] = sums.out[(CHUNK * j + c) / 2][side][2 * (c % 2) + i];
        put(&merged[warp][2 * t + i][CHUNK * (8 * j + g)], x);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < rows * CHUNKS; i += GATHER_THREADS) {
      const int row = i / CHUNKS, chunk = i % CHUNKS, of = row + 8 * side;
      float top = tops[0][of], sum[CHUNK] = {};
#pragma unroll
      for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w][of]);
      const float base = top == -INFINITE ? 0.0f : top;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float shrink = __expf(tops[w][of] - base);
        float x[CHUNK];
        get(&merged[w][row][CHUNK * chunk], x);
#pragma unroll
        for (int c = 0; c < CHUNK; c++) sum[c] += shrink * x[c];
      }
      put(outs + of * VALUE_DIM + value_column(CHUNK * (chunk / 8), chunk % 8), sum);
    }
  }
  if (thread < shape.group) {
    float top = tops[0][thread], total = 0.0f, logit = 0.0f;
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w][thread]);
    for (int w = 0; w < WARPS; w++) {
      total += totals[w][thread] * __expf(tops[w][thread] - (top == -INFINITE ? 0.0f : top));
      logit += logits[w][thread];
    }
    float* to = stats + 3 * (part * shape.group + thread);
    to[0] = top, to[1] = total, to[2] = logit;
  }
  if (thread == 0) {
    int used = 0;
    for (int w = 0; w < WARPS; w++) used += used_slots[w];
    counts[part] = used;
  }
}

#include "combine.cuh"
