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
constexpr int FOUR = 4;  // candidates of a list that a lane reads at once
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

// The candidates of a row: lists of score << 16 | offset from the list's first key.
struct Row {
  u32* lists;
  u16* lengths;  // shared
  Cut cut;

  __device__ __forceinline__ u32* at(int list) const { return lists + cut.keys(list).low; }
};

// Makes all keys of a row its candidates. Every block of the row does so, with the same results; what was read of a list
// before is dropped. Every thread must call it.
__device__ __forceinline__ void list_all(const Row& row, int count, const Range& range, const u32* query,
                                         const Keys& keys, const Codes& codes, const i32* weights) {
#pragma unroll 1
  for (int list = threadIdx.x / 32; list < count; list += WARPS) {
    const Range own = overlap(row.cut.keys(list), range);
    const int base = row.cut.keys(list).low, lane = threadIdx.x & 31;
#pragma unroll 1
    for (int i = lane; i < own.size(); i += 32) {
      const u32 score = score_alone(keys.at(own.low + i), query, codes.planes, codes.words, weights);
      row.lists[base + i] = score << 16 | u32(own.low + i - base);
    }
    if (lane == 0) row.lengths[list] = u16(own.size());
  }
  __syncthreads();
}

// Calls take(list, score) for the candidates of lists [0, count). All threads are busy: some lanes read a list together,
// four candidates each, and the next four before they look at these.
template <class Take>
__device__ __forceinline__ void each_score(const Row& row, int count, Take take) {
  int lanes = 32;
  while (lanes > 2 && lanes * count > SELECT_THREADS) lanes /= 2;
#pragma unroll 1
  for (int list = threadIdx.x / lanes; list < count; list += SELECT_THREADS / lanes) {
    const int length = row.lengths[list], step = FOUR * lanes;
    const u32* const from = row.at(list);
    int i = FOUR * (threadIdx.x % lanes);
    uint4 next = {};
    if (i < length) next = __ldcg(reinterpret_cast<const uint4*>(from + i));
#pragma unroll 1
    for (; i < length; i += step) {
      const u32 entry[FOUR] = {next.x, next.y, next.z, next.w};
      if (i + step < length) next = __ldcg(reinterpret_cast<const uint4*>(from + i + step));
#pragma unroll
      for (int j = 0; j < FOUR; j++)
        if (i + j < length) take(list, entry[j] >> 16);
    }
  }
}

// ---- Threshold -----------------------------------------------------------------------------------------------------

// The candidates with one digit: of a row, and of its earlier blocks.
struct Counts {
  u32 all;
  u32 before;
};

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
__device__ __forceinline__ bool find(const Counts& counts, u32 wanted, Found& found) {
  __shared__ Found shared;
  u64 total;
  const u64 sums = scan_block(u64(counts.before) << 32 | counts.all, total);
  const u32 above = u32(sums);
  if (above < wanted && wanted <= above + counts.all)
    shared = {BINS - 1 - threadIdx.x, above, u32(sums >> 32), counts.before};
  __syncthreads();
  found = shared;
  __syncthreads();
  return u32(total) >= wanted;
}

// Adds up a thread's bin over the blocks [0, live) of a row, and over those before this one.
__device__ __forceinline__ Counts add_bins(const u32* bins, int live) {
  Counts sum = {0, 0};
  if (threadIdx.x >= BINS) return sum;
  bins += BINS - 1 - threadIdx.x;
#pragma unroll 16
  for (int s = 0; s < live; s++) {
    const u32 count = __ldcg(bins + s * BINS);
    sum.all += count;
    sum.before += s < int(blockIdx.y) ? count : 0;
  }
  return sum;
}

struct Threshold {
  u32 score;
  u32 quota;    // number of keys of that score to select
  Place place;  // those of the row's earlier blocks above it, and equal to it
};

// Counts a digit of the candidates of a row, and of its earlier blocks: the high one, or the low one of those with this
// high one. Every thread must call it.
__device__ __forceinline__ Counts count_digits(const Row& row, int live, const Digits& digits, bool low, u32 high) {
  __shared__ u32 all[BINS], before[BINS];
  const int mine = blockIdx.y * WARPS, thread = threadIdx.x;
  if (thread < BINS) all[thread] = before[thread] = 0;
  __syncthreads();
  each_score(row, live * WARPS, [&](int list, u32 score) {
    const u32 digit = low ? digits.low_of(score) : digits.high_of(score);
    if (low && digits.high_of(score) != high) return;
    atomicAdd(&all[digit], 1u);
    if (list < mine) atomicAdd(&before[digit], 1u);
  });
  __syncthreads();
  if (thread >= BINS) return {0, 0};
  return {all[BINS - 1 - thread], before[BINS - 1 - thread]};
}

// Finds the k-th best score among a row's candidates, if it has the high digit `high`. Every thread must call it.
__device__ __forceinline__ Threshold find_threshold(const Row& row, const Digits& digits, const Found& high, int live,
                                                    u32 wanted) {
  Found low = {0, 0, 0, 0};
  wanted -= high.above;
  find(count_digits(row, live, digits, true, high.digit), wanted, low);
  const u32 score = digits.floor + (high.digit << digits.low | low.digit);
  return {score, wanted - low.above, {high.above_before + low.above_before, low.same_before}};
}

// ---- Selection -----------------------------------------------------------------------------------------------------

// A warp's list in steps of HELD entries a lane, or what was read of it if one step suffices.
struct Own {
  u32 entry[HELD];
  u32 used;  // bit j: entry j is one

  // Reads one step of at most `room` candidates; how many there are need not be known yet.
  __device__ __forceinline__ void read(const u32* list, int room) {
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      const int i = 32 * j + int(threadIdx.x & 31);
      entry[j] = i < room ? __ldcg(list + i) : 0;
    }
  }
  __device__ __forceinline__ void use(int from, int length) {
    used = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) used |= u32(from + 32 * j + int(threadIdx.x & 31) < length) << j;
  }
  __device__ __forceinline__ bool above(int j, u32 score) const { return used >> j & 1 && entry[j] >> 16 > score; }
  __device__ __forceinline__ bool equal(int j, u32 score) const { return used >> j & 1 && entry[j] >> 16 == score; }
};

// Writes a block's selected candidates, in order. own: the first of a warp's list. Every thread must call it.
__device__ __forceinline__ void emit(const Row& row, const Threshold& threshold, Own& own, i32* values, i64* indices) {
  __shared__ Place of_warps[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, list = blockIdx.y * WARPS + warp;
  const int length = row.lengths[list], base = row.cut.keys(list).low;
  const u32 below = (1u << lane) - 1;
  Place mine = {0, 0};
#pragma unroll 1
  for (int from = 0; from < length; from += 32 * HELD) {
    if (from) own.read(row.at(list) + from, length - from);
    own.use(from, length);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      if (from + 32 * j >= length) break;
      mine.above += __popc(__ballot_sync(FULL_WARP, own.above(j, threshold.score)));
      mine.equal += __popc(__ballot_sync(FULL_WARP, own.equal(j, threshold.score)));
    }
  }
  if (lane == 0) of_warps[warp] = mine;
  __syncthreads();
  Place place = threshold.place;
  for (int w = 0; w < warp; w++) place.above += of_warps[w].above, place.equal += of_warps[w].equal;
#pragma unroll 1
  for (int from = 0; from < length; from += 32 * HELD) {
    if (length > 32 * HELD) own.read(row.at(list) + from, length - from);
    own.use(from, length);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      if (from + 32 * j >= length) break;
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

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    select_64(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ values,
              i64* __restrict__ indices, RowMap map, Window window, Selection selection, Codes codes, Space space,
              i32 first, Pages pages) {
  __shared__ u16 lengths[MAX_LISTS];
  __shared__ i32 weights[8];
  wait_for_bounds(window, selection);
  const int slot = blockIdx.x, splits = gridDim.y, row = first + slot, thread = threadIdx.x;
  const Range range = eligible(window, row);
  const Cut cut(range, splits);
  const int wanted = selected(selection, range, row), live = cut.blocks(), lists = live * WARPS;
  const int mine = blockIdx.y * WARPS + thread / 32;
  values += i64(row) * selection.width;
  indices += i64(row) * selection.width;
  const u32* const counts = space.counts + i64(slot) * splits * WARPS;
  const Row of = {space.lists + slot * space.stride, lengths, cut};
  if (thread == 0) {
#pragma unroll
    for (int p = 0; p < 8; p++) weights[p] = codes.weights.of[p];
  }

  wait_for_predecessor();
  let_dependents_start();  // they wait, too: for the end of this kernel
  if (wanted > 0 && int(blockIdx.y) < live) {
    // All that can be read before anything is known is read at once.
    Digits digits(__ldcg(space.floors + slot), space.top);
    const u32 first_length = thread < lists ? __ldcg(counts + thread) : 0;
    Own own;
    own.read(of.at(mine), cut.keys(mine).size());
    const Counts listed = add_bins(space.bins + i64(slot) * splits * BINS, live);
    if (thread < lists) lengths[thread] = u16(first_length);
    for (int list = thread + SELECT_THREADS; list < lists; list += SELECT_THREADS)
      lengths[list] = u16(__ldcg(counts + list));
    Found high;
    if (!find(listed, u32(wanted), high)) {
      const Operands at = operands(query, keys, map, row);
      list_all(of, lists, range, at.query, Keys(at.keys, map.key, pages, row), codes, weights);
      digits = Digits(0, space.top);
      find(count_digits(of, live, digits, false, 0), u32(wanted), high);
      own.read(of.at(mine), lengths[mine]);
    }
    emit(of, find_threshold(of, digits, high, live, u32(wanted)), own, values, indices);
  }
  fill(values, indices, wanted, selection.width);
}
