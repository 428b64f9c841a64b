// A lane's share of keys and of a row's planes, and their scores (docs/algorithm.md, eq. 4).
//
// HASHCORE_WORDS: W. HASHCORE_PLANES: P. HASHCORE_WEIGHTS: the weights, if known at compile time; the carry-save
// counter then runs over all planes together. Otherwise the weights are an argument, and it runs per plane.
// HASHCORE_TENSOR: tensor cores count the matches (tensor.cuh), for codes of 128 bits and up to 7 planes.
#pragma once
#include "lists.cuh"
#include "pages.cuh"

constexpr int WORDS = HASHCORE_WORDS;
constexpr int PLANES = HASHCORE_PLANES;
static_assert(WORDS >= 1 && PLANES >= 1 && PLANES <= 8);

#ifdef HASHCORE_WEIGHTS
using Fixed = FixedWeights<HASHCORE_WEIGHTS>;
static_assert(Fixed::PLANES == PLANES);
#endif

#ifdef HASHCORE_TENSOR
constexpr bool TENSOR = true;
#else
constexpr bool TENSOR = false;
#endif
#include "tensor.cuh"

// ---- A lane's share of a key ---------------------------------------------------------------------------------------

// Long keys are shared by 2 or 4 lanes, so that the lanes of a warp read 16 consecutive bytes each: unit u of 4 words
// belongs to lane u % LANES of the key.
constexpr int LANES = WORDS % 16 == 0 ? 4 : WORDS % 8 == 0 ? 2 : 1;
constexpr int SLICE = 32 / LANES;                // keys that a warp reads at once
constexpr int MINE = WORDS / LANES;              // words of a key per lane
constexpr int BLOCK_WORDS = MINE <= 8 ? MINE : 4;  // of them in registers at once
constexpr int REST = MINE % BLOCK_WORDS;
constexpr int PLANE_WORDS = TENSOR ? 4 : PLANES * MINE;  // of a lane
constexpr bool IN_REGISTERS = MINE <= 8 && PLANE_WORDS <= 32;
// Keys that a thread holds, and as many that are being loaded: as many as its 128 registers allow besides the planes.
// 4 keys of 16 bytes x 512 threads are 32 KB in flight per SM; an H200 needs 23 KB to reach 4.3 TB/s.
constexpr int FITTING = (52 - (IN_REGISTERS ? PLANE_WORDS : 0)) / (2 * BLOCK_WORDS);
constexpr int KEYS = FITTING < 1 ? 1 : FITTING > 4 ? 4 : FITTING;
static_assert(LANES == 1 || MINE % 4 == 0);

// The index in a code of a lane's i-th word.
__device__ __forceinline__ int word_of(int i, int part) {
  if constexpr (LANES == 1) return i;
  return (i / 4 * LANES + part) * 4 + i % 4;
}

// A lane's words of a row's planes, inverted, so that xor gives the matches: in registers if they are few; else read
// through L1, where the lanes with the same part of a key read the same word.
struct PlainQuery {
  u32 word[IN_REGISTERS ? PLANES * MINE : 1];
  const u32* memory;
  int part;

  __device__ __forceinline__ PlainQuery(const u32* from, int lane, const Weights&) : memory(from), part(lane % LANES) {
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

#ifdef HASHCORE_TENSOR
using Query = TensorQuery<PLANES>;
#else
using Query = PlainQuery;
#endif

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
__device__ __forceinline__ int matches(const u32 (&key)[COUNT], const PlainQuery& query, int first,
                                       const Weights& weights) {
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
__device__ __forceinline__ int matches_from(const u32* from, const PlainQuery& query, int first,
                                            const Weights& weights) {
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

// The score of a key whose first words are held by its lanes, returned to all of them; undefined if the key must not be
// read. The whole warp calls it.
__device__ __forceinline__ int score_of(const u32 (&held)[BLOCK_WORDS], bool readable, const u32* key,
                                        const PlainQuery& query, const Weights& weights) {
  int score = matches(held, query, 0, weights);
  if constexpr (MINE > BLOCK_WORDS) {
    if (readable) {
      score += matches_from<BLOCK_WORDS>(key, query, BLOCK_WORDS, weights);
      score += matches_from<REST>(key, query, MINE - REST, weights);
    }
  }
#pragma unroll
  for (int step = 1; step < LANES; step <<= 1) score += __shfl_xor_sync(FULL_WARP, score, step);
  return score;
}

#ifdef HASHCORE_TENSOR
__device__ __forceinline__ int score_of(const u32 (&held)[BLOCK_WORDS], bool, const u32*,
                                        const TensorQuery<PLANES>& query, const Weights&) {
  static_assert(WORDS == 4 && LANES == 1);
  return query.score(held);
}
#endif

// The pages of a lane's keys first + u * SLICE, u < KEYS, below an end. Empty if keys are not in pages.
struct PageNumbers {
  u32 of[PAGED ? KEYS : 1];

  __device__ __forceinline__ PageNumbers(const Keys& keys, int first, int end) {
    if constexpr (PAGED) {
#pragma unroll
      for (int u = 0; u < KEYS; u++) of[u] = first + u * SLICE < end ? keys.page_of(first + u * SLICE) : 0;
    }
  }
};

// A lane's words of the keys first + u * SLICE, u < KEYS, that are in registers at once.
struct Held {
  Keys keys;
  int first;          // this lane's first key
  int end;            // no key from here on is read
  PageNumbers ahead;  // of the keys after these, so that loads of codes need not wait for the table
  u32 word[KEYS][BLOCK_WORDS];

  __device__ __forceinline__ Held(const Keys& keys, int first, int end, int part, const PageNumbers& pages)
      : keys(keys), first(first), end(end), ahead(keys, first + KEYS * SLICE, end) {
#pragma unroll
    for (int u = 0; u < KEYS; u++) {
#pragma unroll
      for (int w = 0; w < BLOCK_WORDS; w++) word[u][w] = 0;
      const int i = first + u * SLICE;
      if (i < end) load_share(keys.in_page(i, pages.of[PAGED ? u : 0]), 0, part, word[u]);
    }
  }

  __device__ __forceinline__ Held(const Keys& keys, int first, int end, int part)
      : Held(keys, first, end, part, PageNumbers(keys, first, end)) {}

  // Keys that are not in pages.
  __device__ __forceinline__ Held(const u32* keys, i64 step, int first, int end, int part)
      : Held(Keys(keys, step), first, end, part) {}

  // The keys after these.
  __device__ __forceinline__ Held next(int part) const {
    return Held(keys, first + KEYS * SLICE, end, part, ahead);
  }

  // The score of key u, in all lanes that share it; undefined for keys at or after the end. The whole warp calls it.
  __device__ __forceinline__ int score(int u, const Query& query, const Weights& weights) const {
    const int i = first + u * SLICE;
    return score_of(word[u], i < end, PAGED && i >= end ? nullptr : keys.at(i), query, weights);
  }
};
