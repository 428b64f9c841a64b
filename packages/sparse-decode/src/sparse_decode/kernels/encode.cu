// The hash functions for the tokens of a decode step, keys and queries together (docs/algorithm.md, eq. 1-5, 18, 19).
//
//     f(x) = x R + SiLU(x W1 + b1) W2 + b2                  `planes`, `transform`
//     f(x) = x R                                            `lsh`, `linear`
//     f(x) = h W2 + b2, h = SiLU(x W1 + b1)                 `paper`; with its residuals h + x, and f(x) + h
//     key     codes = signs of f; with digits, bit j is digit `power[j]` of the level of coordinate `coordinate[j]`
//     query   w = sum of f over the group; with digits, w_j = w[coordinate[j]] power[j]; planes = digits of w's levels
//             votes: planes = digits of how many f of the group are positive
//
// x [B][H][T][D] contiguous; R [F][D][C], W1 [F][D][M], b1 [F][M], W2 [F][M][C], b2 [F][C]; coordinate i64 and power
// f32 [Hkv][bits], limit f32 [Hkv][C]; codes [B][Hcode][T][words] with strides and contiguous words, written from token
// *at on (on the device, because the host may not know it), and on request also their first words, [B][Hcode][T] with
// contiguous tokens; planes [B][Hout][T][P][join W], W words of 32 bits.
//
// hash_tokens, grid B T x (blocks of keys + blocks of queries), 1024 threads. A block hashes one token with one head's
// functions and reads each weight once: 64 bytes in flight for each thread. The last block of a group weighs its sum.
//
// Every operation is one that IEEE 754 defines, with fused multiply-adds and sums in the order written here, so that
// the tests' reference gets the same bits.
//
// SPARSE_BF16: dtype of x. SPARSE_NARROW: 1 if R, W1 and W2 are float16, 0 if float32. D, C, M and bits: at most MOST.
#include "mma.cuh"
#include "planes.cuh"

constexpr int ENCODE_THREADS = 1024, MOST = 512, UNROLL = 16;

#if SPARSE_NARROW
using Weight = Float16;
#else
using Weight = float;
#endif

struct Functions {
  const Weight* r;   // null: no linear part
  const Weight* w1;  // null: no hidden layer
  const float* b1;
  const Weight* w2;
  const float* b2;  // null: 0
  i32 heads;        // F
  i32 dim;          // D
  i32 hidden;       // M
  i32 out;          // C
  i32 residual;     // add x to h if M is D, and h to f if C is M
};

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
  u32* first;     // null: not wanted
  i64 first_batch;
  i64 first_head;
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

__device__ __forceinline__ float weight(float x) { return x; }
__device__ __forceinline__ float weight(Float16 x) {
#ifdef HOSTSIM
  return real(x);
#else
  float out;  // real() takes six instructions
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
#endif
}

// exp to about one unit in the last place (the polynomial is that of Cephes' expf); infinite above 88.
__device__ __forceinline__ float exp_of(float x) {
  const float inside = fminf(fmaxf(x, -87.0f), 88.0f), n = rintf(inside * 1.44269504f);
  const float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, inside));
  float sum = 1.9875691500e-4f;
  sum = fmaf(sum, r, 1.3981999507e-3f);
  sum = fmaf(sum, r, 8.3334519073e-3f);
  sum = fmaf(sum, r, 4.1665795894e-2f);
  sum = fmaf(sum, r, 1.6666665459e-1f);
  sum = fmaf(sum, r, 5.0000001201e-1f);
  const float found = (fmaf(sum, r * r, r) + 1.0f) * __uint_as_float(u32(int(n) + 127) << 23);
  return x > 88.0f ? __uint_as_float(0x7f800000u) : found;
}

// Add x[0..rows) times a matrix [rows][columns] to `sums`; all but the matrix are in shared memory. If there are more
// threads than columns, the rows are split among threads, and the partial sums are added in a fixed order.
__device__ __forceinline__ void add_product(const float* x, const Weight* matrix, int rows, int columns, float* sums,
                                            float* partial) {
  const int parts = ENCODE_THREADS / columns;  // at least 2
  const int part = threadIdx.x / columns, column = threadIdx.x % columns;
  if (part < parts) {
    float sum = 0.0f;
#pragma unroll UNROLL
    for (int row = part; row < rows; row += parts) sum = fmaf(x[row], weight(matrix[row * columns + column]), sum);
    partial[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x < columns) {
    float sum = sums[column];
    for (int p = 0; p < parts; p++) sum += partial[p * columns + column];
    sums[column] = sum;
  }
  __syncthreads();
}
static_assert(ENCODE_THREADS >= 2 * MOST);  // a thread has at most one column

// Compute f of one token and head into shared memory `sums`.
__device__ __forceinline__ void functions_of(const Half* x, const Functions& f, int head, float* sums) {
  __shared__ float given[MOST], hidden[MOST], partial[ENCODE_THREADS];
  const int i = threadIdx.x;
  if (i < f.dim) given[i] = real(x[i]);
  if (i < f.out) sums[i] = f.b2 ? f.b2[i64(head) * f.out + i] : 0.0f;
  if (i < f.hidden) hidden[i] = f.b1[i64(head) * f.hidden + i];
  __syncthreads();
  if (f.r) add_product(given, f.r + i64(head) * f.dim * f.out, f.dim, f.out, sums, partial);
  if (!f.w1) return;
  add_product(given, f.w1 + i64(head) * f.dim * f.hidden, f.dim, f.hidden, hidden, partial);
  if (i < f.hidden) {
    const float h = hidden[i] / (1.0f + exp_of(-hidden[i]));
    hidden[i] = f.residual && f.hidden == f.dim ? h + given[i] : h;
  }
  __syncthreads();
  add_product(hidden, f.w2 + i64(head) * f.hidden * f.out, f.hidden, f.out, sums, partial);
  if (f.residual && f.out == f.hidden) {
    if (i < f.out) sums[i] += hidden[i];
    __syncthreads();
  }
}

// Whether bit `power` of the level of x is set (eq. 19); the level of NaN is the lowest.
__device__ __forceinline__ bool digit_of(float x, float power, float limit) {
  float level = -limit;
  if (x == x) level = fminf(fmaxf(2.0f * floorf(x * 0.5f) + 1.0f, -limit), limit);
  return (int(level + limit) >> 1) / int(power) & 1;
}

// Write the code of a key's numbers, as the block `block` of a token of keys.
__device__ __forceinline__ void write_code(const float* sums, const Codes& codes, const Digits& digits, int out,
                                           int batch, int block, int token) {
  const int j = threadIdx.x;
  if (j >= digits.bits) return;  // whole warps
  bool set;
  if (digits.coordinate) {
    const i64 at = i64(block) * digits.bits + j, c = digits.coordinate[at];
    set = digit_of(sums[c], digits.power[at], digits.limit[i64(block) * out + c]);
  } else {
    set = sums[j] > 0.0f;
  }
  const u32 word = __ballot_sync(FULL_WARP, set);
  if (j % 32) return;
  for (int copy = 0; copy < codes.copies; copy++) {
    const int slot = block * codes.copies + copy, within = slot % codes.join * (digits.bits / 32) + j / 32;
    const i64 place = (codes.at ? *codes.at : 0) + token;
    codes.words[batch * codes.batch + slot / codes.join * codes.head + place * codes.token + within] = word;
    if (codes.first && within == 0) codes.first[batch * codes.first_batch + slot / codes.join * codes.first_head + place] = word;
  }
}

// Replace a head's numbers by those of its group, in one of the group's blocks; return whether this is the one.
__device__ __forceinline__ bool sum_group(float* sums, const Planes& planes, int out, int tokens, int batch, int head,
                                          int heads, int token) {
  __shared__ bool last;
  const int group = head / planes.group, i = threadIdx.x;
  const i64 first = (i64(batch) * heads + group * planes.group) * tokens + token;
  if (i < out) planes.numbers[(first + i64(head % planes.group) * tokens) * out + i] = sums[i];
  __threadfence();
  __syncthreads();
  if (i == 0) {
    u32* ticket = planes.tickets + (i64(batch) * (heads / planes.group) + group) * tokens + token;
    last = atomicAdd(ticket, 1u) == u32(planes.group) - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  if (!last) return false;
  __threadfence();
  if (i < out) {
    float sum = 0.0f;
    for (int g = 0; g < planes.group; g++) {
      const float number = __ldcg(planes.numbers + (first + i64(g) * tokens) * out + i);
      sum += planes.votes ? float(number > 0.0f) : number;
    }
    sums[i] = sum;
  }
  __syncthreads();
  return true;
}

// Write the planes of a group's sums, or of its votes.
__device__ __forceinline__ void write_planes(float* sums, const Planes& planes, const Digits& digits, i64 row,
                                             int place, int kv_head) {
  __shared__ float weights[MOST];
  const int j = threadIdx.x, words = digits.bits / 32;
  u32* to = planes.words + row * planes.count * planes.join * words + place * words;
  if (planes.votes) {
    if (j >= digits.bits) return;  // whole warps
    const int set = planes.group == 1 ? sums[j] > 0.0f : int(sums[j]);
    for (int p = 0; p < planes.count; p++) {
      const u32 word = __ballot_sync(FULL_WARP, has_vote(set, planes.group, planes.count, p));
      if (j % 32 == p) to[p * planes.join * words + j / 32] = word;
    }
    return;
  }
  if (j < digits.bits) {
    const i64 at = i64(kv_head) * digits.bits + j;
    weights[j] = digits.coordinate ? sums[digits.coordinate[at]] * digits.power[at] : sums[j];
  }
  __syncthreads();
  if (j < 32) quantise_row(weights, to, words, planes.count, j);
}

// Field by field: choosing a structure would put both into local memory.
__device__ __forceinline__ Functions choose(bool first, const Functions& a, const Functions& b) {
  return {first ? a.r : b.r,         first ? a.w1 : b.w1,         first ? a.b1 : b.b1,   first ? a.w2 : b.w2,
          first ? a.b2 : b.b2,       first ? a.heads : b.heads,   first ? a.dim : b.dim, first ? a.hidden : b.hidden,
          first ? a.out : b.out,     first ? a.residual : b.residual};
}

// Blocks of keys come first in the grid; a side without heads has none. Block n of a side of N, the larger number of
// heads of x and of functions, has heads n H / N and n F / N of them.
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS, 1)  // 64 registers
    hash_tokens(const Half* __restrict__ k, i32 key_heads, Codes codes, Functions of_keys, const Half* __restrict__ q,
                i32 query_heads, Planes planes, Functions of_queries, Digits digits, i32 tokens) {
  __shared__ float sums[MOST];
  const int batch = blockIdx.x / tokens, token = blockIdx.x % tokens;
  const int key_blocks = key_heads > of_keys.heads ? key_heads : of_keys.heads;
  const bool is_key = int(blockIdx.y) < key_blocks;
  const Functions f = choose(is_key, of_keys, of_queries);
  const int block = is_key ? blockIdx.y : blockIdx.y - key_blocks, heads = is_key ? key_heads : query_heads;
  const int blocks = heads > f.heads ? heads : f.heads;
  const i64 row = (i64(batch) * heads + block * heads / blocks) * tokens + token;
  functions_of((is_key ? k : q) + row * f.dim, f, block * f.heads / blocks, sums);
  if (is_key) return write_code(sums, codes, digits, f.out, batch, block, token);
  if (planes.group > 1 && !sum_group(sums, planes, f.out, tokens, batch, block, heads, token)) return;
  const int groups = heads / planes.group, group = block / planes.group;
  const i64 to = (i64(batch) * (groups / planes.join) + group / planes.join) * tokens + token;
  write_planes(sums, planes, digits, to, group % planes.join, group * digits.heads / groups);
}
