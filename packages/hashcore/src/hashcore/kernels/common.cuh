// Code shared by the kernels: bit counting, rows, windows and the block-wide steps of selections.
//
// The sources use no CUDA headers and no extern variables, so that NVRTC can compile them anywhere and a C++20 compiler
// can run them on the CPU (hashcore.hostsim). Every kernel is extern "C"; macros set what changes the code.
#pragma once

using i32 = int;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

static_assert(sizeof(i32) == 4 && sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(i64) == 8);

constexpr u32 FULL_WARP = 0xffffffffu;
constexpr int SELECT_THREADS = 512;  // block size of every kernel that counts or selects
constexpr int VECTOR = 8;            // keys: lists begin at multiples of it

// ---- Bits ----------------------------------------------------------------------------------------------------------

__device__ constexpr u32 xor3(u32 a, u32 b, u32 c) { return a ^ b ^ c; }
__device__ constexpr u32 majority(u32 a, u32 b, u32 c) { return (a & b) | (c & (a | b)); }

// Bitwise full adder: a + b + c = sum + 2 carry, one LOP3 each, with the truth tables of the functions above. Without
// this, the compiler merges the exclusive ors with those of the codes, and needs 1.5 times as many instructions.
__device__ __forceinline__ void add_bits(u32 a, u32 b, u32 c, u32& sum, u32& carry) {
#ifdef HOSTSIM
  sum = xor3(a, b, c), carry = majority(a, b, c);
#else
  constexpr int XOR = xor3(0xf0, 0xcc, 0xaa), MAJORITY = majority(0xf0, 0xcc, 0xaa);
  u32 s, m;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(s) : "r"(a), "r"(b), "r"(c), "n"(XOR));
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(m) : "r"(a), "r"(b), "r"(c), "n"(MAJORITY));
  sum = s, carry = m;
#endif
}

// The weights of planes that are known when a kernel is compiled.
template <int... WEIGHTS>
struct FixedWeights {
  static constexpr int PLANES = sizeof...(WEIGHTS);

  // How many weights have this binary digit.
  __device__ static constexpr int with_digit(int digit) { return ((WEIGHTS >> digit & 1) + ...); }

  // The plane of the index-th such weight.
  __device__ static constexpr int plane(int digit, int index) {
    const int weights[] = {WEIGHTS...};
    for (int p = 0; p < PLANES; p++)
      if (weights[p] >> digit & 1 && index-- == 0) return p;
    return 0;
  }

  __device__ static constexpr bool any_from(int digit) { return ((WEIGHTS >> digit) + ...) != 0; }
};

// sum_p weight_p popcount(word(p, 0), ..., word(p, COUNT - 1)) with few popcounts, by carry-save addition (as in Harley
// and Seal's counter): three words of one binary weight become one of that weight and one of twice it, two LOP3 for a
// POPC that runs at a quarter of their rate. Three planes of 4 words: 7 popcounts instead of 12. Every index is known
// once the loops are unrolled, so the arrays live in registers; the kernel gate refuses a stack frame.
template <class Weights, int COUNT, int DIGIT = 0, int CARRIES = 0, class Word>
__device__ __forceinline__ int weighted_popcount(const Word& word, const u32 (&carry)[CARRIES ? CARRIES : 1]) {
  constexpr int OWN = Weights::with_digit(DIGIT), SIZE = COUNT * OWN + CARRIES;
  if constexpr (SIZE == 0) {
    if constexpr (Weights::any_from(DIGIT)) {
      return weighted_popcount<Weights, COUNT, DIGIT + 1, 0>(word, carry);
    } else {
      return 0;
    }
  } else {
    u32 x[SIZE];
#pragma unroll
    for (int i = 0; i < COUNT * OWN; i++) x[i] = word(Weights::plane(DIGIT, i / COUNT), i % COUNT);
#pragma unroll
    for (int i = 0; i < CARRIES; i++) x[COUNT * OWN + i] = carry[i];
    constexpr int ADDERS = (SIZE - 1) / 2;
    u32 twice[ADDERS ? ADDERS : 1], sum = x[0];
#pragma unroll
    for (int a = 0; a < ADDERS; a++) add_bits(sum, x[2 * a + 1], x[2 * a + 2], sum, twice[a]);
    int count = __popc(sum);
    if constexpr (SIZE % 2 == 0) count += __popc(x[SIZE - 1]);
    return (count << DIGIT) + weighted_popcount<Weights, COUNT, DIGIT + 1, ADDERS>(word, twice);
  }
}

template <class Weights, int COUNT, class Word>
__device__ __forceinline__ int weighted_popcount(const Word& word) {
  const u32 none[1] = {0};
  return weighted_popcount<Weights, COUNT, 0, 0>(word, none);
}

// Reads COUNT words; STRIDE, the number of words of a code, determines the alignment of the address.
template <int STRIDE, int COUNT>
__device__ __forceinline__ void load_words(const u32* __restrict__ from, u32 (&to)[COUNT]) {
  if constexpr (STRIDE % 4 == 0 && COUNT % 4 == 0) {
#pragma unroll
    for (int w = 0; w < COUNT; w += 4) {
      const uint4 x = __ldcs(reinterpret_cast<const uint4*>(from + w));  // 4 words = one 16-byte load, used once
      to[w] = x.x, to[w + 1] = x.y, to[w + 2] = x.z, to[w + 3] = x.w;
    }
  } else if constexpr (STRIDE % 2 == 0 && COUNT % 2 == 0) {
#pragma unroll
    for (int w = 0; w < COUNT; w += 2) {
      const uint2 x = __ldcs(reinterpret_cast<const uint2*>(from + w));
      to[w] = x.x, to[w + 1] = x.y;
    }
  } else {
#pragma unroll
    for (int w = 0; w < COUNT; w++) to[w] = __ldcs(from + w);
  }
}

// ---- Half types, without CUDA's headers ----------------------------------------------------------------------------

struct Float16 {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};

__device__ __forceinline__ float real(BFloat16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ __forceinline__ float real(Float16 x) {
  // The product moves the exponent's bias from 15 to 127; subnormals come out exact, too.
  const float magnitude = __uint_as_float(u32(x.bits & 0x7fffu) << 13) * 0x1p112f;
  const u32 special = (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // inf and NaN keep a full exponent
  return __uint_as_float(__float_as_uint(magnitude) | special | u32(x.bits & 0x8000u) << 16);
}

// ---- Rows ----------------------------------------------------------------------------------------------------------

// The leading dimensions of a broadcast, slowest first, with the step of each operand in words (0 where it repeats).
struct RowMap {
  i32 size[4];
  i64 query[4];
  i64 keys[4];
  i64 key;  // words from one key to the next
};

struct Operands {
  const u32* query;
  const u32* keys;
};

__device__ __forceinline__ Operands operands(const u32* query, const u32* keys, const RowMap& map, int row) {
#pragma unroll
  for (int d = 3; d >= 0; d--) {
    if (map.size[d] == 1) continue;  // most are: two divisions less
    const int i = row % map.size[d];
    row /= map.size[d];
    query += i * map.query[d];
    keys += i * map.keys[d];
  }
  return {query, keys};
}

// The eligible positions of a row: [start + sink, length - recent). Values in device memory are clamped to [0, n],
// because kernels cannot raise errors.
struct Window {
  const void* lengths;  // one per lengths_per rows, or null: length
  const void* starts;   // one per starts_per rows, or null: start
  i32 lengths_per;
  i32 starts_per;
  i32 length;
  i32 start;
  i32 sink;
  i32 recent;
  i32 n;     // at most 2^29, so that sums of two positions fit
  i32 wide;  // bit 0: lengths are int64, not int32; bit 1: starts are
};

struct Range {
  int low;
  int high;
  __device__ __forceinline__ int size() const { return high - low; }
};

__device__ __forceinline__ int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// Entry i of int32 or int64 values in device memory, clamped to [0, most] before it could wrap.
__device__ __forceinline__ int entry(const void* values, bool wide, int i, int most) {
  if (!wide) return clamp(static_cast<const i32*>(values)[i], 0, most);
  const i64 x = static_cast<const i64*>(values)[i];
  return x < 0 ? 0 : x > most ? most : int(x);
}

__device__ __forceinline__ Range eligible(const Window& window, int row) {
  int length = window.length, start = window.start;
  if (window.lengths) length = entry(window.lengths, window.wide & 1, row / window.lengths_per, window.n);
  if (window.starts) start = entry(window.starts, window.wide & 2, row / window.starts_per, window.n);
  const int low = start + window.sink, high = length - window.recent;
  return {low, high > low ? high : low};
}

// ---- A block of SELECT_THREADS -------------------------------------------------------------------------------------

// Returns the sum of x over the threads before this one, and the sum over all; with T = u64, of two counts in one number.
// Every thread must call it.
template <class T>
__device__ __forceinline__ T scan_block(T x, T& total) {
  __shared__ T warp_sums[SELECT_THREADS / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  T inclusive = x;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const T other = __shfl_up_sync(FULL_WARP, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  __syncthreads();  // other threads may still read the sums of the previous call
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < SELECT_THREADS / 32; w++) {
    const T sum = warp_sums[w];  // one address for the warp: a broadcast
    if (w < warp) before += sum;
    total += sum;
  }
  return before + inclusive - x;
}

// ---- The k-th best of a row ----------------------------------------------------------------------------------------

struct Selection {
  const void* k;  // one per k_per rows, or null: count
  i32 k_per;
  i32 count;
  i32 width;  // slots of a row in the output
  i32 wide;   // whether k is int64, not int32
};

__device__ __forceinline__ int selected(const Selection& selection, const Range& range, int row) {
  const int k = selection.k ? entry(selection.k, selection.wide, row / selection.k_per, selection.width)
                            : clamp(selection.count, 0, selection.width);
  return k < range.size() ? k : range.size();
}

// The numbers of earlier keys above the threshold, and equal to it.
struct Place {
  u32 above;
  u32 equal;
};

// Empty slots of the row: score 0, index -1, written by all its blocks.
__device__ __forceinline__ void fill(i32* values, i64* indices, int from, int width) {
  for (int slot = from + blockIdx.y * SELECT_THREADS + threadIdx.x; slot < width; slot += gridDim.y * SELECT_THREADS) {
    values[slot] = 0;
    indices[slot] = -1;
  }
}

// ---- Programmatic launch: a dependent kernel may be scheduled before this one ends (compute capability 9.0 on) -----

__device__ __forceinline__ void let_dependents_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all earlier kernels have ended and their writes are visible; must be called before device memory is read or
// written. What depends on arguments alone is computed before. Waiting again costs nothing.
__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
