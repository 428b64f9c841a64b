// The remainder's values in a decode step (docs/algorithm.md, eq. 16), from sums over all but the last few tokens.
//
//     rest_h = mean v + slope_h / n (S^T q_h + sum of (q_h . (k - m_k)) (v - m_v)) - slope_h (q_h . d_k) d_v
//
// over the T tokens not in the sums; S is the spread of the others, m their means, d how far the T tokens move them. A
// step reads S rounded, 8 bits a number and a factor a row. Every FOLD tokens it also adds them to the sums:
//
//     S' = S + sum of (k - m_k)(v - m_v)^T - n d_k d_v^T
//
// Sums f64 [B][Hkv][D] and [B][Hkv][Dv], spread f32 [B][Hkv][D][Dv], levels i8 of the same shape, scales f32
// [B][Hkv][D]; q [B][Hq][D] contiguous; k and v with strides; mean_keys f32 [B][Hkv][D], rest f32 [B][Hq][Dv]. Spread,
// levels, and the rows of q, k and v start at multiples of 16 bytes. New sums are written in place: a block reads and
// writes those of its head alone.
//
// With padding, a row sees tokens from its start on. The sums must begin there, too, and cover all but the last few. If
// not, results are NaN, and so are sums written then: the host could only recompute them after waiting for the device.
//
// add_token, grid B x Hkv, 256 threads. There are few blocks, so latency is what a step costs: all loads are issued
// before the first result is used, and what follows reads shared memory and registers.
//   (1) A thread loads 4 columns of the levels of some rows, 8 numbers of fresh keys or values and of q, and one sum.
//   (2) A thread per component: means, drift and new sums.
//   (3) Four query heads at a time: the query along the levels, and along the fresh keys and the drift.
//   (4) The sum of both for a column.
//   (5) Every FOLD steps: a warp reads rows of the spread, adds the tokens, and rounds each row in its registers.
// Bytes: the levels, up to FOLD keys and values, and two per token of a row with padding; 25 KB per head of 128 x 128,
// and every FOLD steps the spread twice.
//
// SPARSE_DIM: D. SPARSE_VALUE_DIM: Dv. Multiples of 16, up to 256. SPARSE_BF16: dtype of q, k and v. SPARSE_FOLD: FOLD.
#include "fold.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    add_token(Token token, Bounds row, State sums, Results to) {
  __shared__ __align__(16) Fresh fresh;
  __shared__ __align__(16) float scales[DIM], steep[HEADS][DIM], dots[FOLD + 1][HEADS];
  __shared__ __align__(16) float partial[PARTS][HEADS][VALUE_DIM];
  __shared__ float mean_v[VALUE_DIM];
  __shared__ double shares[2];
  const int thread = threadIdx.x, batch = blockIdx.x / token.kv_heads, head = blockIdx.x % token.kv_heads;
  const i64 of_keys = i64(blockIdx.x) * DIM, of_values = i64(blockIdx.x) * VALUE_DIM;
  const i64 query = i64(blockIdx.x) * token.group;  // first query head

  // Step (1).
  wait_for_predecessor();
  u32 levels[TURNS][4];
  load_levels(sums.levels + of_keys * VALUE_DIM, levels);
  double sum[COMPONENTS];
#pragma unroll
  for (int j = 0; j < COMPONENTS; j++) {
    const int c = thread + j * THREADS;
    if (c < SIZE) sum[j] = *(c < DIM ? sums.keys + of_keys + c : sums.values + of_values + (c - DIM));
  }
  float scale = 0.0f, slope[QUERIES];
  if (thread < DIM) scale = sums.scales[of_keys + thread];
  const Half* from_q[QUERIES];
  bool has_q[QUERIES];
#pragma unroll
  for (int j = 0; j < QUERIES; j++) {
    const u32 i = threadIdx.x + j * THREADS, g = i / (DIM / 8);
    from_q[j] = token.q + query * DIM + 8 * i;
    has_q[j] = g < token.group;
    slope[j] = 0.0f;
    if (has_q[j]) slope[j] = token.slopes[head * token.group + g];
  }
  uint4 queries[QUERIES], pieces[PIECES];
  load(from_q, has_q, queries);
  i64 first, end, start = 0, begin = 0;
  int count = 0;
  // The branches are for waits: values in one register cannot be told apart, and a step whose length the host knows
  // would wait for all loads so far, too.
  if (row.summed) {
    first = row.summed[blockIdx.x], end = row.interval ? row.interval[2 * batch + 1] : i64(token.tokens);
    if (first < end && end <= first + FOLD) count = int(end - first);
    load_fresh(token, batch, head, first, count, pieces);
  } else {
    first = token.summed, end = token.tokens;
    if (token.summed < token.tokens && token.tokens <= token.summed + FOLD) count = token.tokens - token.summed;
    load_fresh(token, batch, head, token.summed, count, pieces);
  }
  bool changed = !count;
  u32 joined = (1u << count) - 1;  // bit t: the row sees fresh token t
  if (row.interval || row.starts) {
    if (row.interval) start = row.interval[2 * batch];
    if (row.starts) begin = row.starts[batch];
    changed |= start != begin;
    const i64 hidden = start > first ? start - first : 0;  // of the fresh tokens
    joined = hidden < count ? joined >> hidden << hidden : 0;
  }
  const i64 tokens = end - start;
  if (thread < 2) {
    const double n = double(tokens), divisor = thread ? n - __popc(joined) : n;
    shares[thread] = reciprocal(divisor > 1.0 ? divisor : 1.0);
  }
#pragma unroll
  for (int j = 0; j < PIECES; j++) {
    const int i = thread + j * THREADS;
    if (i < FOLD * SIZE / 8) *reinterpret_cast<uint4*>(&fresh.token[0][0] + 8 * i) = pieces[j];
  }
  if (thread < DIM) scales[thread] = scale;
  const float spoilt = __syncthreads_or(changed) ? __uint_as_float(0x7fc00000u) : 0.0f;
  let_dependents_start();  // what follows reads the spread only, every FOLD steps

  // Step (2).
  const double share = shares[0], old_share = shares[1];
  const float n = float(tokens);
  const bool folds = count == FOLD;
#pragma unroll
  for (int j = 0; j < COMPONENTS; j++) {
    const int c = thread + j * THREADS;
    if (c >= SIZE) continue;
    double whole = sum[j];
#pragma unroll 1
    for (int from = 0; from < count; from += 4) {
#pragma unroll
      for (int t = from; t < from + 4; t++) {
        if (joined >> t & 1) whole += real(fresh.token[t][c]);
      }
    }
    fresh.base[c] = float(sum[j] * old_share);
    fresh.drift[c] = float(whole * share - sum[j] * old_share);
    const float mean = float(whole * share) + spoilt;
    if (c < DIM) {
      to.mean_keys[of_keys + c] = mean;
    } else {
      mean_v[c - DIM] = mean;
    }
    double* const later = c < DIM ? sums.keys + of_keys + c : sums.values + of_values + (c - DIM);
    if (folds) *later = spoilt == spoilt ? whole : double(spoilt);
  }

#pragma unroll 1
  for (int heads = 0; heads < token.group; heads += HEADS) {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {  // else all levels become float32 before the loop, and are spilled
#pragma unroll
      for (int i = 0; i < 4; i++) hold(levels[turn][i]);
    }
#pragma unroll
    for (int j = 0; j < QUERIES; j++) {
      const int i = thread + j * THREADS, g = i / (DIM / 8) - heads, d = i % (DIM / 8) * 8;
      if (g < 0 || g >= HEADS) continue;
      const u32 words[4] = {queries[j].x, queries[j].y, queries[j].z, queries[j].w};
#pragma unroll
      for (int w = 0; w < 4; w++) {
        steep[g][d + 2 * w] = real(Half{u16(words[w])}) * slope[j] * float(share);
        steep[g][d + 2 * w + 1] = real(Half{u16(words[w] >> 16)}) * slope[j] * float(share);
      }
    }
    __syncthreads();

    // Step (3). Token FOLD is the drift.
    if (thread / 32 * (32 / DOT_LANES) <= FOLD) {
      const int t = thread / DOT_LANES;
      const bool seen = t < FOLD && joined >> t & 1;
      const Half* const one = fresh.token[seen ? t : 0];
      const float *const mean = t < FOLD ? fresh.base : fresh.drift, factor = t < FOLD ? 0.0f : -n;
      Four dot = {};
#pragma unroll
      for (int d = thread % DOT_LANES * 4; d < DIM; d += 4 * DOT_LANES) {
        Four x = four(one + d);
        const Four y = four(mean + d);
#pragma unroll
        for (int c = 0; c < 4; c++) x.at[c] = seen ? x.at[c] - y.at[c] : factor * y.at[c];
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
          const Four query = four(steep[g] + d);
#pragma unroll
          for (int c = 0; c < 4; c++) dot.at[g] += query.at[c] * x.at[c];
        }
      }
#pragma unroll
      for (int step = DOT_LANES / 2; step > 0; step >>= 1) {
#pragma unroll
        for (int g = 0; g < HEADS; g++) dot.at[g] += __shfl_xor_sync(FULL_WARP, dot.at[g], step);
      }
      if (t <= FOLD && thread % DOT_LANES == 0) *reinterpret_cast<Four*>(dots[t]) = dot;
    }
    const int part = thread / LANES, columns = thread % LANES * 4;
    if (EVEN || part < PARTS) {
      Four along[HEADS] = {};
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        const int d = 4 * (part + PARTS * turn);
        if (!EVEN && d >= DIM) break;
        const Four factor = four(scales + d);
        Four y[HEADS];
#pragma unroll
        for (int g = 0; g < HEADS; g++) y[g] = four(steep[g] + d);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
          for (int c = 0; c < 4; c++) {
            const float x = float(i8(levels[turn][i] >> 8 * c)) * factor.at[i];
#pragma unroll
            for (int g = 0; g < HEADS; g++) along[g].at[c] += y[g].at[i] * x;
          }
        }
      }
#pragma unroll
      for (int g = 0; g < HEADS; g++) *reinterpret_cast<Four*>(partial[part][g] + columns) = along[g];
    }
    __syncthreads();

    // Step (4). A thread has two heads.
    for (int i = thread; i < HEADS / 2 * VALUE_DIM; i += THREADS) {
      const int g = i / VALUE_DIM * 2, column = i % VALUE_DIM;
      float rest[2] = {mean_v[column], mean_v[column]};
#pragma unroll 8
      for (int p = 0; p < PARTS; p++) {
        rest[0] += partial[p][g][column];
        rest[1] += partial[p][g + 1][column];
      }
      const float drift = fresh.drift[DIM + column];
      rest[0] += dots[FOLD][g] * drift;
      rest[1] += dots[FOLD][g + 1] * drift;
#pragma unroll 1
      for (int from = 0; from < count; from += 4) {
#pragma unroll
        for (int t = from; t < from + 4; t++) {
          const float x = joined >> t & 1 ? fresh.far(t, DIM + column) : 0.0f;
          rest[0] += dots[t][g] * x;
          rest[1] += dots[t][g + 1] * x;
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (heads + g + h < token.group) to.rest[(query + heads + g + h) * VALUE_DIM + column] = rest[h];
      }
    }
  }
  if (!folds) return;

  // Step (5).
  const i64 at = of_keys * VALUE_DIM;
  fold(sums.spread + at, fresh, joined, n, spoilt, sums.levels + at, sums.scales + of_keys);
  if (thread == 0 && row.summed) row.summed[blockIdx.x] = end;
}
