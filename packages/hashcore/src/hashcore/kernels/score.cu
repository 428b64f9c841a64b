// Weighted scores of every key against the planes of one query (docs/algorithm.md, eq. 4):
//
//     s_k = sum_p weight_p popcount(~(B_p xor c_k))
//
// query u32 [rows][P][W], keys u32 [..][N][W] in rows that may repeat (RowMap), N times W words without gaps.
//
// score_count, one launch of a retrieval. Grid: rows x splits, blocks of 512. A block scores one chunk of one row's
// window, a key to a thread, KEYS loads of 16 bytes in flight each. Per key of 128 bits: 16 bytes read, 2 written as a
// 16-bit score (a warp's 32 leave as one 64-byte store), one shared atomic of increment 1, which the hardware merges
// where lanes agree. At the end the block adds its histogram to the row's and writes its table of counts
// (publish_counts), (bins + 3) * 4 bytes, from which select.cu finds every chunk's place in the output.
//
//     512K keys x 4 rows, G = 7 in 3 planes: 32 MiB + 4 MiB + 66 chunks x 4 rows x 3.6 KB = 38.7 MB, 9.0 us at 4.3 TB/s
//     Integer work: 7 POPC and 22 LOP3 a key (tools/check_kernels.py counts them). POPC runs at 16 lanes a clock and
//     multiprocessor: 2.1 M keys x 7 / (132 x 16 x 1.8 GHz) = 3.9 us. Memory is the ceiling, with room to spare.
//
// score_all writes int32 scores of all N keys and counts nothing: the function `score`.
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

constexpr int BLOCK_WORDS = WORDS <= 8 ? WORDS : 4;  // words of a key held at once
constexpr int REST = WORDS % BLOCK_WORDS;
constexpr bool IN_REGISTERS = WORDS <= 8 && PLANES * WORDS <= 32;
// Keys in flight per thread: as many as its 64 registers hold beside the planes.
constexpr int FITTING = IN_REGISTERS ? (48 - PLANES * WORDS) / (2 * WORDS) : 1;
constexpr int KEYS = FITTING < 1 ? 1 : FITTING > 4 ? 4 : FITTING;

// The planes of a row, inverted, so that xor gives the matches: in registers if they are few, else read through L1,
// where all lanes want the same word.
struct Query {
  u32 word[IN_REGISTERS ? PLANES * WORDS : 1];
  const u32* memory;

  __device__ __forceinline__ explicit Query(const u32* from) : memory(from) {
    if constexpr (IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < PLANES * WORDS; i++) word[i] = ~__ldg(from + i);
    }
  }

  __device__ __forceinline__ u32 inverted(int plane, int w) const {
    if constexpr (IN_REGISTERS) {
      return word[plane * WORDS + w];
    } else {
      return ~__ldg(memory + plane * WORDS + w);
    }
  }
};

// The weighted matches of COUNT words of a key, from word `first` on.
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

// Sums the matches of words [first, first + COUNT) of the key at `from`, and of every COUNT words after it that fit.
template <int COUNT>
__device__ __forceinline__ int matches_from(const u32* from, const Query& query, int first, const Weights& weights) {
  int sum = 0;
  if constexpr (COUNT > 0) {
#pragma unroll 1
    for (int w = first; w + COUNT <= WORDS; w += COUNT) {
      u32 words[COUNT];
      load_words<WORDS>(from + w, words);
      sum += matches(words, query, w, weights);
    }
  }
  return sum;
}

// Scores the keys begin + u * stride, u < KEYS, that lie below end, and hands each (position, score) to `take`.
template <class Take>
__device__ __forceinline__ void score_keys(const u32* __restrict__ keys, const Query& query, const Weights& weights,
                                           int begin, int end, int stride, Take take) {
  u32 key[KEYS][BLOCK_WORDS];
#pragma unroll
  for (int u = 0; u < KEYS; u++)
    if (begin + u * stride < end) load_words<WORDS>(keys + i64(begin + u * stride) * WORDS, key[u]);
#pragma unroll
  for (int u = 0; u < KEYS; u++) {
    const int i = begin + u * stride;
    if (i >= end) continue;
    int score = matches(key[u], query, 0, weights);
    if constexpr (WORDS > BLOCK_WORDS) {
      score += matches_from<BLOCK_WORDS>(keys + i64(i) * WORDS, query, BLOCK_WORDS, weights);
      score += matches_from<REST>(keys + i64(i) * WORDS, query, WORDS - REST, weights);
    }
    take(i, score);
  }
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 2)
    score_count(const u32* __restrict__ query, const u32* __restrict__ keys, u16* __restrict__ scores,
                u32* __restrict__ totals, u32* __restrict__ table, RowMap map, Window window, Weights weights,
                Levels levels, i64 score_stride, i32 first_row) {
  __shared__ __align__(16) u32 counts[MAX_BINS];
  const int row = blockIdx.x, splits = gridDim.y, bins = levels.bins[0], shift = levels.shift[0];
  const Range range = eligible(window, first_row + row);
  const Chunk chunk = chunk_of(range, splits, blockIdx.y);
  if (chunk.empty) return;  // nobody reads its table
  const Operands at = operands(query, keys, map, first_row + row);
  const Query planes(at.query);
  clear_counts(counts, bins);
  u16* out = scores + row * score_stride;
  const int begin = chunk.begin > range.low ? chunk.begin : range.low;
#pragma unroll 1
  for (int i = begin + threadIdx.x; i < chunk.end; i += KEYS * SELECT_THREADS) {
    score_keys(at.keys, planes, weights, i, chunk.end, SELECT_THREADS, [&](int position, int score) {
      out[position] = u16(score);
      atomicAdd(&counts[score >> shift], 1u);
    });
  }
  let_dependents_start();
  publish_counts(counts, bins, totals + i64(row) * levels.width,
                 table + (i64(row) * splits + blockIdx.y) * levels.width);
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 2)
    score_all(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ scores, RowMap map,
              Weights weights, i32 n) {
  const Operands at = operands(query, keys, map, blockIdx.x);
  const Query planes(at.query);
  i32* out = scores + i64(blockIdx.x) * n;
  const i64 tile = KEYS * SELECT_THREADS;
#pragma unroll 1
  for (i64 i = blockIdx.y * tile + threadIdx.x; i < n; i += gridDim.y * tile)
    score_keys(at.keys, planes, weights, int(i), n, SELECT_THREADS,
               [&](int position, int score) { out[position] = score; });
}
