// Code shared by the two launches of a search: weights, and how the keys of a row are divided into lists.
#pragma once
#include "common.cuh"

struct Weights {
  i32 of[8];
};

// ---- The lists of a row ---------------------------------------------------------------------------------------------

constexpr int WARPS = SELECT_THREADS / 32;
constexpr int MAX_SPLITS = 512;    // blocks of a row
constexpr int SAMPLE_BINS = 256;   // two bins of a histogram of the last digits would cost more than they save
constexpr int BINS = 256;          // high digits of candidates; scores have 16 bits, so there are as many low digits
constexpr u32 SPARE = 24;          // extra candidates in the sample, because small samples are inaccurate
static_assert(SAMPLE_BINS <= SELECT_THREADS);

// Waits before positions or counts in device memory are read.
__device__ __forceinline__ void wait_for_bounds(const Window& window, const Selection& selection) {
  if (window.lengths || window.starts || selection.k) wait_for_predecessor();
}

// Divides the positions of a row into lists of equal length, up to whole slices. It divides the range, not the
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
