// Matching bits of every query code with every key code, the XNOR form of a matrix product (docs/algorithm.md, eq. 2):
//
//     s[q][k] = sum_w popcount(~(query[q][w] xor key[k][w]))
//
// query u32 [..][Q][W], keys u32 [..][N][W], scores i32 [batch][Q][N]; the batch dimensions broadcast (RowMap).
//
// A block of 128 threads computes a tile of 16 queries x 256 keys. A thread owns two keys, 128 apart, and holds PIECE
// words of each; the same words of the 16 queries are in shared memory, where all lanes read the same address. 32 sums
// stay in registers over all words, and are written as 128-byte stores.
//
// Bytes per pair: 4 written; keys and queries are read once per tile, 16 / 16 + 16 / 256 bytes per pair of 128 bits.
// Integer work per pair of 128 bits: 3 POPC with carry-save addition. At 16 POPC per clock on 132 SMs at 1.8 GHz, this
// is 1.3 T pairs/s, or 5 TB/s of scores: on an H200 both limits are equal.
//
// HASHCORE_WORDS: W.
#include "common.cuh"

constexpr int WORDS = HASHCORE_WORDS;
constexpr int PIECE = WORDS < 8 ? WORDS : 8;
constexpr int REST = WORDS % PIECE;
constexpr int GEMM_THREADS = 128;
constexpr int QUERIES = 16;
constexpr int KEYS = 2;
static_assert(WORDS >= 1);

struct Tile {
  const u32* query;  // of the tile's first query
  const u32* keys;   // of the row's first key
  i64 step;          // stride of keys in words
  int queries;       // in this tile, at most QUERIES
  int key[KEYS];     // this thread's keys; the last key where there are no more
};

// Adds the matches of COUNT words from `first` on to the sums of a thread's pairs. Every thread must call it.
template <int COUNT>
__device__ __forceinline__ void add_words(const Tile& tile, int first, u32* shared, int (&sums)[KEYS][QUERIES]) {
  __syncthreads();  // other threads may still read the words of the previous call
  for (int i = threadIdx.x; i < QUERIES * COUNT; i += GEMM_THREADS) {
    const int q = i / COUNT, w = i % COUNT;
    shared[i] = q < tile.queries ? ~tile.query[i64(q) * WORDS + first + w] : 0u;
  }
  u32 key[KEYS][COUNT];
#pragma unroll
  for (int k = 0; k < KEYS; k++) load_words<WORDS>(tile.keys + tile.key[k] * tile.step + first, key[k]);
  __syncthreads();
#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
#pragma unroll
    for (int k = 0; k < KEYS; k++) {
      sums[k][q] +=
          weighted_popcount<FixedWeights<1>, COUNT>([&](int, int w) { return key[k][w] ^ shared[q * COUNT + w]; });
    }
  }
}

template <int COUNT>
__device__ __forceinline__ void clear_sums(int (&sums)[KEYS][COUNT]) {
#pragma unroll
  for (int k = 0; k < KEYS; k++) {
#pragma unroll
    for (int q = 0; q < COUNT; q++) sums[k][q] = 0;
  }
}

// Grid: (query tiles x key tiles, batch or fewer).
extern "C" __global__ void __launch_bounds__(GEMM_THREADS)
    score_pairs(const u32* __restrict__ query, const u32* __restrict__ keys, i32* __restrict__ scores, RowMap map,
                i32 batch, i32 queries, i32 n) {
  __shared__ __align__(16) u32 shared[QUERIES * PIECE];
  const int key_tiles = (n + KEYS * GEMM_THREADS - 1) / (KEYS * GEMM_THREADS);
  const int first_query = blockIdx.x / key_tiles * QUERIES;
  const int first_key = blockIdx.x % key_tiles * (KEYS * GEMM_THREADS) + threadIdx.x;
#pragma unroll 1
  for (int b = blockIdx.y; b < batch; b += gridDim.y) {
    const Operands at = operands(query, keys, map, b);
    Tile tile = {at.query + i64(first_query) * WORDS, at.keys, map.key, queries - first_query, {}};
    if (tile.queries > QUERIES) tile.queries = QUERIES;
#pragma unroll
    for (int k = 0; k < KEYS; k++) tile.key[k] = clamp(first_key + k * GEMM_THREADS, 0, n - 1);
    int sums[KEYS][QUERIES];
    clear_sums(sums);
#pragma unroll 1
    for (int w = 0; w + PIECE <= WORDS; w += PIECE) add_words<PIECE>(tile, w, shared, sums);
    if constexpr (REST > 0) add_words<REST>(tile, WORDS - REST, shared, sums);
    i32* out = scores + (i64(b) * queries + first_query) * n;
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
#pragma unroll
      for (int k = 0; k < KEYS; k++) {
        const int i = first_key + k * GEMM_THREADS;
        if (q < tile.queries && i < n) out[i64(q) * n + i] = sums[k][q];
      }
    }
  }
}
