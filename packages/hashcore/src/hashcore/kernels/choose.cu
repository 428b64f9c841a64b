// Selects the k best keys of each row of a search among the candidates listed by score.cu (algorithm.md, eq. 6): ties
// to the lowest index, indices ascending. One source for all codes: only missing keys are scored here.
//
// select, a block of 512 threads for each row. A warp's read of up to 32 entries of one list is a chunk; chunks are
// numbered through, list after list, so that a warp finds the list of a chunk by bisection, and all loads of a turn are
// issued together. A block
//   (1) adds up the chunks of the row's lists;
//   (2) counts the digits of all candidates' scores, and finds the k-th best. As every key at or above the lists' floor
//       is a candidate, none is missing if there are k. If there are fewer, all keys of the row are scored now;
//   (3) assigns the output slots in order: 24 chunks of each warp per turn. If one turn suffices, candidates are read
//       only once.
//
// HASHCORE_PAGES: keys are in pages that a table names (pages.cuh).
#include "lists.cuh"
#include "pages.cuh"

constexpr int CHUNKS = 24;  // of a warp per turn: its lanes hold one entry of each in registers
constexpr int TURN = CHUNKS * WARPS;
constexpr int MAX_LISTS = MAX_SPLITS * WARPS;

// The format of codes, needed only to score missing keys.
struct Codes {
  Weights weights;
  i32 planes;
  i32 words;
};

// The score of one key by one thread, with few registers.
// weights: in shared memory, because an indexed kernel argument would be copied to local memory.
__device__ __forceinline__ int score_alone(const u32* key, const u32* query, int planes, int words,
                                           const i32* weights) {
  int score = 0;
#pragma unroll 1
  for (int p = 0; p < planes; p++) {
    int same = 0;
#pragma unroll 1
    for (int w = 0; w < words; w++) same += __popc(~(__ldg(query + p * words + w) ^ __ldg(key + w)));
    score += weights[p] * same;
  }
  return score;
}

// ---- Candidates ----------------------------------------------------------------------------------------------------

// The candidates of a row: those listed, or all its keys.
struct Candidates {
  const u32* query;
  Keys keys;
  const u32* lists;   // of the row
  const u32* counts;  // [splits][WARPS]
  u32* begins;        // shared: chunks before each list, and in all
  int planes, words;
  const i32* weights;  // shared: [planes]
  Range range;
  Cut cut;
  int lists_count;
  bool all;
};

// A warp's candidates of one turn, a chunk to an entry: score << 16 | offset, or EMPTY.
struct Batch {
  u32 entry[CHUNKS];
  int base;  // in lane j: the position of offset 0 of chunk j

  __device__ __forceinline__ bool has(int j) const { return entry[j] != EMPTY; }
  __device__ __forceinline__ u32 score(int j) const { return entry[j] >> 16; }
};

// Writes the number of chunks before each list, and returns their total. Every thread must call it.
__device__ __forceinline__ int number(const Candidates& of) {
  u32 before = 0;
  __syncthreads();  // the numbers may still be read
#pragma unroll 1
  for (int first = 0; first < of.lists_count; first += SELECT_THREADS) {
    const int list = first + threadIdx.x;
    u32 length = 0, sum;
    if (list < of.lists_count && of.cut.keys(list).size())  // a block without keys has written nothing
      length = of.all ? u32(overlap(of.cut.keys(list), of.range).size()) : __ldcg(of.counts + list);
    const u32 mine = scan_block((length + 31) / 32, sum);
    if (list < of.lists_count) of.begins[list] = before + mine;
    before += sum;
  }
  if (threadIdx.x == 0) of.begins[of.lists_count] = before;
  __syncthreads();
  return int(before);
}

// Reads a warp's chunks first, ..., first + CHUNKS - 1. The whole warp must call it.
__device__ __forceinline__ void load_batch(const Candidates& of, int first, int chunks, Batch& batch) {
  const int lane = threadIdx.x & 31, mine = first + lane;
  int low = 0, from = 0, end = 0;  // the lane's chunk: positions [from, end), offsets of the list if keys are listed
  batch.base = 0;
  if (lane < CHUNKS && mine < chunks) {
    int high = of.lists_count;  // the last list that begins at or before the chunk: lists without chunks come before it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (int(of.begins[middle]) <= mine) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const Range keys = of.cut.keys(low), seen = overlap(keys, of.range);
    const int within = 32 * (mine - int(of.begins[low]));
    batch.base = keys.low;
    from = of.all ? seen.low + within : keys.low + within;
    end = of.all ? seen.high : from + 32;
  }
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int at = __shfl_sync(FULL_WARP, from, j) + lane;
    batch.entry[j] = EMPTY;
    if (at < __shfl_sync(FULL_WARP, end, j) && !of.all) batch.entry[j] = __ldcg(of.lists + at);
  }
  if (!of.all) return;
#pragma unroll 1
  for (int j = 0; j < CHUNKS; j++) {
    const int at = __shfl_sync(FULL_WARP, from, j) + lane, base = __shfl_sync(FULL_WARP, batch.base, j);
    if (at >= __shfl_sync(FULL_WARP, end, j)) continue;
    const int score = score_alone(of.keys.at(at), of.query, of.planes, of.words, of.weights);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)  // registers have no index
      if (i == j) batch.entry[i] = u32(score) << 16 | u32(at - base);
  }
}

// Iterates over all chunks of a row, in turns of the whole block; if one turn suffices, `batch` holds them already.
template <class Take>
__device__ __forceinline__ void each_batch(const Candidates& of, int chunks, Batch& batch, Take take) {
#pragma unroll 1
  for (int first = 0; first < chunks; first += TURN) {
    if (chunks > TURN) load_batch(of, first + CHUNKS * int(threadIdx.x / 32), chunks, batch);
    take();
  }
}

// ---- Selection -----------------------------------------------------------------------------------------------------

struct Threshold {
  u32 score;
  u32 quota;  // number of keys of that score to select
};

// Finds the score of the `wanted`-th best candidate; false if there are fewer. Every thread must call it.
__device__ __forceinline__ bool find_threshold(const Candidates& of, int chunks, Batch& batch, u32* counts,
                                               const Levels& levels, u32 wanted, Threshold& threshold) {
  u32 known = 0;  // the digits found so far
#pragma unroll 1
  for (int l = 0; l < levels.count; l++) {
    const int shift = l ? 0 : levels.shift[0], above = l ? levels.shift[0] : 16;  // no index into an argument: that
    const int bins = l ? levels.bins[1] : levels.bins[0];                         // would need a copy in local memory
    clear_counts(counts, bins);
    each_batch(of, chunks, batch, [&] {
#pragma unroll
      for (int j = 0; j < CHUNKS; j++)
        if (batch.has(j) && (l == 0 || batch.score(j) >> above == known))
          atomicAdd(&counts[(batch.score(j) & ((1u << above) - 1)) >> shift], 1u);
    });
    __syncthreads();
    const int four = bins / 4 - 1 - int(threadIdx.x);
    uint4 totals = {0, 0, 0, 0};
    if (four >= 0) totals = reinterpret_cast<const uint4*>(counts)[four];
    u32 all;
    const Digit digit = find_digit(totals, bins, wanted, all);
    if (all < wanted) return false;
    known = l ? known << (above - shift) | digit.value : digit.value;
    wanted -= digit.above;
  }
  threshold = {known, wanted};
  return true;
}

// Two counts of at most TURN * 32 in one word: above the threshold, and equal to it.
__device__ __forceinline__ u32 pair_of(u32 above, u32 equal) { return above << 16 | equal; }
static_assert(TURN * 32 < 1 << 16);

// Writes the selected among a turn's candidates, in order, and advances `place`. Every thread must call it.
template <class Index>
__device__ __forceinline__ void emit(const Batch& batch, const Threshold& threshold, Place& place, i32* values,
                                     Index* indices) {
  __shared__ u32 of_warps[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 below = (1u << lane) - 1;
  u32 own = 0;
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const u32 above = __ballot_sync(FULL_WARP, batch.has(j) && batch.score(j) > threshold.score);
    const u32 equal = __ballot_sync(FULL_WARP, batch.has(j) && batch.score(j) == threshold.score);
    own += pair_of(__popc(above), __popc(equal));
  }
  __syncthreads();  // the pairs of the previous turn were read
  if (lane == 0) of_warps[warp] = own;
  __syncthreads();
  u32 before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const u32 pair = of_warps[w];
    if (w < warp) before += pair;
    all += pair;
  }
  u32 above = place.above + (before >> 16), equal = place.equal + (before & 0xffffu);
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const bool better = batch.has(j) && batch.score(j) > threshold.score;
    const bool same = batch.has(j) && batch.score(j) == threshold.score;
    const u32 first = __ballot_sync(FULL_WARP, better), second = __ballot_sync(FULL_WARP, same);
    const int base = __shfl_sync(FULL_WARP, batch.base, j);
    const u32 earlier = equal + __popc(second & below);
    if (better || (same && earlier < threshold.quota)) {
      const u32 slot = above + __popc(first & below) + (earlier < threshold.quota ? earlier : threshold.quota);
      values[slot] = i32(batch.score(j));
      indices[slot] = base + int(batch.entry[j] & 0xffffu);
    }
    above += __popc(first), equal += __popc(second);
  }
  place.above += all >> 16, place.equal += all & 0xffffu;
}

template <class Index>
__device__ __forceinline__ void select_row(const u32* query, const u32* keys, const RowMap& map, const Window& window,
                                           const Selection& selection, const Codes& codes, const Levels& levels,
                                           const Space& space, const Groups& groups, i32 splits, const Pages& pages,
                                           i32* values, Index* indices) {
  __shared__ u32 begins[MAX_LISTS + 1];
  __shared__ __align__(16) u32 counts[MAX_BINS];
  __shared__ i32 weights[8];  // read after the barriers of `number`
  if (threadIdx.x == 0) {
#pragma unroll
    for (int p = 0; p < 8; p++) weights[p] = codes.weights.of[p];
  }
  const Group group = group_of(groups, blockIdx.x / groups.size);
  const int slot = blockIdx.x, row = group.row + slot % groups.size;
  if (slot % groups.size >= group.count) return;
  const Range range = eligible(window, row);
  const int wanted = selected(selection, range, row);
  values += i64(row) * selection.width;
  indices += i64(row) * selection.width;
  if (wanted > 0) {
    const Operands at = operands(query, keys, map, row);
    Candidates of = {at.query, Keys(at.keys, map.key, pages, row), space.lists + slot * space.stride,
                     space.counts + i64(slot) * splits * WARPS, begins, codes.planes, codes.words, weights, range,
                     Cut(reach(window, group), splits), splits * WARPS, false};
    Batch batch;
    Threshold threshold;
    int chunks;
#pragma unroll 1
    for (;; of.all = true) {
      chunks = number(of);
      if (chunks <= TURN) load_batch(of, CHUNKS * int(threadIdx.x / 32), chunks, batch);
      if (find_threshold(of, chunks, batch, counts, levels, u32(wanted), threshold)) break;
    }
    Place place = {0, 0};
    each_batch(of, chunks, batch, [&] { emit(batch, threshold, place, values, indices); });
  }
  fill(values, indices, wanted, selection.width);
}

#define SELECT_KERNEL(name, Index)                                                                                  \
  extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)                                                    \
      name(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ values,                   \
           Index* __restrict__ indices, RowMap map, Window window, Selection selection, Codes codes,                \
           Levels levels, Space space, Groups groups, i32 splits PAGES_PARAMETER) {                                 \
    wait_for_predecessor();                                                                                         \
    select_row(query, keys, map, window, selection, codes, levels, space, groups, splits, PAGES, values, indices);  \
    let_dependents_start();                                                                                         \
  }

SELECT_KERNEL(select_32, i32)
SELECT_KERNEL(select_64, i64)
