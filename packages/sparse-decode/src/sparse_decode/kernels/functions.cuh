// The products of encode.cu: f of one head for a few tokens, in shared memory.
//
// SPARSE_BF16: dtype of x. SPARSE_NARROW: 1 if R, W1 and W2 are float16, 0 if float32.
#pragma once
#include "mma.cuh"

constexpr int ENCODE_THREADS = 512, FOUR = 4;  // columns of a thread
constexpr int MOST = 512;        // components of x, of the hidden layer and of f
constexpr int AHEAD = SPARSE_NARROW ? 8 : 4;  // reads in flight for each matrix, as registers allow
constexpr int MOST_TOKENS = 4;   // of a block
constexpr int AT_ONCE = 2;       // tokens whose sums are added together, as shared memory allows

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

  // Add the products of what was read and x[t][0..rows). Without branches, so that no read of x waits for another.
  template <int TOKENS>
  __device__ __forceinline__ void add(int first, const Raw (&numbers)[AHEAD], const float (*x)[MOST],
                                      float (&sums)[TOKENS][FOUR]) const {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      float of[FOUR];
      numbers[i].to(of);
#pragma unroll
      for (int t = 0; t < TOKENS; t++) {
        const float factor = first + i < left ? x[t][part + (first + i) * parts] : 0.0f;
#pragma unroll
        for (int c = 0; c < FOUR; c++) sums[t][c] = fmaf(factor, of[c], sums[t][c]);
      }
    }
  }
};
static_assert(ENCODE_THREADS * FOUR >= MOST);  // a thread has at most four columns

// What a block knows of its tokens: x, the hidden layer, and f; and room for the threads' sums.
struct Numbers {
  float (*given)[MOST];
  float (*hidden)[MOST];
  float (*sums)[MOST];
  float (*partial)[ENCODE_THREADS * FOUR];
};

// Add x[t][0..rows) times a matrix, whose first rows are in `numbers`, to sums[t], and replace each sum by finish(t,
// column, sum). The threads' sums are added in a fixed order.
template <int TOKENS, class Finish>
__device__ __forceinline__ void add_product(const float (*x)[MOST], const Matrix& of, Raw (&numbers)[AHEAD],
                                            float (*partial)[ENCODE_THREADS * FOUR], float (*sums)[MOST],
                                            const Finish& finish) {
  float mine[TOKENS][FOUR] = {};
#pragma unroll 1
  for (int first = 0; first < of.left; first += AHEAD) {
    if (first) of.read(first, numbers);
    of.add(first, numbers, x, mine);
  }
  constexpr int TOGETHER = TOKENS < AT_ONCE ? TOKENS : AT_ONCE;
#pragma unroll
  for (int from = 0; from < TOKENS; from += TOGETHER) {
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) {
      const float(&own)[FOUR] = mine[from + t];
      *reinterpret_cast<float4*>(partial[t] + FOUR * threadIdx.x) = {own[0], own[1], own[2], own[3]};
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < TOGETHER * of.columns; i += ENCODE_THREADS) {
      const int t = i >= of.columns, column = i - t * of.columns;
      float sum = sums[from + t][column];
#pragma unroll 8
      for (int p = 0; p < of.parts; p++) sum += partial[t][p * of.columns + column];
      sums[from + t][column] = finish(from + t, column, sum);
    }
    __syncthreads();
  }
}
static_assert(AT_ONCE == 2);  // t is 0 or 1 above

__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// Field by field: an index would put the matrices into local memory.
__device__ __forceinline__ Matrix pick(bool first, const Matrix& a, const Matrix& b) {
  Matrix of = a;
  if (!first) of.from = b.from, of.left = b.left, of.columns = b.columns, of.parts = b.parts, of.part = b.part;
  return of;
}

// Compute f of a head for TOKENS tokens, of which all from `count` on are zeros; x(t): the address of token t. Its three
// products are turns of a loop, because a kernel that runs once waits for its instructions, too.
template <int TOKENS, class At>
__device__ __forceinline__ void functions_of(const At& x, int count, const Functions& f, int head,
                                             const Matrix& linear, const Matrix& in, const Matrix& out,
                                             const Numbers& of) {
  const int i = threadIdx.x;
  Raw now[AHEAD], next[AHEAD];
  Half own[TOKENS];
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    own[t] = {};
    if (t < count && i < f.dim) own[t] = x(t)[i];
  }
  const float of_hidden = i < f.hidden ? f.b1[i64(head) * f.hidden + i] : 0.0f;
  const float of_out = f.b2 && i < f.out ? f.b2[i64(head) * f.out + i] : 0.0f;
  linear.read(0, now);
  in.read(0, next);
#pragma unroll
  for (int t = 0; t < TOKENS; t++) of.given[t][i] = real(own[t]), of.hidden[t][i] = of_hidden, of.sums[t][i] = of_out;
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; turn < (f.w1 ? 3 : 1); turn++) {  // x R, x W1, h W2
    const Matrix matrix = pick(turn == 0, linear, pick(turn == 1, in, out));
    float(*const to)[MOST] = turn == 1 ? of.hidden : of.sums;
    add_product<TOKENS>(turn == 2 ? of.hidden : of.given, matrix, now, of.partial, to, [&](int t, int column, float x) {
      if (turn == 1) x = silu(x);
      if (turn == 1 && f.residual && f.hidden == f.dim) x += of.given[t][column];
      if (turn == 2 && f.residual && f.out == f.hidden) x += of.hidden[t][column];
      return x;
    });
#pragma unroll
    for (int a = 0; a < AHEAD; a++) now[a] = next[a];
    if (turn == 0) out.read(0, next);
  }
}
static_assert(ENCODE_THREADS == MOST);  // a thread has a component of x, of the hidden layer and of f
