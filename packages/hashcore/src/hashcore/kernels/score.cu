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
// list_candidates, grid rows x splits, blocks of 512. A warp iterates over its keys, KEYS * SLICE at a time.
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
  __syncthreads();
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

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    list_candidates(const u32* __restrict__ query, const u32* __restrict__ keys, RowMap map, Window window,
                    Selection selection, Weights weights, Space space, i32 first_row, Pages pages) {
  wait_for_bounds(window, selection);
  const int slot = blockIdx.x, row = first_row + slot;
  const Range range = eligible(window, row);
  const Cut cut(range, gridDim.y);
  // A block whose lists are never read waits, too, because the next kernel waits for this grid alone.
  if (cut.keys(blockIdx.y * WARPS).size() == 0) return wait_for_predecessor();
  __shared__ u32 bins[BINS];
  if (threadIdx.x < BINS) bins[threadIdx.x] = 0;  // barriers follow
  const int lane = threadIdx.x & 31, list = blockIdx.y * WARPS + int(threadIdx.x >> 5), part = lane % LANES;
  const Range mine = cut.keys(list);
  const Operands at = operands(query, keys, map, row);
  const Keys all(at.keys, map.key, pages, row);
  Sample sample(range);
  const int wanted = selected(selection, range, row);

  wait_for_predecessor();
  sample.read(all, part);
  // Loaded while the floor is found, if the planes leave registers for both.
  Held held(all, mine.low + lane / LANES, TENSOR ? mine.high : mine.low, part);
  const Query planes(at.query, lane, weights);
  const u32 floor = wanted ? find_floor(sample, all, planes, weights, range, wanted, space.shift) : 0;
  if constexpr (!TENSOR) held = Held(all, mine.low + lane / LANES, mine.high, part);
  u32* const candidates = space.lists + slot * space.stride + mine.low;
  u32 found = 0;  // length of the warp's list so far
#pragma unroll 1
  for (int first = mine.low; first < mine.high; first += KEYS * SLICE) {
    const Held next = held.next(part);
    if (wanted) {
      int score[KEYS];
      u32 valid = 0;
#pragma unroll
      for (int u = 0; u < KEYS; u++) {
        score[u] = held.score(u, planes, weights);
        const int i = held.first + u * SLICE;
        valid |= u32(i < held.end && i >= range.low && lane % LANES == 0) << u;
      }
      found = append(score, valid, Digits(floor, space.top), found, candidates, held.first - mine.low, bins);
    }
    held = next;
  }
  __syncthreads();  // all candidates are counted
  let_dependents_start();
  u32* const counted = space.bins + (i64(slot) * gridDim.y + blockIdx.y) * BINS;
  if (threadIdx.x < BINS) counted[threadIdx.x] = bins[threadIdx.x];
  if (lane == 0) space.counts[(i64(slot) * gridDim.y + blockIdx.y) * WARPS + (threadIdx.x >> 5)] = found;
  if (blockIdx.y == 0 && threadIdx.x == 0) space.floors[slot] = floor;  // the same in all blocks of a row
}

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
