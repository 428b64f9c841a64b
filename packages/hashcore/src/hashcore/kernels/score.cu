// Weighted scores of every key against the planes of queries (docs/algorithm.md, eq. 4), and the k best of each row:
//
//     s_k = sum_p weight_p popcount(~(B_p xor c_k))
//
// query u32 [rows][P][W], keys u32 [..][N][W]; rows of keys may be repeated, and have gaps (RowMap), or, with
// HASHCORE_PAGES, be in pages that a table names (pages.cuh).
//
// A search is two launches, for any number of planes. Scores are not written: 2 bytes per key would be an eighth of the
// bytes read. A row's keys are divided into lists, one per warp.
//
// list_candidates, grid groups x splits, blocks of 512. A warp iterates over its keys, KEYS * SLICE at a time.
//   (1) A sample of keys, spread over the whole row, gives the floor: the score that enough of the sample reaches, a
//       quarter more than the row wants. Every block of a row reads the same sample, so that all have one floor without
//       waiting for each other, and results depend on nothing that an earlier search left behind.
//   (2) Each key whose score reaches the floor is a candidate: score and offset are packed in one word of the warp's
//       list, which starts at the offset of the warp's keys, so that a list of all keys fits. Ballots give the slots,
//       in order. The block also counts the high digits of its candidates' scores.
// A floor only saves work. If fewer keys reach it than are wanted, the next launch scores all keys of the row again.
//
// Then select (choose.cu) finds the k best of each row among its candidates.
//
// GROUP > 1: the rows of a group are queries over the same keys. A block loads a key once for all of them.
//
// 128K keys x 8 rows of 128 bits: 16.8 MB of codes. Without tensor cores, a key with 6 planes takes 13 POPC, which run
// on 16 lanes per clock and SM: on an H200 that takes longer than the codes' bytes.
//
// score_all writes int32 scores of all N keys without selecting, for the function `score`. Not for keys in pages.
#include "lane.cuh"

// ---- Candidates ----------------------------------------------------------------------------------------------------

constexpr int PICKED = TENSOR ? KEYS : (KEYS + 1) / 2;  // of a thread; planes in registers leave less room
constexpr int SAMPLED = PICKED * SLICE * WARPS;

// Keys that are spread over a range: one in each of SAMPLED parts of equal length, at a different place in each, so
// that no period in the keys can meet them. All keys of a range that has fewer.
struct Sample {
  int at[PICKED];  // -1: none
  u32 word[PICKED][BLOCK_WORDS];

  __device__ __forceinline__ Sample(const Range& range) {
    const u32 size = range.size();
#pragma unroll
    for (int u = 0; u < PICKED; u++) {
      const u32 i = (threadIdx.x / 32 * PICKED + u) * SLICE + threadIdx.x % 32 / LANES;
      const u32 jitter = (i * 0x9e3779b1u) >> 16;  // the golden ratio's multiples, in 16 bits
      const u32 place = u32(((u64(i) << 16 | jitter) * size / SAMPLED) >> 16);
      at[u] = size <= SAMPLED ? (i < size ? range.low + int(i) : -1) : range.low + int(place);
    }
  }

  __device__ __forceinline__ void read(const Keys& keys, int part) {
#pragma unroll
    for (int u = 0; u < PICKED; u++) {
#pragma unroll
      for (int w = 0; w < BLOCK_WORDS; w++) word[u][w] = 0;
      if (at[u] >= 0) load_share(keys.at(at[u]), 0, part, word[u]);
    }
  }
};

// Returns the score that enough of a row's sample reaches. Every thread must call it.
__device__ __forceinline__ u32 find_floor(const Sample& sample, const Keys& keys, const Query& query,
                                          const Weights& weights, const Range& row, int wanted, int shift) {
  __shared__ u32 bins[SAMPLE_BINS];
  __shared__ u32 found;
  if (threadIdx.x < SAMPLE_BINS) bins[threadIdx.x] = 0;
  __syncthreads();  // and the floor of the previous call was read
  if (threadIdx.x == 0) found = 0;
#pragma unroll
  for (int u = 0; u < PICKED; u++) {
    const int at = sample.at[u];
    const int score = score_of(sample.word[u], at >= 0, at >= 0 ? keys.at(at) : nullptr, query, weights);
    if (at >= row.low && at < row.high && threadIdx.x % LANES == 0) atomicAdd(&bins[score >> shift], 1u);
  }
  __syncthreads();
  const int bin = SAMPLE_BINS - 1 - int(threadIdx.x);  // the highest first
  const u32 count = bin >= 0 ? bins[bin] : 0;
  u32 all;
  const u32 above = scan_block(count, all);
  const u32 enough = u32(1.25f * float(wanted) * float(all) / float(row.size())) + SPARE;
  if (above < enough && above + count >= enough) found = u32(bin) << shift;
  __syncthreads();
  return found;
}

// A block's state of its rows: lane q holds that of row q; with one row, every lane holds it.
struct Rows {
  int low, high;
  int wanted;
  u32 floor;
  u32 found;  // length of the warp's list so far
};

template <int GROUP, class T>
__device__ __forceinline__ T of_row(T value, int q) {
  if constexpr (GROUP == 1) return value;
  return __shfl_sync(FULL_WARP, value, q);
}

// Appends the candidates among a warp's keys to its list, and returns the list's length. The whole warp must call it.
__device__ __forceinline__ u32 append(const int (&score)[KEYS], u32 valid, const Digits& digits, u32 found, u32* list,
                                      int offset, u32* bins) {
  const u32 below = (1u << (threadIdx.x & 31)) - 1;
#pragma unroll
  for (int u = 0; u < KEYS; u++) {
    const bool chosen = valid >> u & 1 && u32(score[u]) >= digits.floor;
    const u32 lanes = __ballot_sync(FULL_WARP, chosen);
    if (chosen) {
      list[found + __popc(lanes & below)] = u32(score[u]) << 16 | u32(offset + u * SLICE);
      atomicAdd(&bins[digits.high_of(score[u])], 1u);
    }
    found += __popc(lanes);
  }
  return found;
}

// Processes one row of a group for the keys in registers.
template <int GROUP>
__device__ __forceinline__ void take_row(const Held& held, const Query& query, const Weights& weights, Rows& rows,
                                         int q, u32* list, int base, int top, u32* bins) {
  const int lane = threadIdx.x & 31;
  const int low = of_row<GROUP>(rows.low, q), high = of_row<GROUP>(rows.high, q);
  int score[KEYS];
  u32 valid = 0;
#pragma unroll
  for (int u = 0; u < KEYS; u++) {
    score[u] = held.score(u, query, weights);
    const int i = held.first + u * SLICE;
    valid |= u32(i < held.end && i >= low && i < high && lane % LANES == 0) << u;
  }
  const u32 floor = of_row<GROUP>(rows.floor, q), found = of_row<GROUP>(rows.found, q);
  const u32 length = append(score, valid, Digits(floor, top), found, list, held.first - base, bins);
  if (GROUP == 1 || lane == q) rows.found = length;
}

template <int GROUP>
__device__ __forceinline__ Rows rows_of(const Group& group, const Window& window, const Selection& selection) {
  const int q = GROUP == 1 ? 0 : threadIdx.x & 31;
  if (q >= group.count) return {0, 0, 0, 0, 0};
  const Range range = eligible(window, group.row + q);
  return {range.low, range.high, selected(selection, range, group.row + q), 0, 0};
}

template <int GROUP>
__device__ __forceinline__ void list_group(const u32* __restrict__ query, const u32* __restrict__ keys,
                                           const RowMap& map, const Window& window, const Selection& selection,
                                           const Weights& weights, const Space& space, const Groups& groups,
                                           const Pages& pages) {
  wait_for_bounds(window, selection);
  const Group group = group_of(groups, blockIdx.x);
  const Range whole = GROUP == 1 ? eligible(window, group.row) : reach(window, group);
  const Cut cut(whole, gridDim.y);
  // A block whose lists are never read waits, too, because the next kernel waits for this grid alone.
  if (cut.keys(blockIdx.y * WARPS).size() == 0) return wait_for_predecessor();
  __shared__ u32 bins[GROUP][BINS];
  for (int i = threadIdx.x; i < GROUP * BINS; i += SELECT_THREADS) bins[i / BINS][i % BINS] = 0;  // barriers follow
  const int lane = threadIdx.x & 31, list = blockIdx.y * WARPS + int(threadIdx.x >> 5), part = lane % LANES;
  const Range mine = cut.keys(list);
  const Operands at = operands(query, keys, map, group.row);
  const i64 slot = i64(blockIdx.x) * groups.size, step = GROUP == 1 ? 0 : map.query[3];
  const Keys all(at.keys, map.key, pages, group.row);
  Sample sample(whole);
  Rows rows = rows_of<GROUP>(group, window, selection);

  wait_for_predecessor();
  sample.read(all, part);
  // Loaded while the floor is found, if the planes leave registers for both.
  Held held(all, mine.low + lane / LANES, TENSOR ? mine.high : mine.low, part);
  const Query only(at.query, lane, weights);
#pragma unroll 1
  for (int q = 0; q < group.count; q++) {
    const Range row = {of_row<GROUP>(rows.low, q), of_row<GROUP>(rows.high, q)};
    const int wanted = of_row<GROUP>(rows.wanted, q);
    if (wanted == 0) continue;
    u32 floor;
    if constexpr (GROUP == 1) {
      floor = find_floor(sample, all, only, weights, row, wanted, space.shift);
    } else {
      floor = find_floor(sample, all, Query(at.query + q * step, lane, weights), weights, row, wanted, space.shift);
    }
    if (GROUP == 1 || lane == q) rows.floor = floor;
  }
  if constexpr (!TENSOR) held = Held(all, mine.low + lane / LANES, mine.high, part);
  u32* const lists = space.lists + slot * space.stride + mine.low;
#pragma unroll 1
  for (int first = mine.low; first < mine.high; first += KEYS * SLICE) {
    const Held next = held.next(part);
    if constexpr (GROUP == 1) {
      if (rows.wanted) take_row<1>(held, only, weights, rows, 0, lists, mine.low, space.top, bins[0]);
    } else {
#pragma unroll 1
      for (int q = 0; q < group.count; q++)
        if (of_row<GROUP>(rows.wanted, q))
          take_row<GROUP>(held, Query(at.query + q * step, lane, weights), weights, rows, q, lists + q * space.stride,
                          mine.low, space.top, bins[q]);
    }
    held = next;
  }
  __syncthreads();  // all candidates are counted
  let_dependents_start();
#pragma unroll 1
  for (int q = 0; q < group.count; q++) {
    u32* const to = space.bins + ((slot + q) * gridDim.y + blockIdx.y) * BINS;
    if (threadIdx.x < BINS) to[threadIdx.x] = bins[q][threadIdx.x];
  }
  if (lane >= group.count) return;
  const i64 of = slot + (GROUP == 1 ? 0 : lane);
  space.counts[(of * gridDim.y + blockIdx.y) * WARPS + (threadIdx.x >> 5)] = rows.found;
  if (blockIdx.y == 0 && threadIdx.x < 32) space.floors[of] = rows.floor;  // the same in all blocks of a row
}

#define LIST_KERNEL(name, GROUP)                                                                                     \
  extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)                                                    \
      name(const u32* __restrict__ query, const u32* __restrict__ keys, RowMap map, Window window,                   \
           Selection selection, Weights weights, Space space, Groups groups PAGES_PARAMETER) {                       \
    list_group<GROUP>(query, keys, map, window, selection, weights, space, groups, PAGES);                           \
  }

LIST_KERNEL(list_candidates, 1)
LIST_KERNEL(list_candidates_shared, MAX_GROUP)

// ---- All scores ----------------------------------------------------------------------------------------------------

#ifndef HASHCORE_PAGES
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    score_all(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ scores, RowMap map,
              Weights weights, i32 n) {
  const Operands at = operands(query, keys, map, blockIdx.x);
  const int lane = threadIdx.x & 31;
  const Query planes(at.query, lane, weights);
  i32* out = scores + i64(blockIdx.x) * n;
  const i64 tile = KEYS * SLICE * WARPS;
#pragma unroll 1
  for (i64 i = blockIdx.y * tile + KEYS * SLICE * (threadIdx.x >> 5); i < n; i += gridDim.y * tile) {
    const Held held(at.keys, map.key, int(i) + lane / LANES, n, lane % LANES);
#pragma unroll
    for (int u = 0; u < KEYS; u++) {
      const int score = held.score(u, planes, weights), at = held.first + u * SLICE;
      if (at < n && lane % LANES == 0) out[at] = score;
    }
  }
}
#endif
