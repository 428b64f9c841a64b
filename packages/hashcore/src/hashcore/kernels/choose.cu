// Selects the k best keys of each row of a search among the candidates listed by score.cu (algorithm.md, eq. 6): ties
// to the lowest index, indices ascending. One source for all codes: only missing keys are scored here.
//
// select, grid rows x parts, blocks of 512. A block
//   (1) adds up the lengths of the row's lists, so that candidate i of the row can be found by bisection;
//   (2) counts the digits of all candidates' scores, and finds the k-th best. This is at most the true threshold, as
//       some keys may be missing. Lists whose floor is above it are replaced by all their keys, which are scored now,
//       and the threshold is found again; now no key at or above it is missing;
//   (3) counts the candidates before its part that are above the threshold, or equal to it;
//   (4) assigns the output slots of its part: 4096 candidates per turn, 8 per thread.
// Part 0 clears the row's sample for the next search, which saves a launch.
//
// HASHCORE_PAGES: keys are in pages that a table names (pages.cuh).
//
// HASHCORE_SHORTLIST: the lists are those of shortlist.cu. Only keys on the shortlist are scored again; all keys, if
// fewer than k are on it.
#include "lists.cuh"
#include "pages.cuh"

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

#ifdef HASHCORE_SHORTLIST
constexpr bool SHORT = true;
#else
constexpr bool SHORT = false;
#endif

// Tests which keys of a row are on its shortlist.
struct OnList {
  const u32* first;  // first words of the row's keys
  i64 step;
  u32 floor;

  // weights: shared, as above.
  __device__ __forceinline__ bool has(int position, const u32* query, int planes, int words, const i32* weights) const {
    if (floor == 0) return true;
    const u32 word = __ldg(first + position * step);
    u32 score = 0;
#pragma unroll 1
    for (int p = planes < EARLY_PLANES ? 0 : planes - EARLY_PLANES; p < planes; p++)
      score += weights[p] * __popc(~(__ldg(query + p * words) ^ word));
    return score >= floor;
  }
};

// ---- Selection -----------------------------------------------------------------------------------------------------

// The candidates of a row, numbered through: list after list.
struct Candidates {
  const u32* query;
  Keys keys;
  const u32* lists;    // of the row
  const u32* counts;   // [splits][WARPS]
  const u32* floors;   // shared: [splits]
  const u32* offsets;  // shared: candidates before each list, and in all
  int planes, words;
  const i32* weights;  // shared: [planes]
  Range range;
  Cut cut;
  int lists_count;
  u32 trusted;  // a list whose floor is above it is not used: all its keys are candidates
  OnList on_list;

  __device__ __forceinline__ bool is_left(int list) const { return floors[list / WARPS] > trusted; }

  __device__ __forceinline__ u32 length(int list) const {
    const Range keys = cut.keys(list);
    if (keys.size() == 0) return 0;
    return is_left(list) ? u32(overlap(keys, range).size()) : __ldcg(counts + list);
  }

  // Score and position of candidate `offset` of a list.
  __device__ __forceinline__ void get(int list, u32 offset, u32& score, int& position) const {
    const Range all = cut.keys(list);
    if (is_left(list)) {
      position = overlap(all, range).low + int(offset);
      if (SHORT && !on_list.has(position, query, planes, words, weights)) {
        position = -1;
        return;
      }
      score = u32(score_alone(keys.at(position), query, planes, words, weights));
    } else {
      const u32 entry = __ldcg(lists + all.low + offset);
      score = entry >> 16;
      position = all.low + int(entry & 0xffffu);
    }
  }
};

constexpr int MAX_LISTS = MAX_SPLITS * WARPS;
static_assert(MAX_SPLITS <= SELECT_THREADS);

// Copies the floors of a row's blocks, and returns the highest. Every thread must call it.
// useless: whether all lists are to be ignored.
__device__ __forceinline__ u32 load_floors(const u32* from, const Cut& cut, int splits, u32* floors,
                                           bool useless = false) {
  __shared__ u32 highest;
  const int split = threadIdx.x;
  const bool written = split < splits && cut.keys(split * WARPS).size();
  const u32 mine = SHORT && useless ? 1 : written ? __ldcg(from + split) : 0;
  if (split < splits) floors[split] = mine;
  if (threadIdx.x == 0) highest = 0;
  __syncthreads();
  if (mine) atomicMax(&highest, mine);
  __syncthreads();
  return highest;
}

// Writes the number of candidates before each list, and returns their total. Every thread must call it.
__device__ __forceinline__ u32 number(const Candidates& of, u32* offsets) {
  u32 before = 0;
  __syncthreads();  // the offsets may still be read
#pragma unroll 1
  for (int first = 0; first < of.lists_count; first += SELECT_THREADS) {
    const int list = first + threadIdx.x;
    u32 sum;
    const u32 mine = scan_block(list < of.lists_count ? of.length(list) : 0, sum);
    if (list < of.lists_count) offsets[list] = before + mine;
    before += sum;
  }
  if (threadIdx.x == 0) offsets[of.lists_count] = before;
  __syncthreads();
  return before;
}

struct Batch {
  u32 score[VECTOR];
  int position[VECTOR];  // -1 after the last candidate, and for keys not on the shortlist
};

// A thread's candidates first, ..., first + VECTOR - 1.
__device__ __forceinline__ Batch load_batch(const Candidates& of, u32 first, u32 total) {
  Batch batch;
  int low = 0, high = of.lists_count;  // the last list that begins at or before `first`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (of.offsets[middle] <= first) {
      low = middle;
    } else {
      high = middle;
    }
  }
#pragma unroll
  for (int j = 0; j < VECTOR; j++) {
    const u32 i = first + j;
    u32 score = 0;
    int position = -1;
    if (i < total) {
#pragma unroll 1
      while (of.offsets[low + 1] <= i) low++;
      of.get(low, i - of.offsets[low], score, position);
    }
    batch.score[j] = score, batch.position[j] = position;
  }
  return batch;
}

// Iterates over candidates [from, to) of a row, in turns of the whole block; if one turn suffices, candidates are
// loaded only once. `from` is a multiple of TURN. Every thread makes the same number of turns.
constexpr u32 TURN = VECTOR * SELECT_THREADS;
template <class Take>
__device__ __forceinline__ void each_batch(const Candidates& of, u32 from, u32 to, u32 total, Batch& batch, Take take) {
#pragma unroll 1
  for (u32 first = from; first < to; first += TURN) {
    if (total > TURN) batch = load_batch(of, first + VECTOR * threadIdx.x, total);
    take(batch);
  }
}

struct Threshold {
  u32 score;
  u32 quota;  // number of keys of that score to select
};

// The score of the `wanted`-th best candidate. Every thread must call it.
__device__ __forceinline__ Threshold find_threshold(const Candidates& of, u32 total, Batch& batch, u32* counts,
                                                    const Levels& levels, u32 wanted) {
  u32 known = 0;  // the digits found so far
#pragma unroll 1
  for (int l = 0; l < levels.count; l++) {
    const int shift = l ? 0 : levels.shift[0], above = l ? levels.shift[0] : 16;  // no index into an argument: that
    const int bins = l ? levels.bins[1] : levels.bins[0];                         // would need a copy in local memory
    clear_counts(counts, bins);
    each_batch(of, 0, total, total, batch, [&](const Batch& held) {
#pragma unroll
      for (int j = 0; j < VECTOR; j++)
        if (held.position[j] >= 0 && (l == 0 || held.score[j] >> above == known))
          atomicAdd(&counts[(held.score[j] & ((1u << above) - 1)) >> shift], 1u);
    });
    __syncthreads();
    const int four = bins / 4 - 1 - int(threadIdx.x);
    uint4 totals = {0, 0, 0, 0};
    if (four >= 0) totals = reinterpret_cast<const uint4*>(counts)[four];
    const Digit digit = find_digit(totals, bins, wanted);
    known = l ? known << (above - shift) | digit.value : digit.value;
    wanted -= digit.above;
  }
  return {known, wanted};
}

__device__ __forceinline__ Marks mark(const Batch& batch, u32 threshold) {
  Marks marks = {0, 0};
#pragma unroll
  for (int j = 0; j < VECTOR; j++) {
    marks.above |= u32(batch.position[j] >= 0 && batch.score[j] > threshold) << j;
    marks.equal |= u32(batch.position[j] >= 0 && batch.score[j] == threshold) << j;
  }
  return marks;
}

// The numbers of candidates before index `end` that are above the threshold, and equal to it.
__device__ __forceinline__ Place count_before(const Candidates& of, u32 end, u32 total, Batch& batch, u32 threshold) {
  Place mine = {0, 0}, all;
  each_batch(of, 0, end, total, batch, [&](const Batch& held) {
    const Marks marks = mark(held, threshold);
    mine.above += __popc(marks.above);
    mine.equal += __popc(marks.equal);
  });
  scan_block(mine.above, all.above);
  scan_block(mine.equal, all.equal);
  return all;
}

template <class Index>
__device__ __forceinline__ void select_candidates(Candidates of, u32 highest, u32* offsets, u32* counts,
                                                  const Levels& levels, u32 wanted, i32* values, Index* indices) {
  Batch batch = {};
  Threshold threshold;
  u32 total;
#pragma unroll 1
  for (;; of.trusted = threshold.score) {
    total = number(of, offsets);
    if (total <= TURN) batch = load_batch(of, VECTOR * threadIdx.x, total);
    threshold = {0, 0};
    if (total >= wanted) threshold = find_threshold(of, total, batch, counts, levels, wanted);
    if (of.trusted <= threshold.score || of.trusted < highest) break;  // the second time, no key is missing
  }
  const u32 turns = (total + TURN - 1) / TURN;
  const u32 from = turns * blockIdx.y / gridDim.y * TURN, to = turns * (blockIdx.y + 1) / gridDim.y * TURN;
  Place place = count_before(of, from, total, batch, threshold.score);
  each_batch(of, from, to < total ? to : total, total, batch, [&](const Batch& held) {
    emit(mark(held, threshold.score), threshold.quota, place, [&](int j, u32 slot) {
      values[slot] = i32(held.score[j]);
      indices[slot] = held.position[j];
    });
  });
}

template <class Index>
__device__ __forceinline__ void select_row(const u32* query, const u32* keys, const RowMap& map, const Window& window,
                                           const Selection& selection, const Codes& codes, const Levels& levels,
                                           const Space& space, const Groups& groups, i32 splits,
                                           const Shortlist* shortlist, const Pages& pages, i32* values,
                                           Index* indices) {
  __shared__ u32 offsets[MAX_LISTS + 1], floors[MAX_SPLITS];
  __shared__ i32 weights[8];  // read after the barriers of load_floors
  if (threadIdx.x == 0) {
#pragma unroll
    for (int p = 0; p < 8; p++) weights[p] = codes.weights.of[p];
  }
  __shared__ __align__(16) u32 counts[MAX_BINS];
  const Group group = group_of(groups, blockIdx.x / groups.size);
  const int slot = blockIdx.x, row = group.row + slot % groups.size;
  if (slot % groups.size >= group.count) return;
  if (blockIdx.y == 0 && threadIdx.x < SAMPLE_BINS) space.sample[i64(slot) * SAMPLE_BINS + threadIdx.x] = 0;
  const Range range = eligible(window, row);
  const int wanted = selected(selection, range, row);
  values += i64(row) * selection.width;
  indices += i64(row) * selection.width;
  if (wanted > 0) {
    const Operands at = operands(query, keys, map, row);
    const Cut cut(reach(window, group), splits);
    OnList on_list = {};
    bool useless = false;
    if constexpr (SHORT) {
      on_list = {operands(at.query, shortlist->first, shortlist->map, row).keys, shortlist->map.key,
                 __ldcg(&shortlist->rows[slot].first)};
      useless = __ldcg(&shortlist->rows[slot].listed) < u32(wanted);
      if (useless) on_list.floor = 0;
    }
    const u32 highest = load_floors(space.floors + i64(slot) * splits, cut, splits, floors, useless);
    const Keys all(at.keys, map.key, pages, row);
    const Candidates of = {at.query, all, space.lists + slot * space.stride,
                           space.counts + i64(slot) * splits * WARPS, floors, offsets, codes.planes, codes.words,
                           weights, range, cut,
                           splits * WARPS, useless ? 0 : highest, on_list};
    select_candidates(of, highest, offsets, counts, levels, u32(wanted), values, indices);
  }
  fill(values, indices, wanted, selection.width);
}

#ifdef HASHCORE_SHORTLIST
#define SHORTLIST_ARGUMENT , Shortlist shortlist
#define SHORTLIST_ADDRESS &shortlist
#else
#define SHORTLIST_ARGUMENT
#define SHORTLIST_ADDRESS nullptr
#endif

#define SELECT_KERNEL(name, Index)                                                                                \
  extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)                                                  \
      name(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ values,                 \
           Index* __restrict__ indices, RowMap map, Window window, Selection selection, Codes codes,              \
           Levels levels, Space space, Groups groups, i32 splits SHORTLIST_ARGUMENT PAGES_PARAMETER) {            \
    wait_for_predecessor();                                                                                       \
    select_row(query, keys, map, window, selection, codes, levels, space, groups, splits, SHORTLIST_ADDRESS, PAGES, \
               values, indices);                                                                                  \
  }

SELECT_KERNEL(select_32, i32)
SELECT_KERNEL(select_64, i64)
