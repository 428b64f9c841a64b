// Selects the k best of rows of int32 scores (docs/algorithm.md, eq. 6), ties to the lowest index, indices ascending.
// Searches use choose.cu instead.
//
// Integer scores need no sort: the k-th best follows from the row's histogram. Scores are converted to sort keys,
// unsigned integers with three digits (Levels). The first launch counts the highest digit; two more count the next
// digit of keys that share the threshold's higher digits; the fourth launch selects.
//
// totals u32 [rows][width]: number of eligible keys of the row with each digit, per level; level l counts only keys
// that share the threshold's higher digits. table u32 [rows][splits][width]: number of keys of a chunk with at least
// each digit.
//
// select, grid rows x splits, blocks of 512, with the same chunks as the count launches. A block
//   (1) finds the threshold: scans the totals from the top until k are covered; the rest is the quota of keys equal to
//       the threshold;
//   (2) finds its place: from the tables of earlier chunks, two words each, the numbers of earlier keys above the
//       threshold and equal to it;
//   (3) iterates over its scores, 4096 at a time, 8 per thread: a block-wide scan of both counts gives each selected
//       key its slot, (earlier keys above) + min(quota, earlier keys equal);
//   (4) the last block of a row clears totals and ticket for the next call, which saves a memset.
// No block waits for another, so the result does not depend on their order.
//
// Bytes: 4 per score and launch; per block the totals, its table and 8 * splits bytes of other tables.
#include "common.cuh"

constexpr int MIN_CHUNK = 128;  // chunks start at multiples of it: 512 bytes of scores

// Divides a range into `splits` chunks of equal length, up to whole MIN_CHUNKs, that start at multiples of VECTOR. It
// divides the range, not the capacity, so that a large cache with few tokens still occupies every block.
struct Chunk {
  int begin;  // may lie before the range; positions below the range are skipped
  int end;
  bool empty;
};

__device__ __forceinline__ Chunk chunk_of(const Range& range, int splits, int index) {
  const int base = range.low & ~(VECTOR - 1);
  const int length = range.size() ? range.high - base : 0;
  const int step = (((length + splits - 1) / splits) + MIN_CHUNK - 1) & ~(MIN_CHUNK - 1);
  const i64 begin = base + i64(step) * index;
  if (length == 0 || begin >= range.high) return {range.high, range.high, true};
  const i64 end = begin + step;
  return {int(begin), end < range.high ? int(end) : range.high, false};
}

// Adds a block's histogram to the row's, and writes the number of the block's keys with at least each digit. From this
// table, later blocks get the counts of earlier keys without reading scores.
__device__ __forceinline__ void publish_counts(const u32* counts, int bins, u32* totals, u32* table) {
  __syncthreads();
  const int group = bins / 4 - 1 - int(threadIdx.x);  // the highest digits first
  uint4 c = {0, 0, 0, 0};
  if (group >= 0) c = reinterpret_cast<const uint4*>(counts)[group];
  u32 ignored;
  const u32 above = scan_block(c.x + c.y + c.z + c.w, ignored);
  if (group < 0) return;
  const uint4 at_least = {above + c.w + c.z + c.y + c.x, above + c.w + c.z + c.y, above + c.w + c.z, above + c.w};
  reinterpret_cast<uint4*>(table)[group] = at_least;
  u32* t = totals + 4 * group;
  if (c.x) atomicAdd(t, c.x);
  if (c.y) atomicAdd(t + 1, c.y);
  if (c.z) atomicAdd(t + 2, c.z);
  if (c.w) atomicAdd(t + 3, c.w);
}

// A row of scores. load() reads VECTOR of them at once, a multiple of VECTOR from an aligned row; key() is the sort key
// of one.
struct Scores {
  const i32* row;
  struct Loaded {
    i32 score[VECTOR];
  };

  __device__ __forceinline__ Loaded load(int i) const {
    const int4 x = __ldcg(reinterpret_cast<const int4*>(row + i));
    const int4 y = __ldcg(reinterpret_cast<const int4*>(row + i) + 1);
    return {{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w}};
  }
  __device__ __forceinline__ static u32 key(const Loaded& loaded, int j) {
    return u32(loaded.score[j]) ^ 0x80000000u;  // signed order as unsigned order
  }
};

// The threshold's digits on levels [0, depth), alone and as one number, and how many keys of that prefix are wanted.
struct Prefix {
  u32 key;
  u32 wanted;
  u32 digit[3];
};

__device__ __forceinline__ Prefix find_prefix(const u32* totals, uint4 loaded, const Levels& levels, int depth,
                                              u32 wanted) {
  Prefix prefix = {0, wanted, {0, 0, 0}};
#pragma unroll
  for (int l = 0; l < 3; l++) {
    if (l >= depth) continue;
    if (l > 0) loaded = load_totals(totals, levels.bins[l]);
    const Digit digit = find_digit(loaded, levels.bins[l], prefix.wanted);
    prefix.digit[l] = digit.value;
    prefix.key = l ? prefix.key << (levels.shift[l - 1] - levels.shift[l]) | digit.value : digit.value;
    prefix.wanted -= digit.above;
    totals += levels.bins[l];
  }
  return prefix;
}

// Counts digit `level` of the chunk's keys whose higher digits are the threshold's.
__device__ __forceinline__ void count_digit(Scores scores, u32* totals, u32* table, const Window& window,
                                            const Selection& selection, const Levels& levels, int level,
                                            int first_row) {
  __shared__ __align__(16) u32 counts[MAX_BINS];
  const int row = blockIdx.x, splits = gridDim.y;
  const Range range = eligible(window, first_row + row);
  const Chunk chunk = chunk_of(range, splits, blockIdx.y);
  const int wanted = selected(selection, range, first_row + row);
  if (chunk.empty || wanted == 0) return;
  totals += i64(row) * levels.width;
  table += (i64(row) * splits + blockIdx.y) * levels.width;
  Prefix prefix = {};
  int shift = levels.shift[0], above = 32, bins = levels.bins[0], offset = 0;
  if (level > 0) {
    prefix = find_prefix(totals, load_totals(totals, bins), levels, level, wanted);
    above = level == 1 ? shift : levels.shift[1];
    offset = level == 1 ? bins : bins + levels.bins[1];
    shift = level == 1 ? levels.shift[1] : levels.shift[2];
    bins = level == 1 ? levels.bins[1] : levels.bins[2];
  }
  const u32 mask = (1u << (above - shift)) - 1;  // above - shift is at most 11
  clear_counts(counts, bins);
#pragma unroll 1
  for (int i = chunk.begin + VECTOR * int(threadIdx.x); i < chunk.end; i += VECTOR * SELECT_THREADS) {
    const Scores::Loaded loaded = scores.load(i);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) {
      const u32 key = Scores::key(loaded, j);
      const bool inside = i + j >= range.low && i + j < chunk.end;
      if (inside && (level == 0 || key >> above == prefix.key)) atomicAdd(&counts[key >> shift & mask], 1u);
    }
  }
  publish_counts(counts, bins, totals + offset, table + offset);
}

// Every thread must call it.
__device__ __forceinline__ Place find_place(const u32* table, const Levels& levels, const Prefix& prefix, int chunk) {
  u32 above = 0, equal = 0;
  for (int c = threadIdx.x; c < chunk; c += SELECT_THREADS) {
    const u32* counts = table + i64(c) * levels.width;
    u32 same = 0;
#pragma unroll
    for (int l = 0; l < 3; l++) {
      if (l >= levels.count) continue;
      const int digit = int(prefix.digit[l]);
      const u32 at_least = __ldcg(counts + digit);
      const u32 higher = digit + 1 < levels.bins[l] ? __ldcg(counts + digit + 1) : 0;
      above += higher;
      same = at_least - higher;  // the value of the last level is used
      counts += levels.bins[l];
    }
    equal += same;
  }
  Place place;
  scan_block(above, place.above);
  scan_block(equal, place.equal);
  return place;
}

__device__ __forceinline__ Marks mark(const Scores::Loaded& loaded, int first, int low, int high,
                                      u32 threshold) {
  Marks marks = {0, 0};
#pragma unroll
  for (int j = 0; j < VECTOR; j++) {
    const u32 key = Scores::key(loaded, j);
    const bool inside = first + j >= low && first + j < high;
    marks.above |= u32(inside && key > threshold) << j;
    marks.equal |= u32(inside && key == threshold) << j;
  }
  return marks;
}

template <class Index>
__device__ __forceinline__ void compact(Scores scores, Scores::Loaded loaded, const Range& range,
                                        const Chunk& chunk, const Prefix& prefix, Place place, i32* values,
                                        Index* indices) {
  constexpr int TILE = VECTOR * SELECT_THREADS;
  const u32 quota = prefix.wanted;
#pragma unroll 1
  for (int first = chunk.begin + VECTOR * int(threadIdx.x); first - VECTOR * int(threadIdx.x) < chunk.end;
       first += TILE) {
    const Marks marks = mark(loaded, first, range.low, chunk.end, prefix.key);
    if (first + TILE < chunk.end) loaded = scores.load(first + TILE);
    emit(marks, quota, place, [&](int j, u32 slot) {
      values[slot] = scores.row[first + j];
      indices[slot] = first + j;
    });
  }
}

// Clears a row once its last block has read it. Every thread must call it.
__device__ __forceinline__ void clear_when_last(u32* totals, u32* ticket, int width) {
  __shared__ bool last;
  __syncthreads();  // this block has read the totals
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == gridDim.y - 1;
  }
  __syncthreads();
  if (!last) return;
  for (int i = threadIdx.x; i < width; i += SELECT_THREADS) totals[i] = 0;
  if (threadIdx.x == 0) *ticket = 0;
}

template <class Index>
__device__ __forceinline__ void select_row(Scores scores, u32* totals, const u32* table, u32* tickets, i32* values,
                                           Index* indices, const Window& window, const Selection& selection,
                                           const Levels& levels, int first_row) {
  const int row = blockIdx.x, splits = gridDim.y;
  totals += i64(row) * levels.width;
  table += i64(row) * splits * levels.width;
  values += i64(first_row + row) * selection.width;
  indices += i64(first_row + row) * selection.width;
  const uint4 top = load_totals(totals, levels.bins[0]);  // loaded while the window is loaded
  const Range range = eligible(window, first_row + row);
  const Chunk chunk = chunk_of(range, splits, blockIdx.y);
  const int wanted = selected(selection, range, first_row + row);
  if (wanted > 0 && !chunk.empty) {
    Scores::Loaded loaded = {};
    const int first = chunk.begin + VECTOR * int(threadIdx.x);
    if (first < chunk.end) loaded = scores.load(first);  // loaded while the threshold is found
    const Prefix prefix = find_prefix(totals, top, levels, levels.count, u32(wanted));  // (1)
    const Place place = find_place(table, levels, prefix, blockIdx.y);                  // (2)
    compact(scores, loaded, range, chunk, prefix, place, values, indices);              // (3)
  }
  fill(values, indices, wanted, selection.width);
  clear_when_last(totals, tickets + row, levels.width);  // (4)
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 2)
    count_32(const i32* __restrict__ scores, u32* __restrict__ totals, u32* __restrict__ table, Window window,
             Selection selection, Levels levels, i64 stride, i32 first_row, i32 level) {
  count_digit(Scores{scores + blockIdx.x * stride}, totals, table, window, selection, levels, level, first_row);
  let_dependents_start();
}

// scores: address of the launch's first row, with stride `stride`, 16-byte aligned.
#define SELECT_KERNEL(name, Index)                                                                              \
  extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)                                               \
      name(const i32* __restrict__ scores, u32* __restrict__ totals, const u32* __restrict__ table,             \
           u32* __restrict__ tickets, i32* __restrict__ values, Index* __restrict__ indices, Window window,     \
           Selection selection, Levels levels, i64 stride, i32 first_row) {                                     \
    wait_for_predecessor();                                                                                     \
    select_row(Scores{scores + blockIdx.x * stride}, totals, table, tickets, values, indices, window, selection, \
               levels, first_row);                                                                              \
  }

SELECT_KERNEL(select_32_32, i32)
SELECT_KERNEL(select_32_64, i64)
