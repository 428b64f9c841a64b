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
// one head's functions. All weights of its first two matrices are on their way before the first number is needed, and
// those of the third before the second is used: with 128 x 128 numbers a thread has 8 x 4 of each. The last block of a
// group weighs its sum.
//
// Every operation is one that IEEE 754 defines, with fused multiply-adds and sums in the order written here, so that
// the tests' reference gets the same bits.
//
// SPARSE_BF16: dtype of x. SPARSE_NARROW: 1 if R, W1 and W2 are float16, 0 if float32. D, C, M and bits: at most MOST;
// C and M are multiples of 4, and matrices aligned to 16 bytes.
#include "mma.cuh"
#include "planes.cuh"

constexpr int ENCODE_THREADS = 512, MOST = 512, FOUR = 4;  // columns of a thread
constexpr int AHEAD = SPARSE_NARROW ? 8 : 6;  // reads in flight for each matrix, as registers allow
constexpr int MOST_TOKENS = 4;   // of a block

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

struct Rows {
  i64 batch;  // strides in elements
  i64 head;
  i64 token;
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

// Four weights as they are read: converted only when they are used, so that no load is waited for before.
#if SPARSE_NARROW
struct Raw {
  uint2 words;
  __device__ __forceinline__ void read(const Weight* from) { words = *reinterpret_cast<const uint2*>(from); }
  __device__ __forceinline__ void to(float (&out)[FOUR]) const {
#ifdef HOSTSIM
    for (int i = 0; i < FOUR; i++) out[i] = real(Float16{u16((i / 2 ? words.y : words.x) >> 16 * (i % 2))});
#else  // real() takes six instructions
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(out[0]), "=f"(out[1])
        : "r"(words.x));
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(out[2]), "=f"(out[3])
        : "r"(words.y));
#endif
  }
};
#else
struct Raw {
  uint4 words;
  __device__ __forceinline__ void read(const Weight* from) { words = *reinterpret_cast<const uint4*>(from); }
  __device__ __forceinline__ void to(float (&out)[FOUR]) const {
    out[0] = __uint_as_float(words.x), out[1] = __uint_as_float(words.y);
    out[2] = __uint_as_float(words.z), out[3] = __uint_as_float(words.w);
  }
};
#endif

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

// A matrix [rows][columns]: a thread has four columns of every parts-th row.
struct Matrix {
  const Weight* from;  // of this thread
  int left;            // its rows
  int columns, parts, part;

  __device__ __forceinline__ Matrix(const Weight* all, int head, int rows, int columns)
      : columns(columns), parts(ENCODE_THREADS * FOUR / columns), part(threadIdx.x / (columns / FOUR)) {
    left = all && part < parts ? (rows - part + parts - 1) / parts : 0;
    from = all + (i64(head) * rows + part) * columns + threadIdx.x % (columns / FOUR) * FOUR;
  }

  // Read this thread's next rows, from its `first` on. No load waits for another.
  __device__ __forceinline__ void read(int first, Raw (&to)[AHEAD]) const {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      to[i] = {};
      if (first + i < left) to[i].read(from + (first + i) * parts * columns);
    }
  }

  // Add the products of what was read and x[0..rows).
  __device__ __forceinline__ void add(int first, const Raw (&numbers)[AHEAD], const float* x,
                                      float (&sums)[FOUR]) const {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (first + i >= left) continue;
      float of[FOUR];
      numbers[i].to(of);
      const float factor = x[part + (first + i) * parts];
#pragma unroll
      for (int c = 0; c < FOUR; c++) sums[c] = fmaf(factor, of[c], sums[c]);
    }
  }
};
static_assert(ENCODE_THREADS * FOUR >= MOST);  // a thread has at most four columns

// Add x[t][0..rows) times a matrix, whose first rows have been read, to sums[t]. The threads' sums are added in a fixed
// order.
__device__ __forceinline__ void add_product(const float (*x)[MOST], const Matrix& of, const Raw (&ahead)[AHEAD],
                                            int tokens, float (*sums)[MOST]) {
  __shared__ __align__(16) float partial[ENCODE_THREADS * FOUR];
#pragma unroll 1
  for (int t = 0; t < tokens; t++) {
    float mine[FOUR] = {0.0f, 0.0f, 0.0f, 0.0f};
    of.add(0, ahead, x[t], mine);
#pragma unroll 1
    for (int first = AHEAD; first < of.left; first += AHEAD) {
      Raw more[AHEAD];
      of.read(first, more);
      of.add(first, more, x[t], mine);
    }
    *reinterpret_cast<float4*>(partial + FOUR * threadIdx.x) = {mine[0], mine[1], mine[2], mine[3]};
    __syncthreads();
    if (int(threadIdx.x) < of.columns) {
      float sum = sums[t][threadIdx.x];
#pragma unroll 4
      for (int p = 0; p < of.parts; p++) sum += partial[p * of.columns + threadIdx.x];
      sums[t][threadIdx.x] = sum;
    }
    __syncthreads();
  }
}

// Compute f of a head for `tokens` tokens into shared memory `sums`; x(t): the address of token t.
template <class At>
__device__ __forceinline__ void functions_of(const At& x, int tokens, const Functions& f, int head,
                                             float (*sums)[MOST]) {
  __shared__ float given[MOST_TOKENS][MOST], hidden[MOST_TOKENS][MOST];
  const int i = threadIdx.x;
  const Matrix linear(f.r, head, f.dim, f.out), in(f.w1, head, f.dim, f.w1 ? f.hidden : f.out);
  const Matrix out(f.w2, head, f.hidden, f.out);
  Raw first[AHEAD], second[AHEAD];
  linear.read(0, first);
  in.read(0, second);
#pragma unroll 1
  for (int t = 0; t < tokens; t++) {
    if (i < f.dim) given[t][i] = real(x(t)[i]);
    if (i < f.out) sums[t][i] = f.b2 ? f.b2[i64(head) * f.out + i] : 0.0f;
    if (i < f.hidden) hidden[t][i] = f.b1[i64(head) * f.hidden + i];
  }
  __syncthreads();
  if (f.r) add_product(given, linear, first, tokens, sums);
  if (!f.w1) return;
  out.read(0, first);
  add_product(given, in, second, tokens, hidden);
#pragma unroll 1
  for (int t = 0; t < tokens; t++) {
    if (i >= f.hidden) continue;
    const float h = hidden[t][i] / (1.0f + exp_of(-hidden[t][i]));
    hidden[t][i] = f.residual && f.hidden == f.dim ? h + given[t][i] : h;
  }
  __syncthreads();
  add_product(hidden, out, first, tokens, sums);
  if (f.residual && f.out == f.hidden) {
#pragma unroll 1
    for (int t = 0; t < tokens; t++)
      if (i < f.out) sums[t][i] += hidden[t][i];
    __syncthreads();
  }
}

// Whether bit `power` of the level of x is set (eq. 19); the level of NaN is the lowest.
__device__ __forceinline__ bool digit_of(float x, float power, float limit) {
  float level = -limit;
  if (x == x) level = fminf(fmaxf(2.0f * floorf(x * 0.5f) + 1.0f, -limit), limit);
  return (int(level + limit) >> 1) / int(power) & 1;
}

// What a thread's bit is made of: read while the weights are on their way.
struct Bit {
  int coordinate;
  float power;
  float limit;

  __device__ __forceinline__ Bit(const Digits& digits, int head, int out)
      : coordinate(threadIdx.x), power(0.0f), limit(0.0f) {
    const i64 at = i64(head) * digits.bits + threadIdx.x;
    if (!digits.coordinate || int(threadIdx.x) >= digits.bits) return;
    coordinate = int(digits.coordinate[at]), power = digits.power[at];
    limit = digits.limit[i64(head) * out + coordinate];
  }
};

// Write the code of a key's numbers, as the block `block` of a token of keys.
__device__ __forceinline__ void write_code(const float* sums, const Codes& codes, const Digits& digits, const Bit& bit,
                                           int batch, int block, int token) {
  const int j = threadIdx.x;
  if (j >= digits.bits) return;  // whole warps
  const float x = sums[bit.coordinate];
  const bool set = digits.coordinate ? digit_of(x, bit.power, bit.limit) : x > 0.0f;
  const u32 word = __ballot_sync(FULL_WARP, set);
  if (j % 32) return;
  for (int copy = 0; copy < codes.copies; copy++) {
    const int slot = block * codes.copies + copy, within = slot % codes.join * (digits.bits / 32) + j / 32;
    const i64 place = (codes.at ? *codes.at : 0) + token;
    codes.words[batch * codes.batch + slot / codes.join * codes.head + place * codes.token + within] = word;
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
__device__ __forceinline__ void write_planes(float* sums, const Planes& planes, const Digits& digits, const Bit& bit,
                                             i64 row, int place) {
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
  if (j < digits.bits) weights[j] = digits.coordinate ? sums[bit.coordinate] * bit.power : sums[j];
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
extern "C" __global__ void __launch_bounds__(ENCODE_THREADS, 1)  // 128 registers
    hash_tokens(const Half* __restrict__ k, Rows key_rows, i32 key_heads, Codes codes, Functions of_keys,
                const Half* __restrict__ q, Rows query_rows, i32 query_heads, Planes planes, Functions of_queries,
                Digits digits, i32 tokens, i32 all, i32 each) {
  __shared__ float sums[MOST_TOKENS][MOST];
  wait_for_predecessor();
  const int key_blocks = key_heads > of_keys.heads ? key_heads : of_keys.heads;
  const bool is_key = int(blockIdx.y) < key_blocks;
  const Functions f = choose(is_key, of_keys, of_queries);
  const int block = is_key ? blockIdx.y : blockIdx.y - key_blocks, heads = is_key ? key_heads : query_heads;
  const int blocks = heads > f.heads ? heads : f.heads;
  const int first = blockIdx.x * each, count = all - first < each ? all - first : each;
  const Half* const from = (is_key ? k + block * heads / blocks * key_rows.head
                                   : q + block * heads / blocks * query_rows.head);
  const i64 of_batch = is_key ? key_rows.batch : query_rows.batch;
  const i64 of_token = is_key ? key_rows.token : query_rows.token;
  const int groups = is_key ? 1 : heads / planes.group, group = is_key ? 0 : block / planes.group;
  const Bit bit(digits, is_key ? block : group * digits.heads / groups, f.out);
  const auto at = [&](int t) { return from + (first + t) / tokens * of_batch + (first + t) % tokens * of_token; };
  functions_of(at, count, f, block * f.heads / blocks, sums);
  let_dependents_start();
#pragma unroll 1
  for (int t = 0; t < count; t++) {
    const int batch = (first + t) / tokens, token = (first + t) % tokens;
    if (is_key) {
      write_code(sums[t], codes, digits, bit, batch, block, token);
      continue;
    }
    if (planes.group > 1 && !sum_group(sums[t], planes, f.out, tokens, batch, block, heads, token)) continue;
    const i64 to = (i64(batch) * (groups / planes.join) + group / planes.join) * tokens + token;
    write_planes(sums[t], planes, digits, bit, to, group % planes.join);
    __syncthreads();  // its memory was read
  }
}
