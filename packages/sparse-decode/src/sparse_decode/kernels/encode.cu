// The hash functions `planes` and `transform` for the tokens of a decode step (docs/algorithm.md, eq. 1, 5, 18, 19).
//
//     f(x) = x R + SiLU(x W1 + b1) W2 + b2
//     key     codes = signs of f; with digits, bit j is digit `power[j]` of the level of coordinate `coordinate[j]`
//     query   w = sum of f over the group; with digits, w_j = w[coordinate[j]] power[j]; planes = digits of w's levels
//
// x [B][H][T][D] contiguous; R [H][D][C], W1 [H][D][M], b1 [H][M], W2 [H][M][C], b2 [H][C], float32; coordinate i64 and
// power f32 [Hkv][bits], limit f32 [Hkv][C]; codes [B][H][T][W] with strides and contiguous words, written from token
// *at on (on the device, because the host may not know it); planes [B][Hout][T][P][W], W words of 32 bits.
//
// hash_keys, grid B T x H, 256 threads: a block hashes one token with one head's functions and reads each weight once.
// apply, same grid: computes f, f32 [B][H][T][C].  weigh, grid B T x Hout: sums f over the group, weights and planes.
//
// SPARSE_BF16: dtype of x. D, C, M and bits are at most MOST.
#include "mma.cuh"
#include "planes.cuh"

constexpr int ENCODE_THREADS = 256, MOST = 512;

struct Functions {
  const float* r;
  const float* w1;
  const float* b1;
  const float* w2;
  const float* b2;
  i32 dim;     // D
  i32 hidden;  // M
  i32 out;     // C
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
};

// Add x[0..rows) times a matrix [rows][columns] to `sums`; all but the matrix are in shared memory. If there are more
// threads than columns, the rows are split among threads, and the partial sums are added in a fixed order.
__device__ __forceinline__ void add_product(const float* x, const float* matrix, int rows, int columns, float* sums,
                                            float* partial) {
  const int parts = columns < ENCODE_THREADS ? ENCODE_THREADS / columns : 1;
  const int part = threadIdx.x / columns, first = columns < ENCODE_THREADS ? threadIdx.x % columns : threadIdx.x;
  for (int column = first; column < columns && part < parts; column += ENCODE_THREADS) {
    float sum = 0.0f;
#pragma unroll 8
    for (int row = part; row < rows; row += parts) sum += x[row] * matrix[i64(row) * columns + column];
    if (parts == 1) sums[column] += sum;
    else partial[threadIdx.x] = sum;
  }
  __syncthreads();
  if (parts > 1) {
    for (int column = threadIdx.x; column < columns; column += ENCODE_THREADS) {
      float sum = sums[column];
      for (int p = 0; p < parts; p++) sum += partial[p * columns + column];
      sums[column] = sum;
    }
    __syncthreads();
  }
}

// Compute f of one token and head into shared memory `sums`.
__device__ __forceinline__ void functions_of(const Half* x, const Functions& f, int head, float* sums) {
  __shared__ float given[MOST], hidden[MOST], partial[ENCODE_THREADS];
  for (int d = threadIdx.x; d < f.dim; d += ENCODE_THREADS) given[d] = real(x[d]);
  for (int m = threadIdx.x; m < f.hidden; m += ENCODE_THREADS) hidden[m] = f.b1[i64(head) * f.hidden + m];
  for (int c = threadIdx.x; c < f.out; c += ENCODE_THREADS) sums[c] = f.b2[i64(head) * f.out + c];
  __syncthreads();
  add_product(given, f.w1 + i64(head) * f.dim * f.hidden, f.dim, f.hidden, hidden, partial);
  for (int m = threadIdx.x; m < f.hidden; m += ENCODE_THREADS) hidden[m] = hidden[m] / (1.0f + expf(-hidden[m]));
  __syncthreads();
  add_product(given, f.r + i64(head) * f.dim * f.out, f.dim, f.out, sums, partial);
  add_product(hidden, f.w2 + i64(head) * f.hidden * f.out, f.hidden, f.out, sums, partial);
}

// Whether bit `power` of the level of x is set (eq. 19); the level of NaN is the lowest.
__device__ __forceinline__ bool digit_of(float x, float power, float limit) {
  float level = -limit;
  if (x == x) level = fminf(fmaxf(2.0f * floorf(x * 0.5f) + 1.0f, -limit), limit);
  return (int(level + limit) >> 1) / int(power) & 1;
}

extern "C" __global__ void __launch_bounds__(ENCODE_THREADS)
    hash_keys(const Half* __restrict__ x, Codes codes, Functions f, Digits digits, i32 tokens) {
  __shared__ float sums[MOST];
  const int head = blockIdx.y, batch = blockIdx.x / tokens, token = blockIdx.x % tokens;
  const i64 row = (i64(batch) * gridDim.y + head) * tokens + token;
  functions_of(x + row * f.dim, f, head, sums);
  for (int j = threadIdx.x; j < digits.bits; j += ENCODE_THREADS) {  // whole warps
    bool set;
    if (digits.coordinate) {
      const i64 at = i64(head) * digits.bits + j, c = digits.coordinate[at];
      set = digit_of(sums[c], digits.power[at], digits.limit[i64(head) * f.out + c]);
    } else {
      set = sums[j] > 0.0f;
    }
    const u32 word = __ballot_sync(FULL_WARP, set);
    if (j % 32 == 0) {
      const i64 place = (codes.at ? *codes.at : 0) + token;
      codes.words[batch * codes.batch + head * codes.head + place * codes.token + j / 32] = word;
    }
  }
}

extern "C" __global__ void __launch_bounds__(ENCODE_THREADS)
    apply(const Half* __restrict__ x, float* __restrict__ numbers, Functions f, i32 tokens) {
  __shared__ float sums[MOST];
  const int head = blockIdx.y, batch = blockIdx.x / tokens, token = blockIdx.x % tokens;
  const i64 row = (i64(batch) * gridDim.y + head) * tokens + token;
  functions_of(x + row * f.dim, f, head, sums);
  let_dependents_start();
  for (int c = threadIdx.x; c < f.out; c += ENCODE_THREADS) numbers[row * f.out + c] = sums[c];
}

extern "C" __global__ void __launch_bounds__(ENCODE_THREADS)
    weigh(const float* __restrict__ numbers, u32* __restrict__ planes, Digits digits, i32 out, i32 group, i32 tokens,
          i32 count) {
  __shared__ float sums[MOST], weights[MOST];
  wait_for_predecessor();
  const int head = blockIdx.y, heads = gridDim.y, batch = blockIdx.x / tokens, token = blockIdx.x % tokens;
  const i64 first = (i64(batch) * heads + head) * group;
  for (int c = threadIdx.x; c < out; c += ENCODE_THREADS) {
    float sum = 0.0f;
    for (int g = 0; g < group; g++) sum += numbers[((first + g) * tokens + token) * out + c];
    sums[c] = sum;
  }
  __syncthreads();
  for (int j = threadIdx.x; j < digits.bits; j += ENCODE_THREADS) {
    const i64 at = i64(head) * digits.heads / heads * digits.bits + j;  // the KV head, if codes are per query head
    weights[j] = digits.coordinate ? sums[digits.coordinate[at]] * digits.power[at] : sums[j];
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const i64 row = (i64(batch) * heads + head) * tokens + token;
    const int words = digits.bits / 32;
    quantise_row(weights, planes + row * count * words, words, count, threadIdx.x);
  }
}
