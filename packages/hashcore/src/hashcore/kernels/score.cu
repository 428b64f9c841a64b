// Weighted scores of every key against the planes of queries (docs/algorithm.md, eq. 4), and the k best of each row:
//
//     s_k = sum_p weight_p popcount(~(B_p xor c_k))
//
// query u32 [rows][P][W], keys u32 [..][N][W] in rows that may repeat, with gaps or without (RowMap).
//
// A search is two launches, at any number of planes. Scores are not written: at 2 bytes a key they would be an eighth of
// what is read. A row's keys are cut into lists, one a warp.
//
// list_candidates, grid groups x splits, blocks of 512. A warp goes through its keys, KEYS * SLICE at a time.
//   (1) The first of them are a sample: the block counts their scores in SAMPLE_BINS bins, adds them to the row's, and
//       reads there what the row's other blocks have added so far. Where enough of the sample lies above, a quarter more
//       than the row wants, is the block's floor.
//   (2) Each key whose score is at least the floor is a candidate: score and offset in one word of the warp's list,
//       which begins where the warp's keys do: a list of every key would fit. Ballots give the slots, in order.
// A floor only saves bytes. If one turns out too high, the next launch scores again what it left out; so blocks need not
// wait for each other, and a sample of old numbers does no harm.
//
// select, grid rows x parts, blocks of 512. A block
//   (1) adds up the lengths of the row's lists: candidate i of the row is then found by bisection;
//   (2) counts the digits of all candidates' scores, and finds the k-th best. That is at most the true threshold, as
//       some keys may be missing; lists whose floor lies above it are replaced by all their keys, scored now, and the
//       threshold is found again: now nothing at or above it is missing;
//   (3) counts the candidates before its part that are above the threshold, or equal to it;
//   (4) hands out the slots of its part: 4096 candidates at a time, 8 to a thread.
// Part 0 clears the row's sample for the next search: no third launch.
//
// GROUP > 1: the rows of a group are queries over the same keys. A block loads a key once for all of them.
//
// Bytes and times: hashcore.cuda.traffic. 128K keys x 8 rows of 128 bits, 2 %: 16.8 MB of codes and .8 MB beside them.
// Integer work a key of 128 bits in 6 planes: 13 POPC, which run at 16 lanes a clock and multiprocessor.
//
// score_all writes int32 scores of all N keys and selects nothing: the function `score`.
//
// HASHCORE_WORDS: W. HASHCORE_PLANES: P. HASHCORE_WEIGHTS: the weights, if they are known when this is compiled; the
// carry-save counter then runs over all planes at once. Without it the weights are an argument, and it runs per plane.
#include "common.cuh"

constexpr int WORDS = HASHCORE_WORDS;
constexpr int PLANES = HASHCORE_PLANES;
static_assert(WORDS >= 1 && PLANES >= 1 && PLANES <= 8);

struct Weights {
  i32 of[8];
};

#ifdef HASHCORE_WEIGHTS
using Fixed = FixedWeights<HASHCORE_WEIGHTS>;
static_assert(Fixed::PLANES == PLANES);
#endif

// ---- A lane's share of a key ---------------------------------------------------------------------------------------

// Long keys are shared by 2 or 4 lanes, so that the lanes of a warp read 16 bytes each, side by side: unit u of 4 words
// belongs to lane u % LANES of the key.
constexpr int LANES = WORDS % 16 == 0 ? 4 : WORDS % 8 == 0 ? 2 : 1;
constexpr int SLICE = 32 / LANES;                // keys that a warp reads side by side
constexpr int MINE = WORDS / LANES;              // words of a key that are a lane's
constexpr int BLOCK_WORDS = MINE <= 8 ? MINE : 4;  // of them held at once
constexpr int REST = MINE % BLOCK_WORDS;
constexpr bool IN_REGISTERS = MINE <= 8 && PLANES * MINE <= 32;
// Keys that a thread holds, and as many that are on their way to it: what its 128 registers take beside the planes.
// 4 keys of 16 bytes x 512 threads are 32 KB in flight a multiprocessor; an H200 needs 23 to deliver 4.3 TB/s.
constexpr int FITTING = (52 - (IN_REGISTERS ? PLANES * MINE : 0)) / (2 * BLOCK_WORDS);
constexpr int KEYS = FITTING < 1 ? 1 : FITTING > 4 ? 4 : FITTING;
static_assert(LANES == 1 || MINE % 4 == 0);

// The place in a code of a lane's i-th word.
__device__ __forceinline__ int word_of(int i, int part) {
  if constexpr (LANES == 1) return i;
  return (i / 4 * LANES + part) * 4 + i % 4;
}

// A lane's words of a row's planes, inverted, so that xor gives the matches: in registers if they are few, else read
// through L1, where all lanes of a part want the same word.
struct Query {
  u32 word[IN_REGISTERS ? PLANES * MINE : 1];
  const u32* memory;
  int part;

  __device__ __forceinline__ explicit Query(const u32* from, int lane) : memory(from), part(lane % LANES) {
    if constexpr (IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < PLANES * MINE; i++) word[i] = ~__ldg(from + i / MINE * WORDS + word_of(i % MINE, part));
    }
  }

  __device__ __forceinline__ u32 inverted(int plane, int i) const {
    if constexpr (IN_REGISTERS) {
      return word[plane * MINE + i];
    } else {
      return ~__ldg(memory + plane * WORDS + word_of(i, part));
    }
  }
};

// Reads COUNT of a lane's words of the key at `from`, from its i-th on.
template <int COUNT>
__device__ __forceinline__ void load_share(const u32* from, int i, int part, u32 (&to)[COUNT]) {
  if constexpr (LANES == 1) {
    load_words<WORDS>(from + i, to);
  } else {
#pragma unroll
    for (int w = 0; w < COUNT; w += 4) {
      const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from + word_of(i + w, part)));
      to[w] = x.x, to[w + 1] = x.y, to[w + 2] = x.z, to[w + 3] = x.w;
    }
  }
}

// The weighted matches of COUNT of a lane's words of a key, from its word `first` on.
template <int COUNT>
__device__ __forceinline__ int matches(const u32 (&key)[COUNT], const Query& query, int first, const Weights& weights) {
#ifdef HASHCORE_WEIGHTS
  return weighted_popcount<Fixed, COUNT>([&](int p, int w) { return key[w] ^ query.inverted(p, first + w); });
#else
  int sum = 0;
#pragma unroll
  for (int p = 0; p < PLANES; p++)
    sum += weights.of[p] *
           weighted_popcount<FixedWeights<1>, COUNT>([&](int, int w) { return key[w] ^ query.inverted(p, first + w); });
  return sum;
#endif
}

// Sums the matches of the lane's words [first, first + COUNT) of the key at `from`, and of every COUNT after them.
template <int COUNT>
__device__ __forceinline__ int matches_from(const u32* from, const Query& query, int first, const Weights& weights) {
  int sum = 0;
  if constexpr (COUNT > 0) {
#pragma unroll 1
    for (int w = first; w + COUNT <= MINE; w += COUNT) {
      u32 words[COUNT];
      load_share(from, w, query.part, words);
      sum += matches(words, query, w, weights);
    }
  }
  return sum;
}

// The words of a lane of the keys first + u * SLICE, u < KEYS, as far as they are held at once.
struct Held {
  const u32* from;  // the row's keys
  i64 step;         // words from one to the next
  int first;        // this lane's first key
  int end;          // no key from here on is read
  u32 word[KEYS][BLOCK_WORDS];

  __device__ __forceinline__ Held(const u32* keys, i64 step, int first, int end, int part)
      : from(keys), step(step), first(first), end(end) {
#pragma unroll
    for (int u = 0; u < KEYS; u++) {
#pragma unroll
      for (int w = 0; w < BLOCK_WORDS; w++) word[u][w] = 0;
      if (first + u * SLICE < end) load_share(from + (first + u * SLICE) * step, 0, part, word[u]);
    }
  }

  // The score of key u, in all lanes that share it; some number if it is not before the end. The whole warp must call it.
  __device__ __forceinline__ int score(int u, const Query& query, const Weights& weights) const {
    int score = matches(word[u], query, 0, weights);
    if constexpr (MINE > BLOCK_WORDS) {
      if (first + u * SLICE < end) {
        const u32* key = from + (first + u * SLICE) * step;
        score += matches_from<BLOCK_WORDS>(key, query, BLOCK_WORDS, weights);
        score += matches_from<REST>(key, query, MINE - REST, weights);
      }
    }
#pragma unroll
    for (int step = 1; step < LANES; step <<= 1) score += __shfl_xor_sync(FULL_WARP, score, step);
    return score;
  }
};

// The score of one key by one thread, with few registers: for keys that were left out.
__device__ __forceinline__ int score_alone(const u32* key, const u32* query, const Weights& weights) {
  int score = 0;
#pragma unroll 1
  for (int p = 0; p < PLANES; p++) {
    int same = 0;
#pragma unroll 1
    for (int w = 0; w < WORDS; w++) same += __popc(~(__ldg(query + p * WORDS + w) ^ __ldg(key + w)));
    score += weights.of[p] * same;
  }
  return score;
}

// ---- Groups of rows, and their lists -------------------------------------------------------------------------------

constexpr int WARPS = SELECT_THREADS / 32;
constexpr int MAX_GROUP = 8;       // queries that share the keys a block loads
constexpr int MAX_SPLITS = 512;    // blocks of a row
constexpr int SAMPLE_BINS = 256;   // two bins of a histogram of the last digits would cost more than they save
constexpr u32 SPARE = 32;          // candidates of the sample beyond a quarter: small samples err
static_assert(SAMPLE_BINS <= SELECT_THREADS);

// Rows that lie side by side, `line` of them over the same keys, in groups of at most `size`; size 1: each row alone.
struct Groups {
  i32 first;  // group of the launch's first slot; a slot is a row's place in the workspace, `size` of them a group
  i32 line;
  i32 size;
};

struct Group {
  int row;    // its first
  int count;  // of rows
};

__device__ __forceinline__ Group group_of(const Groups& groups, int index) {
  const int in_line = (groups.line + groups.size - 1) / groups.size;
  const int line = (groups.first + index) / in_line, begin = (groups.first + index) % in_line * groups.size;
  const int left = groups.line - begin;
  return {line * groups.line + begin, left < groups.size ? left : groups.size};
}

// All positions that compete in any row of a group.
__device__ __forceinline__ Range reach(const Window& window, const Group& group) {
  Range all = eligible(window, group.row);
  for (int i = 1; i < group.count; i++) {
    const Range next = eligible(window, group.row + i);
    if (next.size() == 0) continue;
    if (all.size() == 0) all = next;
    all.low = next.low < all.low ? next.low : all.low;
    all.high = next.high > all.high ? next.high : all.high;
  }
  return all;
}

// How the positions of a group are cut into lists, as equal as whole slices allow. The cut follows the range and not the
// capacity: a long cache that is hardly filled still occupies every warp.
struct Cut {
  int base;
  int step;  // keys of a list, at most 2^16
  int high;

  __device__ __forceinline__ Cut(const Range& range, int splits) : base(range.low & ~(VECTOR - 1)), high(range.high) {
    const int length = range.size() ? high - base : 0, lists = splits * WARPS;
    step = ((length + lists - 1) / lists + 31) & ~31;
    if (length == 0) high = base;
  }
  __device__ __forceinline__ Range keys(int list) const {
    const i64 begin = base + i64(step) * list, end = begin + step;
    return {int(begin < high ? begin : high), int(end < high ? end : high)};
  }
};

__device__ __forceinline__ Range overlap(const Range& a, const Range& b) {
  const int low = a.low > b.low ? a.low : b.low, high = a.high < b.high ? a.high : b.high;
  return {low, high > low ? high : low};
}

// Addresses of a turn's workspace.
struct Space {
  u32* sample;  // [slots][SAMPLE_BINS]
  u32* floors;  // [slots][splits]
  u32* counts;  // [slots][splits][WARPS]
  u32* lists;   // [slots][stride]
  i64 stride;
  i32 shift;    // a score's bin of the sample is score >> shift
};

// ---- Candidates ----------------------------------------------------------------------------------------------------

// Counts the scores of a block's first keys, adds them to the row's sample, and says above which score enough of the
// sample lies. Every thread must call it.
__device__ __forceinline__ u32 find_floor(const int (&score)[KEYS], u32 valid, u32* sample, int shift, int wanted,
                                          int size) {
  __shared__ u32 bins[SAMPLE_BINS];
  __shared__ u32 found;
  if (threadIdx.x < SAMPLE_BINS) bins[threadIdx.x] = 0;
  __syncthreads();  // and the floor of the call before was read
  if (threadIdx.x == 0) found = 0;
#pragma unroll
  for (int u = 0; u < KEYS; u++)
    if (valid >> u & 1) atomicAdd(&bins[score[u] >> shift], 1u);
  __syncthreads();
  const int bin = SAMPLE_BINS - 1 - int(threadIdx.x);  // the highest first
  u32 count = 0, all;
  if (bin >= 0) {
    const u32 mine = bins[bin];
    count = mine ? mine + atomicAdd(sample + bin, mine) : __ldcg(sample + bin);
  }
  const u32 above = scan_block(count, all);
  const i64 share = i64(wanted) * all / size, enough = share + share / 4 + SPARE;
  if (above < enough && i64(above) + count >= enough) found = u32(bin) << shift;
  __syncthreads();
  return found;
}

// What a block knows of its rows: lane q holds that of row q, or every lane that of the only one.
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
__device__ __forceinline__ u32 append(const int (&score)[KEYS], u32 valid, u32 floor, u32 found, u32* list,
                                      int offset) {
  const u32 below = (1u << (threadIdx.x & 31)) - 1;
#pragma unroll
  for (int u = 0; u < KEYS; u++) {
    const bool chosen = valid >> u & 1 && u32(score[u]) >= floor;
    const u32 lanes = __ballot_sync(FULL_WARP, chosen);
    if (chosen) list[found + __popc(lanes & below)] = u32(score[u]) << 16 | u32(offset + u * SLICE);
    found += __popc(lanes);
  }
  return found;
}

// One row of a group over the keys that are held.
template <int GROUP>
__device__ __forceinline__ void take_row(const Held& held, const Query& query, const Weights& weights, Rows& rows,
                                         int q, bool first_turn, i64 slot, const Range& mine, const Space& space) {
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
  const bool own = GROUP == 1 || lane == q;
  if (first_turn) {
    const int wanted = of_row<GROUP>(rows.wanted, q);
    const u32 floor = find_floor(score, valid, space.sample + slot * SAMPLE_BINS, space.shift, wanted, high - low);
    if (own) rows.floor = floor;
  }
  const u32 floor = of_row<GROUP>(rows.floor, q), found = of_row<GROUP>(rows.found, q);
  const u32 length = append(score, valid, floor, found, space.lists + slot * space.stride + mine.low,
                            held.first - mine.low);
  if (own) rows.found = length;
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
                                           const Weights& weights, const Space& space, const Groups& groups) {
  const Group group = group_of(groups, blockIdx.x);
  const Range whole = reach(window, group);
  const Cut cut(whole, gridDim.y);
  if (cut.keys(blockIdx.y * WARPS).size() == 0) return;  // nobody looks for this block's lists
  const int lane = threadIdx.x & 31, list = blockIdx.y * WARPS + int(threadIdx.x >> 5);
  const Range mine = cut.keys(list);
  const Operands at = operands(query, keys, map, group.row);
  const i64 slot = i64(blockIdx.x) * groups.size, step = GROUP == 1 ? 0 : map.query[3];
  Rows rows = rows_of<GROUP>(group, window, selection);
  const Query only(at.query, lane);
  bool first_turn = true;  // in which the whole block takes part, with keys or without
  Held held(at.keys, map.key, mine.low + lane / LANES, mine.high, lane % LANES);
#pragma unroll 1
  for (int first = mine.low; first_turn || first < mine.high; first += KEYS * SLICE) {
    const Held next(at.keys, map.key, held.first + KEYS * SLICE, mine.high, lane % LANES);
    if constexpr (GROUP == 1) {
      if (rows.wanted) take_row<1>(held, only, weights, rows, 0, first_turn, slot, mine, space);
    } else {
#pragma unroll 1
      for (int q = 0; q < group.count; q++)
        if (of_row<GROUP>(rows.wanted, q))
          take_row<GROUP>(held, Query(at.query + q * step, lane), weights, rows, q, first_turn, slot + q, mine, space);
    }
    held = next;
    first_turn = false;
  }
  let_dependents_start();
  const i64 row = (slot + (GROUP == 1 ? 0 : lane)) * gridDim.y + blockIdx.y;
  if (lane >= group.count) return;
  space.counts[row * WARPS + (threadIdx.x >> 5)] = rows.found;
  if (threadIdx.x < 32) space.floors[row] = rows.floor;
}

#define LIST_KERNEL(name, GROUP)                                                                                     \
  extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)                                                    \
      name(const u32* __restrict__ query, const u32* __restrict__ keys, RowMap map, Window window,                   \
           Selection selection, Weights weights, Space space, Groups groups) {                                       \
    list_group<GROUP>(query, keys, map, window, selection, weights, space, groups);                                  \
  }

LIST_KERNEL(list_candidates, 1)
LIST_KERNEL(list_candidates_shared, MAX_GROUP)

// ---- Selection -----------------------------------------------------------------------------------------------------

// The candidates of a row, numbered through: list after list.
struct Candidates {
  const u32* query;
  const u32* keys;
  i64 step;            // words from one key to the next
  const u32* lists;    // of the row
  const u32* counts;   // [splits][WARPS]
  const u32* floors;   // shared: [splits]
  const u32* offsets;  // shared: candidates before each list, and in all
  const Weights& weights;
  Range range;
  Cut cut;
  int lists_count;
  u32 trusted;  // a list whose floor is above it is not used: all its keys are candidates

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
      score = u32(score_alone(keys + position * step, query, weights));
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
__device__ __forceinline__ u32 load_floors(const u32* from, const Cut& cut, int splits, u32* floors) {
  __shared__ u32 highest;
  const int split = threadIdx.x;
  const bool written = split < splits && cut.keys(split * WARPS).size();
  const u32 mine = written ? __ldcg(from + split) : 0;
  if (split < splits) floors[split] = mine;
  if (threadIdx.x == 0) highest = 0;
  __syncthreads();
  if (mine) atomicMax(&highest, mine);
  __syncthreads();
  return highest;
}

// Writes how many candidates lie before each list, and returns how many there are. Every thread must call it.
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
  int position[VECTOR];  // -1 behind the last
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

// Goes through candidates [from, to) of a row, the block's threads side by side; what one turn holds is loaded once.
// `from` is a multiple of TURN. Every thread makes as many turns.
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
  u32 quota;  // how many keys of that score are wanted
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

// How many candidates before number `end` are above the threshold, and how many equal to it.
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
  for (of.trusted = highest;; of.trusted = threshold.score) {
    total = number(of, offsets);
    if (total <= TURN) batch = load_batch(of, VECTOR * threadIdx.x, total);
    threshold = {0, 0};
    if (total >= wanted) threshold = find_threshold(of, total, batch, counts, levels, wanted);
    if (of.trusted <= threshold.score || of.trusted < highest) break;  // the second time nothing is missing
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
                                           const Selection& selection, const Weights& weights, const Levels& levels,
                                           const Space& space, const Groups& groups, i32 splits, i32* values,
                                           Index* indices) {
  __shared__ u32 offsets[MAX_LISTS + 1], floors[MAX_SPLITS];
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
    const u32 highest = load_floors(space.floors + i64(slot) * splits, cut, splits, floors);
    const Candidates of = {at.query, at.keys, map.key, space.lists + slot * space.stride,
                           space.counts + i64(slot) * splits * WARPS, floors, offsets, weights, range, cut,
                           splits * WARPS, highest};
    select_candidates(of, highest, offsets, counts, levels, u32(wanted), values, indices);
  }
  fill(values, indices, wanted, selection.width);
}

#define SELECT_KERNEL(name, Index)                                                                                \
  extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)                                                  \
      name(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ values,                 \
           Index* __restrict__ indices, RowMap map, Window window, Selection selection, Weights weights,          \
           Levels levels, Space space, Groups groups, i32 splits) {                                               \
    wait_for_predecessor();                                                                                       \
    select_row(query, keys, map, window, selection, weights, levels, space, groups, splits, values, indices);     \
  }

SELECT_KERNEL(select_32, i32)
SELECT_KERNEL(select_64, i64)

// ---- All scores ----------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    score_all(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ scores, RowMap map,
              Weights weights, i32 n) {
  const Operands at = operands(query, keys, map, blockIdx.x);
  const int lane = threadIdx.x & 31;
  const Query planes(at.query, lane);
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
