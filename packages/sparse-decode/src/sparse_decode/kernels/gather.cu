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
//   (1) S = Q K^T by mma, with heads as rows and slots as columns. The sum over D may run in any order, so a lane reads
//       16 consecutive bytes of a key instead of 4 x 4 bytes, and Q is permuted accordingly in shared memory.
//   (2) Online softmax: largest logit and sum per head; sums are rescaled when the largest logit grows.
//   (3) O += P V: the fragment of S is used as that of P. A lane reads 16 bytes of each of its four values' rows, whose
//       columns are assigned to mma fragments so that no data moves between lanes.
//   (4) The warps' sums are added in shared memory, and written as float32 with largest logit, sum and sum of logits.
// combine (combine.cuh) makes the result of these.
//
// Keys and values are read once, from memory to registers, 16 bytes per lane, and only selected rows. Bytes per slot:
// 2 (D + Dv) + 8. An H200 at 85 % of 4.3 TB/s gathers 512K x 2 % x 4 heads, 21.8 MB, in 6.0 us.
//
// SPARSE_DIM: D. SPARSE_VALUE_DIM: Dv. Multiples of 16, up to 256. SPARSE_BF16: dtype of q, k, v and the result.
// HASHCORE_PAGES: keys and values are in pages [M][Hkv][2^shift][D] and [M][Hkv][2^shift][Dv] with strides; Rows.batch is
// that of pages, and the table of a batch row gives its pages (hashcore's pages.cuh). N is the tokens of a table.
#include "mma.cuh"
#include "slots.cuh"

constexpr int GATHER_THREADS = 128, WARPS = GATHER_THREADS / 32, MAX_GROUP = 16, SLOTS = 16;

// Words (of two numbers) per read of a lane: 16 bytes if the row length allows it.
constexpr int KEY_WORDS = DIM % 32 == 0 ? 4 : 2;
constexpr int VALUE_WORDS = VALUE_DIM % 64 == 0 ? 4 : VALUE_DIM % 32 == 0 ? 2 : 1;
constexpr int KEY_READS = DIM / (8 * KEY_WORDS), STEPS = DIM / 16;                 // four lanes share a key
constexpr int VALUE_READS = VALUE_DIM / (16 * VALUE_WORDS), TILES = VALUE_DIM / 8;  // eight lanes share a value
constexpr int MIN_BLOCKS = DIM + VALUE_DIM <= 256 ? 3 : 1;  // limited by registers: TILES * 4 sums, and loads in flight

template <int WORDS>
__device__ __forceinline__ void read(const Half* from, u32 (&to)[WORDS]) {
  if constexpr (WORDS == 4) {
    const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (WORDS == 2) {
    const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = __ldg(reinterpret_cast<const u32*>(from));
  }
}

// The column of q that lane 4 g + t holds in word `part` (0 or 1) of step `step`, matching the key's words.
__device__ __forceinline__ int key_column(int step, int t, int part) {
  constexpr int IN_READ = KEY_WORDS / 2;  // steps that one read feeds
  return 8 * KEY_WORDS * (step / IN_READ) + 2 * KEY_WORDS * t + 4 * (step % IN_READ) + 2 * part;
}

// The running sums of one warp. Index [0] is head g, [1] head g + 8.
struct Sums {
  float out[TILES][4];
  float top[2], total[2], logits[2];
};

__device__ __forceinline__ float over_quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
  return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ __forceinline__ float over_quad_sum(float x) {
  x += __shfl_xor_sync(FULL_WARP, x, 1);
  return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// The component of a value for column `reg` % 2 of lane t in a tile's fragment.
__device__ __forceinline__ int value_column(int tile, int t, int reg) {
  constexpr int IN_READ = 2 * VALUE_WORDS;  // tiles that one read feeds
  return 16 * VALUE_WORDS * (tile / IN_READ) + IN_READ * (2 * t + reg % 2) + tile % IN_READ;
}

// Step (1): the logits of 16 slots, in two tiles of 8.
__device__ __forceinline__ void multiply_keys(const Half* keys, const Rows& at, const i64 (&key)[2], int tokens,
                                              const u32 (*query)[32][4], const Pages& pages, float (&s)[2][4]) {
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) s[tile][i] = 0.0f;
  }
  u32 words[2][KEY_READS][KEY_WORDS];
#pragma unroll
  for (int tile = 0; tile < 2; tile++) {
    const bool used = is_used(key[tile], tokens);
    const Half* row = row_at(keys, at, used ? key[tile] : 0, pages) + 2 * KEY_WORDS * t;
#pragma unroll
    for (int r = 0; r < KEY_READS; r++) {
#pragma unroll
      for (int w = 0; w < KEY_WORDS; w++) words[tile][r][w] = 0;
      if (used) read(row + 8 * KEY_WORDS * r, words[tile][r]);
    }
  }
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    constexpr int IN_READ = KEY_WORDS / 2;
    const uint4 q = *reinterpret_cast<const uint4*>(query[step][lane]);
    const u32 a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const u32 b[2] = {words[tile][step / IN_READ][2 * (step % IN_READ)],
                        words[tile][step / IN_READ][2 * (step % IN_READ) + 1]};
      mma(s[tile], a, b);
    }
  }
}

// Step (2): replace logits by weights; unused slots get weight 0.
__device__ __forceinline__ void weigh(const Shape& shape, const bool (&used)[2][2], float (&s)[2][4], Sums& sums) {
#pragma unroll
  for (int side = 0; side < 2; side++) {
    float top = sums.top[side];
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
#pragma unroll
      for (int column = 0; column < 2; column++) {
        float& x = s[tile][2 * side + column];
        x *= shape.scaling;
        if (shape.softcap > 0.0f) x = shape.softcap * tanhf(x / shape.softcap);
        if (used[tile][column]) sums.logits[side] += x;
        if (!used[tile][column]) x = -INFINITE;
        top = fmaxf(top, x);
      }
    }
    top = over_quad_max(top);
    const float base = top == -INFINITE ? 0.0f : top;  // without a used slot: -inf - -inf would be NaN
    const float shrink = __expf(sums.top[side] - base);
    sums.top[side] = top;
    sums.total[side] *= shrink;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      sums.out[tile][2 * side] *= shrink;
      sums.out[tile][2 * side + 1] *= shrink;
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

// Step (3): add weighted values.
__device__ __forceinline__ void add_values(const Half* values, const Rows& at, const i64 (&slot)[2][2], int tokens,
                                           const float (&s)[2][4], const Pages& pages, Sums& sums) {
  const int g = threadIdx.x % 32 / 4;
  const u32 a[4] = {narrow2(s[0][0], s[0][1]), narrow2(s[0][2], s[0][3]), narrow2(s[1][0], s[1][1]),
                    narrow2(s[1][2], s[1][3])};
#pragma unroll
  for (int r = 0; r < VALUE_READS; r++) {
    u32 words[2][2][VALUE_WORDS];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const i64 index = slot[i / 2][i % 2];
      const bool used = is_used(index, tokens);
#pragma unroll
      for (int w = 0; w < VALUE_WORDS; w++) words[i / 2][i % 2][w] = 0;  // unused rows are not read: 0 * NaN is NaN
      const Half* row = row_at(values, at, used ? index : 0, pages) + 2 * VALUE_WORDS * (g + 8 * r);
      if (used) read(row, words[i / 2][i % 2]);
    }
#pragma unroll
    for (int j = 0; j < 2 * VALUE_WORDS; j++) {
      u32 b[2];
#pragma unroll
      for (int far = 0; far < 2; far++) {
        const u32 first = words[far][0][j / 2], second = words[far][1][j / 2];
        b[far] = j % 2 ? (first >> 16) | (second & 0xffff0000u) : (first & 0xffffu) | (second << 16);
      }
      mma(sums.out[2 * VALUE_WORDS * r + j], a, b);
    }
  }
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS, MIN_BLOCKS)
    gather(const Half* __restrict__ q, const Half* __restrict__ k, const Half* __restrict__ v,
           const i64* __restrict__ indices, float* __restrict__ outs, float* __restrict__ stats,
           i32* __restrict__ counts, Rows key_rows, Rows value_rows, Shape shape,
           const i64* __restrict__ always PAGES_PARAMETER) {
  __shared__ __align__(16) u32 query[STEPS][32][4];
  __shared__ float merged[MAX_GROUP][VALUE_DIM];
  __shared__ float tops[WARPS][MAX_GROUP], totals[WARPS][MAX_GROUP], logits[WARPS][MAX_GROUP];
  __shared__ i32 used_slots;
  const Task task(shape, blockIdx.x);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int first_head = task.set * shape.group, heads = shape.sets * shape.group;
  const i64 of_task = (i64(task.batch) * heads + first_head) * shape.queries + task.query;
  for (int i = thread; i < STEPS * 128; i += GATHER_THREADS) {
    const int step = i / 128, holder = i / 4 % 32, reg = i % 4, head = holder / 4 + 8 * (reg % 2);
    const i64 at = (of_task + i64(head) * shape.queries) * DIM + key_column(step, holder % 4, reg / 2);
    query[step][holder][reg] = head < shape.group ? __ldg(reinterpret_cast<const u32*>(q + at)) : 0;
  }
  for (int i = thread; i < MAX_GROUP * VALUE_DIM; i += GATHER_THREADS) merged[i / VALUE_DIM][i % VALUE_DIM] = 0.0f;
  if (thread == 0) used_slots = 0;
  __syncthreads();

  const int kv = first_head / shape.heads_per_kv;
  Pages table = PAGES;
  if constexpr (PAGED) {
    k += kv * key_rows.head, v += kv * value_rows.head;
    table.table += task.batch * table.width;
  } else {
    k += task.batch * key_rows.batch + kv * key_rows.head;
    v += task.batch * value_rows.batch + kv * value_rows.head;
  }
  const int places = PAGED ? 0x7fffffff : shape.tokens;  // a place is used if it is in [0, places)
  indices += ((i64(task.batch) * shape.sets + task.set) * shape.queries + task.query) * shape.width;
  if (always) always += i64(task.batch) * shape.sink;
  const int begin = blockIdx.y * shape.slots;
  const int all = shape.sink + shape.width + shape.recent;
  const int end = begin + shape.slots < all ? begin + shape.slots : all;
  Sums sums;
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
    for (int i = 0; i < 4; i++) sums.out[tile][i] = 0.0f;
  }
#pragma unroll
  for (int side = 0; side < 2; side++)
    sums.top[side] = -INFINITE, sums.total[side] = 0.0f, sums.logits[side] = 0.0f;
  int seen = 0;
#pragma unroll 1
  for (int from = begin + SLOTS * warp; from < end; from += SLOTS * WARPS) {
    i64 key[2], slot[2][2];
    bool used[2][2];
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const int mine = from + 8 * tile + g;
      key[tile] = mine < end ? place_of(token_of(indices, always, mine, shape), shape.tokens, table) : -1;
#pragma unroll
      for (int column = 0; column < 2; column++) {
        const int at = from + 8 * tile + 2 * t + column;
        slot[tile][column] = at < end ? place_of(token_of(indices, always, at, shape), shape.tokens, table) : -1;
        used[tile][column] = is_used(slot[tile][column], places);
        seen += used[tile][column];
      }
    }
    float s[2][4];
    multiply_keys(k, key_rows, key, places, query, table, s);
    weigh(shape, used, s, sums);
    add_values(v, value_rows, slot, places, s, table, sums);
  }

  // Step (4): the largest logit is known to the whole quad; sums are still per lane.
#pragma unroll
  for (int side = 0; side < 2; side++) {
    const float total = over_quad_sum(sums.total[side]), logit = over_quad_sum(sums.logits[side]);
    if (t == 0) {
      tops[warp][g + 8 * side] = sums.top[side];
      totals[warp][g + 8 * side] = total;
      logits[warp][g + 8 * side] = logit;
    }
  }
  if (g == 0 && seen) atomicAdd(&used_slots, seen);  // the lanes of a column hold the same slots
  __syncthreads();
  float base[2];
#pragma unroll
  for (int side = 0; side < 2; side++) {
    float top = tops[0][g + 8 * side];
#pragma unroll
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, tops[w][g + 8 * side]);
    base[side] = top == -INFINITE ? 0.0f : top;
  }
#pragma unroll 1
  for (int turn = 0; turn < WARPS; turn++) {  // in turn, for a fixed order of sums
    if (turn == warp) {
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const float shrink = __expf(sums.top[side] - base[side]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
          for (int column = 0; column < 2; column++)
            merged[g + 8 * side][value_column(tile, t, column)] += shrink * sums.out[tile][2 * side + column];
        }
      }
    }
    __syncthreads();
  }
  let_dependents_start();
  const i64 part = i64(blockIdx.x) * gridDim.y + blockIdx.y;
  for (int i = thread; i < shape.group * VALUE_DIM; i += GATHER_THREADS)
    outs[part * shape.group * VALUE_DIM + i] = merged[i / VALUE_DIM][i % VALUE_DIM];
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
  if (thread == 0) counts[part] = used_slots;
}

#include "combine.cuh"
