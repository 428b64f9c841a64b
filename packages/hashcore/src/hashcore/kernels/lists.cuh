// Code shared by the two launches of a search: weights, groups of rows, and how their keys are divided into lists.
#pragma once
#include "common.cuh"

struct Weights {
  i32 of[8];
};

// ---- Groups of rows, and their lists -------------------------------------------------------------------------------

constexpr int WARPS = SELECT_THREADS / 32;
constexpr int MAX_GROUP = 8;       // queries that share the keys a block loads
constexpr int MAX_SPLITS = 512;    // blocks of a row
constexpr int SAMPLE_BINS = 256;   // two bins of a histogram of the last digits would cost more than they save
constexpr int BINS = 256;          // high digits of candidates; scores have 16 bits, so there are as many low digits
constexpr u32 SPARE = 24;          // extra candidates in the sample, because small samples are inaccurate
static_assert(SAMPLE_BINS <= SELECT_THREADS);

// Groups of at most `size` rows out of `line` consecutive rows with the same keys; size 1: no groups.
struct Groups {
  i32 first;  // group of the launch's first slot; a row has a slot in the workspace, a group `size` slots
  i32 line;
  i32 size;
};

struct Group {
  int row;    // first row
  int count;  // number of rows
};

__device__ __forceinline__ Group group_of(const Groups& groups, int index) {
  if (groups.size == 1) return {groups.first + index, 1};  // no divisions, which cost more than the rest of a prologue
  const int in_line = (groups.line + groups.size - 1) / groups.size;
  const int line = (groups.first + index) / in_line, begin = (groups.first + index) % in_line * groups.size;
  const int left = groups.line - begin;
  return {line * groups.line + begin, left < groups.size ? left : groups.size};
}

// Waits before positions or counts in device memory are read.
__device__ __forceinline__ void wait_for_bounds(const Window& window, const Selection& selection) {
  if (window.lengths || window.starts || selection.k) wait_for_predecessor();
}

// The smallest range that contains the eligible positions of all rows of a group.
__device__ __forceinline__ Range reach(const Window& window, const Group& group) {
  Range all = eligible(window, group.row);
#pragma unroll 1
  for (int i = 1; i < group.count; i++) {
    const Range next = eligible(window, group.row + i);
    if (next.size() == 0) continue;
    if (all.size() == 0) all = next;
    all.low = next.low < all.low ? next.low : all.low;
    all.high = next.high > all.high ? next.high : all.high;
  }
  return all;
}

// Divides the positions of a group into lists of equal length, up to whole slices. It divides the range, not the
// capacity, so that a large cache with few tokens still occupies every warp.
struct Cut {
  int base;
  int step;  // keys of a list, a multiple of 32, at most 2^16 - 32
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

  // How many blocks have keys: the others have written nothing.
  __device__ __forceinline__ int blocks() const { return step ? (high - base + WARPS * step - 1) / (WARPS * step) : 0; }
};

__device__ __forceinline__ Range overlap(const Range& a, const Range& b) {
  const int low = a.low > b.low ? a.low : b.low, high = a.high < b.high ? a.high : b.high;
  return {low, high > low ? high : low};
}

// Addresses in the workspace of a turn.
struct Space {
  u32* floors;  // [slots]
  u32* bins;    // [slots][splits][BINS]: how many candidates of a block have a high digit
  u32* counts;  // [slots][splits][WARPS]: lengths of the lists
  u32* lists;   // [slots][stride]
  i64 stride;
  i32 shift;    // a score's bin of the sample is score >> shift
  i32 top;      // the highest score
};

// Digits of a candidate's score: BINS high digits from the floor up, and as few low digits as that leaves.
static_assert(BINS == 1 << 8);
struct Digits {
  u32 floor;
  i32 low;  // bits of the low digit

  __device__ __forceinline__ Digits(u32 floor, int top) : floor(floor), low(24 - __clz(int(u32(top) - floor))) {
    if (low < 0) low = 0;
  }
  __device__ __forceinline__ u32 high_of(u32 score) const { return (score - floor) >> low; }
  __device__ __forceinline__ u32 low_of(u32 score) const { return (score - floor) & ((1u << low) - 1); }
};
