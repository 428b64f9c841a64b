// The hash functions for the tokens of a decode step, keys and queries together (docs/algorithm.md, eq. 1-5, 18, 19).
//
//     f(x) = x R + SiLU(x W1 + b1) W2 + b2                  `planes`, `transform`
//     f(x) = x R                                            `lsh`, `linear`
//     f(x) = h W2 + b2, h = SiLU(x W1 + b1)                 `paper`; with its residuals h + x, and f(x) + h
//     key     codes = signs of f; with digits, bit j is digit `power[j]` of the level of coordinate `coordinate[j]`
//     query   w = sum of f over the group; with digits, w_j = w[coordinate[j]] power[j]; planes = digits of w's levels
//             votes: planes = digits of how many f of the group are positive
//
// x [B][H][T][D] with strides and contiguous components; R [F][D][C], W1 [F][D][M], b1 [F][M], W2 [F][M][C], b2 [F][C];
// coordinate i64 and power f32 [Hkv][bits], limit f32 [Hkv][C]; codes [B][Hcode][T][words] with strides and contiguous
// words, written from token *at on (on the device, because the host may not know it); planes [B][Hout][T][P][join W], W
// words of 32 bits.
//
// hash_tokens, grid token blocks x (heads of keys + heads of queries), 512 threads. A block hashes `each` tokens with
// one head's functions. What a block waits for decides its time, so it waits for as much as it can at once:
//   (1) before its predecessor has ended, it has the weights brought to the L2 cache;
//   (2) it reads its tokens and the first rows of two matrices, then those of the third while it multiplies by the
//       second; of 128 x 128 float16 numbers, a thread's 8 x 4 are all of its rows;
//   (3) all its tokens go through a product, a sum over a group and a quantisation together. The last block of a group
//       writes its planes.
//
// Fused multiply-adds and sums are in the order written here.
//
// D, C, M and bits: at most MOST; C and M are multiples of 4, and matrices aligned to 16 bytes. Macros: functions.cuh.
#include "functions.cuh"
#include "planes.cuh"

struct Digits {
  const i64* coordinate;  // null: every number is a bit
  const float* power;
  const float* limit;
  i32 heads;  // Hkv
  i32 bits;
};

struct Codes {
  u32* words;
  i64 batch;  // strides in words
  i64 head;
  i64 token;
  const i64* at;  // null: 0
  i32 copies;     // heads that get the code of one block
  i32 join;       // blocks whose codes lie side by side in one head
};

struct Planes {
  u32* words;
  float* numbers;  // f of each query head, f32 [B][Hq][T][C]; unused if a group is one head
  u32* tickets;    // for each group of a token, 0 before and after a launch
  i32 group;
  i32 join;   // groups whose planes lie side by side
  i32 count;  // P
  i32 votes;
};

// Whether bit `power` of the level of x is set (eq. 19); the level of NaN is the lowest.
__device__ __forceinline__ bool digit_of(float x, float power, float limit) {
  float level = -limit;
  if (x == x) level = fminf(fmaxf(2.0f * floorf(x * 0.5f) + 1.0f, -limit), limit);
  return (int(level + limit) >> 1) / int(power) & 1;
}

// What a thread's bit is made of, and the limit of coordinate threadIdx.x: read while the weights are on their way.
struct Bit {
  int coordinate;
  float power;
  float limit;

  __device__ __forceinline__ Bit(const Digits& digits, int head, int out)
      : coordinate(threadIdx.x), power(0.0f), limit(0.0f) {
    if (!digits.coordinate) return;
    const int j = threadIdx.x;
    if (j < out) limit = digits.limit[i64(head) * out + j];
    if (j < digits.bits) coordinate = int(digits.coordinate[i64(head) * digits.bits + j]);
    if (j < digits.bits) power = digits.power[i64(head) * digits.bits + j];
  }
};

// Which tokens a block has: number t of it is `token(t)` of batch row `batch(t)`.
struct Tokens {
  int first;
  int count;
  int in_row;

  // Most rows have one token: then nothing is divided.
  __device__ __forceinline__ int batch(int t) const { return in_row == 1 ? first + t : (first + t) / in_row; }
  __device__ __forceinline__ int token(int t) const { return in_row == 1 ? 0 : (first + t) % in_row; }
};

// Write the codes of keys' numbers, as the block `block` of keys.
__device__ __forceinline__ void write_codes(const float (*sums)[MOST], const Codes& codes, const Digits& digits,
                                            const Bit& bit, const Tokens& tokens, int block) {
  __shared__ float limits[MOST];
  const int j = threadIdx.x;
  limits[j] = bit.limit;
  __syncthreads();
  if (j >= digits.bits) return;  // whole warps
  const i64 at = codes.at ? *codes.at : 0;
#pragma unroll 1
  for (int t = 0; t < tokens.count; t++) {
    const float x = sums[t][bit.coordinate];
    const bool set = digits.coordinate ? digit_of(x, bit.power, limits[bit.coordinate]) : x > 0.0f;
    const u32 word = __ballot_sync(FULL_WARP, set);
    if (j % 32) continue;
    for (int copy = 0; copy < codes.copies; copy++) {
      const int slot = block * codes.copies + copy, within = slot % codes.join * (digits.bits / 32) + j / 32;
      const i64 place = tokens.batch(t) * codes.batch + slot / codes.join * codes.head;
      codes.words[place + (at + tokens.token(t)) * codes.token + within] = word;
    }
  }
}

// Take a ticket: what this block wrote before the last barrier is visible to those who take one later, and what earlier
// takers wrote is visible to this block after the next barrier.
__device__ __forceinline__ u32 take_ticket(u32* ticket) {
#ifdef HOSTSIM
  return atomicAdd(ticket, 1u);
#else  // instead of two __threadfence() by every thread
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], %2;" : "=r"(before) : "l"(ticket), "r"(1u) : "memory");
  return before;
#endif
}

// Replace a head's numbers by those of its group, in one of the group's blocks for each token; return of which tokens
// this is the one, a bit each. place: the head's in the group.
__device__ __forceinline__ u32 sum_group(float (*sums)[MOST], const Planes& planes, int out, const Tokens& tokens,
                                         int group, int groups, int place) {
  __shared__ u32 mine;
  const int i = threadIdx.x;
  const auto row = [&](int t) { return (i64(tokens.batch(t)) * groups + group) * tokens.in_row + tokens.token(t); };
  const auto numbers = [&](int t, int g) {
    const i64 of_head = (i64(tokens.batch(t)) * groups + group) * planes.group + g;
    return planes.numbers + (of_head * tokens.in_row + tokens.token(t)) * out;
  };
  if (i == 0) mine = 0;
#pragma unroll 1
  for (int t = 0; t < tokens.count; t++)
    if (i < out) numbers(t, place)[i] = sums[t][i];
  __syncthreads();
  if (i < tokens.count) {
    u32* const ticket = planes.tickets + row(i);
    if (take_ticket(ticket) == u32(planes.group) - 1) {
      *ticket = 0;
      atomicAdd(&mine, 1u << i);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int j = i; j < tokens.count * out; j += ENCODE_THREADS) {
    int t = 0, column = j;
    while (column >= out) column -= out, t++;
    if (!(mine >> t & 1)) continue;
    float sum = 0.0f;
#pragma unroll 4
    for (int g = 0; g < planes.group; g++) {
      const float number = __ldcg(numbers(t, g) + column);
      sum += planes.votes ? float(number > 0.0f) : number;
    }
    sums[t][column] = sum;
  }
  __syncthreads();
  return mine;
}

// Write the planes of the groups' sums, or of their votes, for the tokens in `mine`.
__device__ __forceinline__ void write_planes(const Numbers& of, const Planes& planes, const Digits& digits,
                                             const Bit& bit, const Tokens& tokens, u32 mine, int group, int groups) {
  const int j = threadIdx.x, lane = j % 32, words = digits.bits / 32, row = planes.join * words;
  const auto to = [&](int t) {
    const i64 set = i64(tokens.batch(t)) * (groups / planes.join) + group / planes.join;
    return planes.words + (set * tokens.in_row + tokens.token(t)) * planes.count * row + group % planes.join * words;
  };
  if (planes.votes) {
    if (j >= digits.bits) return;  // whole warps
#pragma unroll 1
    for (int t = 0; t < tokens.count; t++) {
      if (!(mine >> t & 1)) continue;
      const int set = planes.group == 1 ? of.sums[t][j] > 0.0f : int(of.sums[t][j]);
      for (int p = 0; p < planes.count; p++) {
        const u32 word = __ballot_sync(FULL_WARP, has_vote(set, planes.group, planes.count, p));
        if (lane == p) to(t)[p * row + j / 32] = word;
      }
    }
    return;
  }
  float(*const weights)[MOST] = of.given;  // no longer needed
#pragma unroll 1
  for (int t = 0; t < tokens.count; t++)
    if (j < digits.bits) weights[t][j] = digits.coordinate ? of.sums[t][bit.coordinate] * bit.power : of.sums[t][j];
  __syncthreads();
#pragma unroll 1
  for (int i = j / 32; i < tokens.count * words; i += ENCODE_THREADS / 32) {  // a warp, a word of each plane
    const int t = i / words, word = i % words;
    if (!(mine >> t & 1)) continue;
    const float scale = row_scale(weights[t], digits.bits, lane, float((1 << planes.count) - 1));
    quantise_word(weights[t] + 32 * word, scale, planes.count, lane, to(t) + word, row);
  }
}

// Field by field: choosing a structure would put both into local memory.
__device__ __forceinline__ Functions choose(bool first, const Functions& a, const Functions& b) {
  return {first ? a.r : b.r,         first ? a.w1 : b.w1,         first ? a.b1 : b.b1,   first ? a.w2 : b.w2,
          first ? a.b2 : b.b2,       first ? a.heads : b.heads,   first ? a.dim : b.dim, first ? a.hidden : b.hidden,
          first ? a.out : b.out,     first ? a.residual : b.residual};
}

constexpr int LINE = 128;  // bytes that are brought at once

// Have the line at an address brought to the L2 cache, which all SMs share: allowed before wait_for_predecessor, because
// later writes go there, too.
__device__ __forceinline__ void prefetch(const void* at) {
#ifndef HOSTSIM
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// Have part `which` of an array, `count` numbers, brought there.
template <class T>
__device__ __forceinline__ void read_ahead(const T* all, int which, int count) {
  const char* const from = reinterpret_cast<const char*>(all + i64(which) * count);
#pragma unroll 1
  for (int i = LINE * threadIdx.x; all && i < count * int(sizeof(T)); i += LINE * ENCODE_THREADS) prefetch(from + i);
}

// Blocks of keys come first in the grid; a side without heads has none. Block n of a side of N, the larger number of
// heads of x and of functions, has heads n H / N and n F / N of them.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS, 1)  // 128 registers
    hash_tokens(const Half* __restrict__ k, Rows key_rows, i32 key_heads, Codes codes, Functions of_keys,
                const Half* __restrict__ q, Rows query_rows, i32 query_heads, Planes planes, Functions of_queries,
                Digits digits, i32 tokens, i32 all, i32 each) {
  __shared__ float given[MOST_TOKENS][MOST], hidden[MOST_TOKENS][MOST], sums[MOST_TOKENS][MOST];
  __shared__ __align__(16) float partial[AT_ONCE][ENCODE_THREADS * FOUR];
  const Numbers of = {given, hidden, sums, partial};
  const int key_blocks = key_heads > of_keys.heads ? key_heads : of_keys.heads;
  const bool is_key = int(blockIdx.y) < key_blocks;
  const Functions f = choose(is_key, of_keys, of_queries);
  const int block = is_key ? blockIdx.y : blockIdx.y - key_blocks, heads = is_key ? key_heads : query_heads;
  const int blocks = heads > f.heads ? heads : f.heads, head = block * f.heads / blocks;
  const int first = blockIdx.x * each;
  const Tokens own = {first, all - first < each ? all - first : each, tokens};
  const Half* const from = (is_key ? k + block * heads / blocks * key_rows.head
                                   : q + block * heads / blocks * query_rows.head);
  const i64 of_batch = is_key ? key_rows.batch : query_rows.batch;
  const i64 of_token = is_key ? key_rows.token : query_rows.token;
  const int groups = is_key ? 1 : heads / planes.group, group = is_key ? 0 : block / planes.group;
  const int in_group = is_key ? 0 : block % planes.group;
  const Matrix linear(f.r, head, f.dim, f.out), in(f.w1, head, f.dim, f.w1 ? f.hidden : f.out);
  const Matrix out(f.w2, head, f.hidden, f.out);
  const int of_digits = is_key ? block : group * digits.heads / groups;
  read_ahead(f.r, head, f.dim * f.out);
  read_ahead(f.w1, head, f.dim * f.hidden);
  read_ahead(f.w2, head, f.hidden * f.out);
  read_ahead(f.b1, head, f.hidden);
  read_ahead(f.b2, head, f.out);
  read_ahead(digits.coordinate, of_digits, digits.bits);
  read_ahead(digits.power, of_digits, digits.bits);
  read_ahead(digits.limit, of_digits, f.out);

  wait_for_predecessor();  // nothing above reads memory
  let_dependents_start();  // they wait, too: for the end of this kernel
  const Bit bit(digits, of_digits, f.out);
  const auto x = [&](int t) { return from + own.batch(t) * of_batch + own.token(t) * of_token; };
  if (each == 1) {
    functions_of<1>(x, own.count, f, head, linear, in, out, of);
  } else {
    functions_of<MOST_TOKENS>(x, own.count, f, head, linear, in, out, of);
  }
  if (is_key) return write_codes(sums, codes, digits, bit, own, block);
  const u32 last = planes.group > 1 ? sum_group(sums, planes, f.out, own, group, groups, in_group) : ~0u;
  write_planes(of, planes, digits, bit, own, last, group, groups);
}
