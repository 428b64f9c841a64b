// Selects the k best keys of each row of a search among the candidates listed by score.cu (algorithm.md, eq. 6): ties
// to the lowest index, indices ascending. One source for all codes: only missing keys are scored here.
//
// select, grid rows x splits, blocks of 512. Every block of a row finds the same threshold, and writes what is selected
// of its own lists, so that no block waits for another:
//   (1) it adds up the high digits that the row's blocks have counted, and finds that of the k-th best. As every key at
//       or above the lists' floor is a candidate, none is missing if there are k. If there are fewer, all keys of the
//       row are scored now;
//   (2) it counts the low digits of the candidates with that high digit, and finds the k-th best;
//   (3) both counts tell how many of the earlier blocks' candidates are selected: the first slot of its own.
//
// HASHCORE_PAGES: keys are in pages that a table names (pages.cuh).
#include "lists.cuh"
#include "pages.cuh"

constexpr int MAX_LISTS = MAX_SPLITS * WARPS;
constexpr int FEW = 8;   // lists of which a warp reads at once
constexpr int HELD = 4;  // entries of its own list that a lane keeps

// The format of codes, needed only to score missing keys.
struct Codes {
  Weights weights;
  i32 planes;
  i32 words;
};

// The score of one key by one thread, with few registers.
// weights: in shared memory, because an indexed kernel argument would be copied to local memory.
__device__ __forceinline__ u32 score_alone(const u32* key, const u32* query, int planes, int words,
                                           const i32* weights) {
  int score = 0;
#pragma unroll 1
  for (int p = 0; p < planes; p++) {
    int same = 0;
#pragma unroll 1
    for (int w = 0; w < words; w++) same += __popc(~(__ldg(query + p * words + w) ^ __ldg(key + w)));
    score += weights[p] * same;
  }
  return u32(score);
}

// ---- Candidates ----------------------------------------------------------------------------------------------------

// The candidates of a row: those listed, or all its keys.
struct Row {
  const u32* query;
  Keys keys;
  const u32* lists;
  const u16* lengths;  // shared
  int planes, words;
  const i32* weights;  // shared: [planes]
  Range range;
  Cut cut;
  bool all;

  // The number of a list's candidates.
  __device__ __forceinline__ int length(int list) const {
    return all ? overlap(cut.keys(list), range).size() : int(lengths[list]);
  }

  // Candidate i of a list: score << 16 | offset from the list's first key.
  __device__ __forceinline__ u32 entry(int list, int i) const {
    const int base = cut.keys(list).low;
    if (!all) return __ldcg(lists + base + i);
    const int at = overlap(cut.keys(list), range).low + i;
    return score_alone(keys.at(at), query, planes, words, weights) << 16 | u32(at - base);
  }
};

// Calls take(list, score) for the candidates of lists [0, count); FEW lists of a warp are read at once.
template <class Take>
__device__ __forceinline__ void each_score(const Row& row, int count, Take take) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int first = threadIdx.x / 32 * FEW; first < count; first += WARPS * FEW) {
    int longest = 0;
#pragma unroll
    for (int l = 0; l < FEW; l++)
      if (first + l < count && row.length(first + l) > longest) longest = row.length(first + l);
#pragma unroll 1
    for (int i = lane; i < longest; i += 32) {
      if (row.all) {
#pragma unroll 1
        for (int list = first; list < first + FEW && list < count; list++)
          if (i < row.length(list)) take(list, row.entry(list, i) >> 16);
        continue;
      }
      u32 entry[FEW];
#pragma unroll
      for (int l = 0; l < FEW; l++) {
        entry[l] = 0;
        if (first + l < count && i < row.length(first + l))
          entry[l] = __ldcg(row.lists + row.cut.keys(first + l).low + i);
      }
#pragma unroll
      for (int l = 0; l < FEW; l++)
        if (first + l < count && i < row.length(first + l)) take(first + l, entry[l] >> 16);
    }
  }
}

// ---- Threshold -----------------------------------------------------------------------------------------------------

// A digit of the k-th best: how many candidates have a higher one, in the row and in its earlier blocks, and how many
// of the latter have the same.
struct Found {
  u32 digit;
  u32 above;
  u32 above_before;
  u32 same_before;
};

// Finds the digit of the `wanted`-th best; false if there are fewer. Thread t gives the counts of digit BINS - 1 - t:
// of the row, and of its earlier blocks. Every thread must call it.
__device__ __forceinline__ bool find(u32 all, u32 before, u32 wanted, Found& found) {
  __shared__ Found shared;
  u32 total, ignored;
  const u32 above = scan_block(all, total), above_before = scan_block(before, ignored);
  if (above < wanted && wanted <= above + all) shared = {BINS - 1 - threadIdx.x, above, above_before, before};
  __syncthreads();
  found = shared;
  __syncthreads();
  return total >= wanted;
}

// Adds up one bin of the blocks [0, live) of a row, and of those before `split`.
__device__ __forceinline__ void add_bins(const u32* bins, int live, int split, u32& all, u32& before) {
  const u32* from = bins + (BINS - 1 - threadIdx.x);
#pragma unroll 8
  for (int s = 0; s < live; s++) {
    const u32 count = __ldcg(from + s * BINS);
    all += count;
    before += s < split ? count : 0;
  }
}

struct Threshold {
  u32 score;
  u32 quota;    // number of keys of that score to select
  Place place;  // those of the row's earlier blocks above it, and equal to it
};

// Finds the k-th best score among a row's candidates; false if there are fewer. Every thread must call it.
__device__ __forceinline__ bool find_threshold(const Row& row, const Space& space, i64 slot, int splits, int live,
                                               u32 wanted, Threshold& to) {
  __shared__ u32 all[BINS], before[BINS];
  const int split = blockIdx.y, mine = split * WARPS, thread = threadIdx.x;
  const Digits digits(row.all ? 0 : __ldcg(space.floors + slot), space.top);
  u32 of_row = 0, of_earlier = 0;
  if (row.all) {
    if (thread < BINS) all[thread] = before[thread] = 0;
    __syncthreads();
    each_score(row, live * WARPS, [&](int list, u32 score) {
      atomicAdd(&all[digits.high_of(score)], 1u);
      if (list < mine) atomicAdd(&before[digits.high_of(score)], 1u);
    });
    __syncthreads();
    if (thread < BINS) of_row = all[BINS - 1 - thread], of_earlier = before[BINS - 1 - thread];
  } else if (thread < BINS) {
    add_bins(space.bins + slot * splits * BINS, live, split, of_row, of_earlier);
  }
  Found high, low = {0, 0, 0, 0};
  if (!find(of_row, of_earlier, wanted, high)) return false;
  if (thread < BINS) all[thread] = before[thread] = 0;
  __syncthreads();
  each_score(row, live * WARPS, [&](int list, u32 score) {
    if (digits.high_of(score) != high.digit) return;
    atomicAdd(&all[digits.low_of(score)], 1u);
    if (list < mine) atomicAdd(&before[digits.low_of(score)], 1u);
  });
  __syncthreads();
  of_row = thread < BINS ? all[BINS - 1 - thread] : 0, of_earlier = thread < BINS ? before[BINS - 1 - thread] : 0;
  wanted -= high.above;
  find(of_row, of_earlier, wanted, low);
  to.score = digits.floor + (high.digit << digits.low | low.digit);
  to.quota = wanted - low.above;
  to.place = {high.above_before + low.above_before, low.same_before};
  return true;
}

// ---- Selection -----------------------------------------------------------------------------------------------------

// A warp's list in steps of HELD entries a lane, or what was read of it if one step suffices.
struct Own {
  u32 entry[HELD];
  u32 used;  // bit j: entry j is one

  __device__ __forceinline__ void read(const Row& row, int list, int from, int length) {
    used = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      const int i = from + 32 * j + int(threadIdx.x & 31);
      entry[j] = 0;
      if (i < length) entry[j] = row.entry(list, i), used |= 1u << j;
    }
  }
  __device__ __forceinline__ bool above(int j, u32 score) const { return used >> j & 1 && entry[j] >> 16 > score; }
  __device__ __forceinline__ bool equal(int j, u32 score) const { return used >> j & 1 && entry[j] >> 16 == score; }
};

// Writes the selected among a block's own candidates, in order. Every thread must call it.
template <class Index>
__device__ __forceinline__ void emit(const Row& row, const Threshold& threshold, i32* values, Index* indices) {
  __shared__ Place of_warps[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, list = blockIdx.y * WARPS + warp;
  const int length = row.length(list), base = row.cut.keys(list).low;
  const u32 below = (1u << lane) - 1;
  Own own;
  Place mine = {0, 0};
#pragma unroll 1
  for (int from = 0; from < length; from += 32 * HELD) {
    own.read(row, list, from, length);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      mine.above += __popc(__ballot_sync(FULL_WARP, own.above(j, threshold.score)));
      mine.equal += __popc(__ballot_sync(FULL_WARP, own.equal(j, threshold.score)));
    }
  }
  if (lane == 0) of_warps[warp] = mine;
  __syncthreads();
  Place place = threshold.place;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const Place one = of_warps[w];
    if (w < warp) place.above += one.above, place.equal += one.equal;
  }
#pragma unroll 1
  for (int from = 0; from < length; from += 32 * HELD) {
    if (length > 32 * HELD) own.read(row, list, from, length);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      const bool above = own.above(j, threshold.score), equal = own.equal(j, threshold.score);
      const u32 first = __ballot_sync(FULL_WARP, above), second = __ballot_sync(FULL_WARP, equal);
      const u32 earlier = place.equal + __popc(second & below);
      if (above || (equal && earlier < threshold.quota)) {
        const u32 slot = place.above + __popc(first & below) + (earlier < threshold.quota ? earlier : threshold.quota);
        values[slot] = i32(own.entry[j] >> 16);
        indices[slot] = base + int(own.entry[j] & 0xffffu);
      }
      place.above += __popc(first), place.equal += __popc(second);
    }
  }
}

template <class Index>
__device__ __forceinline__ void select_row(const u32* query, const u32* keys, const RowMap& map, const Window& window,
                                           const Selection& selection, const Codes& codes, const Space& space,
                                           const Groups& groups, const Pages& pages, i32* values, Index* indices) {
  __shared__ u16 lengths[MAX_LISTS];
  __shared__ i32 weights[8];
  const Group group = group_of(groups, blockIdx.x / groups.size);
  const int slot = blockIdx.x, splits = gridDim.y, row = group.row + slot % groups.size;
  if (slot % groups.size >= group.count) return;
  const Range range = eligible(window, row);
  const Cut cut(reach(window, group), splits);
  const int wanted = selected(selection, range, row), live = cut.blocks();
  values += i64(row) * selection.width;
  indices += i64(row) * selection.width;
  if (wanted > 0 && int(blockIdx.y) < live) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int p = 0; p < 8; p++) weights[p] = codes.weights.of[p];
    }
    const u32* counts = space.counts + i64(slot) * splits * WARPS;
    for (int list = threadIdx.x; list < live * WARPS; list += SELECT_THREADS)
      lengths[list] = u16(__ldcg(counts + list));
    Row of = {nullptr, Keys(nullptr, 0), space.lists + slot * space.stride, lengths, codes.planes, codes.words,
              weights, range, cut, false};
    Threshold threshold;
#pragma unroll 1
    while (!find_threshold(of, space, slot, splits, live, u32(wanted), threshold)) {
      const Operands at = operands(query, keys, map, row);
      of.all = true, of.query = at.query, of.keys = Keys(at.keys, map.key, pages, row);
    }
    emit(of, threshold, values, indices);
  }
  fill(values, indices, wanted, selection.width);
}

#define SELECT_KERNEL(name, Index)                                                                               \
  extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)                                                 \
      name(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ values,                \
           Index* __restrict__ indices, RowMap map, Window window, Selection selection, Codes codes, Space space, \
           Groups groups PAGES_PARAMETER) {                                                                      \
    wait_for_predecessor();                                                                                      \
    let_dependents_start();                                                                                      \
    select_row(query, keys, map, window, selection, codes, space, groups, PAGES, values, indices);               \
  }

SELECT_KERNEL(select_32, i32)
SELECT_KERNEL(select_64, i64)
