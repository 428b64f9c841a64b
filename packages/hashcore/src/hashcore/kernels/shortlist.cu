// A search with a shortlist (docs/algorithm.md, eq. 20): scores all keys by their first words, and only the best in
// full.
//
// Three launches. Layouts, groups, cuts and lists are those of score.cu.
//
// first_floor, one block per row, scores 1024 keys, spread over those that the row sees, in full and by first words,
// and finds two floors. The floor of first words defines the shortlist, so it must be exact. The floor of full scores
// of keys on the shortlist only saves bytes: somewhat more than k keys reach it.
//
// list_shortlist, grid groups x splits, blocks of 512. A warp iterates over its keys, FIRST_KEYS * 32 at a time.
//   (1) It scores their first words by the last planes. The offsets of keys that reach the first floor are put in the
//       row's ring buffer, in order.
//   (2) When the ring has BATCH offsets, these keys are scored in full, one per lane. Only about one key in eight is on
//       the shortlist, so scoring them directly would leave most lanes idle.
//   (3) Keys that reach the row's floor are candidates, as in score.cu. Keys on the shortlist are counted.
//
// select (choose.cu) scores again keys that a floor excluded or, if fewer than k are on the shortlist, all keys.
//
// Bytes (benchmarks/gpu_traffic.py): contiguous first words are 4 of a code's 16 bytes; a sector of 32 bytes has two
// codes, and one code in eight to ten is on the shortlist. First words read from the codes save no sectors, only work:
// 4 POPC instead of 13 for a key that is not on the shortlist.
#include "lane.cuh"

// Sizes of a warp's batches: the rings of all rows of a group must fit in shared memory.
template <int GROUP>
struct Size {
  static constexpr int FIRST_KEYS = GROUP == 1 ? 8 : 3;  // first words that a lane holds, and as many being loaded
  static constexpr int PICKED = GROUP == 1 && KEYS > 1 ? 2 : 1;  // codes of shortlisted keys that it holds
  static constexpr int BATCH = PICKED * SLICE;
  static constexpr int RING = GROUP == 1 ? 512 : 128;  // offsets: the rest of a batch, and those of one turn
  static_assert(32 * FIRST_KEYS + BATCH - 1 <= RING && (RING & (RING - 1)) == 0);
  static_assert(WARPS * GROUP * RING * sizeof(u16) <= 32 << 10);
};

// ---- Scores by first words -----------------------------------------------------------------------------------------

constexpr int EARLY = PLANES < EARLY_PLANES ? PLANES : EARLY_PLANES;

// The first words of a row's last planes, inverted.
struct EarlyQuery {
  u32 word[EARLY];

  __device__ __forceinline__ explicit EarlyQuery(const u32* query) {
#pragma unroll
    for (int p = 0; p < EARLY; p++) word[p] = ~__ldg(query + (PLANES - EARLY + p) * WORDS);
  }

  __device__ __forceinline__ u32 score(u32 key, const Weights& weights) const {
    u32 score = 0;
#pragma unroll
    for (int p = 0; p < EARLY; p++) score += weight(PLANES - EARLY + p, weights) * __popc(key ^ word[p]);
    return score;
  }

  __device__ __forceinline__ static u32 weight(int plane, const Weights& weights) {
#ifdef HASHCORE_WEIGHTS
    constexpr int known[] = {HASHCORE_WEIGHTS};
    return known[plane];
#else
    return weights.of[plane];
#endif
  }
};

// ---- Floors --------------------------------------------------------------------------------------------------------

constexpr int PER_LANE = EARLY_SAMPLE / 32;
static_assert(WARPS == 1 << 4);

// The rank-th best of numbers below 2^16, which every warp holds, four bits at a time: each warp tries one digit. Every
// thread must call it.
__device__ __forceinline__ u32 ranked(const u32 (&x)[PER_LANE], u32 rank) {
  u32 found = 0;
#pragma unroll 1
  for (int shift = 12; shift >= 0; shift -= 4) {
    const u32 tried = found | threadIdx.x >> 5 << shift;
    u32 reach = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) reach += x[i] >= tried;
    reach = __reduce_add_sync(FULL_WARP, reach);
    found += u32(__syncthreads_count((threadIdx.x & 31) == 0 && reach >= rank) - 1) << shift;  // 0 is always reached
  }
  return found;
}

// Writes a row's floors; 0, which all keys reach, if there is no shortlist or a sample would not save time.
__device__ __forceinline__ void write_floors(const u16 (&early)[EARLY_SAMPLE], const u16 (&whole)[EARLY_SAMPLE],
                                             i64 wanted, int n, int times, ShortRow* row) {
  const int lane = threadIdx.x & 31;
  u32 x[PER_LANE], first = 0, floor = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) x[i] = early[32 * i + lane];
  const i64 target = times * wanted;
  if (target < n) first = ranked(x, u32((target * EARLY_SAMPLE + n - 1) / n));
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) x[i] = x[i] >= first ? whole[32 * i + lane] : 0;
  // The number of the k best keys in a sample is about Poisson distributed: three standard deviations are added.
  const float share = float(wanted) * EARLY_SAMPLE / float(n);
  const u32 rank = u32(share + 3 * sqrtf(share)) + 4;
  if (rank <= EARLY_SAMPLE) floor = ranked(x, rank);
  if (threadIdx.x == 0) *row = {first, floor, 0};
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    first_floor(const u32* __restrict__ query, const u32* __restrict__ keys, RowMap map, Window window,
                Selection selection, Weights weights, Groups groups, Shortlist shortlist) {
  __shared__ u16 early[EARLY_SAMPLE], whole[EARLY_SAMPLE];
  let_dependents_start();
  const Group group = group_of(groups, blockIdx.x / groups.size);
  const int row = group.row + int(blockIdx.x) % groups.size, lane = threadIdx.x & 31, part = lane % LANES;
  if (row >= group.row + group.count) return;
  ShortRow* found = shortlist.rows + blockIdx.x;
  const Range range = eligible(window, row);
  const int wanted = selected(selection, range, row), n = range.size();
  if (wanted == 0 || n < 2 * EARLY_SAMPLE) {
    if (threadIdx.x == 0) *found = {0, 0, 0};
    return;
  }
  const Operands at = operands(query, keys, map, row);
  const Query planes(at.query, lane);
  const EarlyQuery first(at.query);
  const i64 spread = n / EARLY_SAMPLE * map.key;
#pragma unroll 1
  for (int i = KEYS * SLICE * int(threadIdx.x >> 5); i < EARLY_SAMPLE; i += KEYS * SLICE * WARPS) {
    const Held held(at.keys + range.low * map.key, spread, i + lane / LANES, EARLY_SAMPLE, part);
#pragma unroll
    for (int u = 0; u < KEYS; u++) {
      const int score = held.score(u, planes, weights), place = held.first + u * SLICE;
      if (part || place >= EARLY_SAMPLE) continue;
      early[place] = u16(first.score(held.word[u][0], weights));
      whole[place] = u16(score);
    }
  }
  __syncthreads();
  write_floors(early, whole, wanted, n, shortlist.times, found);
}

// ---- Candidates ----------------------------------------------------------------------------------------------------

// A lane's first words of the keys first + 32 u.
template <int COUNT>
struct FirstWords {
  int first;
  u32 word[COUNT];

  __device__ __forceinline__ FirstWords(const u32* from, i64 step, int first, int end) : first(first) {
#pragma unroll
    for (int u = 0; u < COUNT; u++) word[u] = first + 32 * u < end ? __ldcs(from + (first + 32 * u) * step) : 0;
  }
};

// A warp's state of its keys.
struct Part {
  const u32* keys;  // from its first on
  i64 step;
  Range range;
};

// Up to COUNT * SLICE keys from the ring; like Held, but at arbitrary offsets of a list.
template <int COUNT>
struct Waiting {
  const Part& part;
  int offset[COUNT];  // -1: none
  u32 word[COUNT][BLOCK_WORDS];

  template <int RING>
  __device__ __forceinline__ Waiting(const Part& part, const u16 (&ring)[RING], u32 begin, u32 end) : part(part) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int u = 0; u < COUNT; u++) {
      const u32 i = begin + u * SLICE + lane / LANES;
      offset[u] = i < end ? ring[i % RING] : -1;
#pragma unroll
      for (int w = 0; w < BLOCK_WORDS; w++) word[u][w] = 0;
      if (offset[u] >= 0) load_share(part.keys + offset[u] * part.step, 0, lane % LANES, word[u]);
    }
  }

  __device__ __forceinline__ int score(int u, const Query& query, const Weights& weights) const {
    return score_of(word[u], offset[u] >= 0, part.keys + offset[u] * part.step, query, weights);
  }
};

// A warp's state of its rows: lane q holds that of row q; with one row, every lane holds it.
struct Rows {
  int low, high;
  int wanted;
  u32 first, floor;  // floors of first words and of full scores
  u32 listed;        // number of keys that reached `first` so far
  u32 scored;        // number of them that were scored in full
  u32 found;         // length of the warp's list so far
};

template <int GROUP, class T>
__device__ __forceinline__ T of_row(T value, int q) {
  if constexpr (GROUP == 1) return value;
  return __shfl_sync(FULL_WARP, value, q);
}

// Scores the keys in a row's ring, all or whole batches only, and appends the candidates among them. The whole warp
// must call it.
template <int GROUP, int RING>
__device__ __forceinline__ void score_waiting(const Part& part, const Query& query, const Weights& weights, Rows& rows,
                                              int q, bool all, const u16 (&ring)[RING], u32* list) {
  constexpr u32 PICKED = Size<GROUP>::PICKED, BATCH = Size<GROUP>::BATCH;
  const int lane = threadIdx.x & 31;
  const u32 floor = of_row<GROUP>(rows.floor, q), listed = of_row<GROUP>(rows.listed, q);
  u32 scored = of_row<GROUP>(rows.scored, q), found = of_row<GROUP>(rows.found, q);
#pragma unroll 1
  while (listed - scored >= (all ? 1 : BATCH)) {
    const Waiting<PICKED> waiting(part, ring, scored, listed);
#pragma unroll
    for (int u = 0; u < PICKED; u++) {
      const u32 score = waiting.score(u, query, weights);
      const bool chosen = waiting.offset[u] >= 0 && lane % LANES == 0 && score >= floor;
      const u32 lanes = __ballot_sync(FULL_WARP, chosen);
      if (chosen) list[found + __popc(lanes & ((1u << lane) - 1))] = score << 16 | u32(waiting.offset[u]);
      found += __popc(lanes);
    }
    scored = listed - scored < BATCH ? listed : scored + BATCH;
  }
  __syncwarp();  // the ring was read
  if (GROUP == 1 || lane == q) rows.scored = scored, rows.found = found;
}

// Appends the keys in registers that are on the shortlist of one row to its ring. The whole warp must call it.
template <int GROUP, int COUNT, int RING>
__device__ __forceinline__ void note_row(const FirstWords<COUNT>& held, const EarlyQuery& query, const Weights& weights,
                                         Rows& rows, int q, const Part& part, u16 (&ring)[RING]) {
  const int lane = threadIdx.x & 31;
  const Range own = overlap({of_row<GROUP>(rows.low, q), of_row<GROUP>(rows.high, q)}, part.range);
  const u32 floor = of_row<GROUP>(rows.first, q);
  u32 listed = of_row<GROUP>(rows.listed, q);
#pragma unroll
  for (int u = 0; u < COUNT; u++) {
    const int i = held.first + 32 * u;
    const bool on = i >= own.low && i < own.high && query.score(held.word[u], weights) >= floor;
    const u32 lanes = __ballot_sync(FULL_WARP, on);
    if (on) ring[(listed + __popc(lanes & ((1u << lane) - 1))) % RING] = u16(i - part.range.low);
    listed += __popc(lanes);
  }
  __syncwarp();  // the ring was written
  if (GROUP == 1 || lane == q) rows.listed = listed;
}

template <int GROUP>
__device__ __forceinline__ Rows rows_of(const Group& group, const Window& window, const Selection& selection,
                                        const ShortRow* floors) {
  const int q = GROUP == 1 ? 0 : threadIdx.x & 31;
  if (q >= group.count) return {};
  const Range range = eligible(window, group.row + q);
  const int wanted = selected(selection, range, group.row + q);
  return {range.low, range.high, wanted, __ldcg(&floors[q].first), __ldcg(&floors[q].floor), 0, 0, 0};
}

template <int GROUP>
__device__ __forceinline__ void list_group(const u32* __restrict__ query, const u32* __restrict__ keys,
                                           const RowMap& map, const Window& window, const Selection& selection,
                                           const Weights& weights, const Space& space, const Groups& groups,
                                           const Shortlist& shortlist) {
  constexpr int FIRST_KEYS = Size<GROUP>::FIRST_KEYS, BATCH = Size<GROUP>::BATCH;
  __shared__ u16 rings[WARPS][GROUP][Size<GROUP>::RING];
  const Group group = group_of(groups, blockIdx.x);
  const Cut cut(reach(window, group), gridDim.y);
  if (cut.keys(blockIdx.y * WARPS).size() == 0) return;  // this block's lists are never read
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Range mine = cut.keys(blockIdx.y * WARPS + warp);
  const Operands at = operands(query, keys, map, group.row);
  const u32* words = operands(query, shortlist.first, shortlist.map, group.row).keys;
  const i64 slot = i64(blockIdx.x) * groups.size, step = GROUP == 1 ? 0 : map.query[3];
  u32* lists = space.lists + slot * space.stride + mine.low;
  const Part part = {at.keys + mine.low * map.key, map.key, mine};
  Rows rows = rows_of<GROUP>(group, window, selection, shortlist.rows + slot);
  const Query only(at.query, lane);
  const EarlyQuery early(at.query);
  FirstWords<FIRST_KEYS> held(words, shortlist.map.key, mine.low + lane, mine.high);
#pragma unroll 1
  for (int first = mine.low; first < mine.high; first += FIRST_KEYS * 32) {
    const FirstWords<FIRST_KEYS> next(words, shortlist.map.key, held.first + FIRST_KEYS * 32, mine.high);
    const bool last = mine.high - first <= FIRST_KEYS * 32;
    if constexpr (GROUP == 1) {
      if (rows.wanted) {
        note_row<1>(held, early, weights, rows, 0, part, rings[warp][0]);
        score_waiting<1>(part, only, weights, rows, 0, last, rings[warp][0], lists);
      }
    } else {
#pragma unroll 1
      for (int q = 0; q < group.count; q++) {
        if (!of_row<GROUP>(rows.wanted, q)) continue;
        const u32* planes = at.query + q * step;
        note_row<GROUP>(held, EarlyQuery(planes), weights, rows, q, part, rings[warp][q]);
        if (!last && of_row<GROUP>(rows.listed - rows.scored, q) < BATCH) continue;
        score_waiting<GROUP>(part, Query(planes, lane), weights, rows, q, last, rings[warp][q],
                             lists + q * space.stride);
      }
    }
    held = next;
  }
  let_dependents_start();
  const i64 row = (slot + (GROUP == 1 ? 0 : lane)) * gridDim.y + blockIdx.y;
  if (lane >= group.count) return;
  space.counts[row * WARPS + warp] = rows.found;
  if (warp == 0) space.floors[row] = rows.floor;
  if (rows.listed) atomicAdd(&shortlist.rows[slot + lane].listed, rows.listed);
}

#define LIST_KERNEL(name, GROUP)                                                                                     \
  extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)                                                    \
      name(const u32* __restrict__ query, const u32* __restrict__ keys, RowMap map, Window window,                   \
           Selection selection, Weights weights, Space space, Groups groups, Shortlist shortlist) {                  \
    wait_for_predecessor();                                                                                          \
    list_group<GROUP>(query, keys, map, window, selection, weights, space, groups, shortlist);                       \
  }

LIST_KERNEL(list_shortlist, 1)
LIST_KERNEL(list_shortlist_shared, MAX_GROUP)
