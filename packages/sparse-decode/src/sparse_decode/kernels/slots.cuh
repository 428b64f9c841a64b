// The slots of a task of gather.cu: which token each holds, and where its key and value are, contiguous or in pages.
#pragma once
#include "mma.cuh"
#include "pages.cuh"

#define INFINITE __uint_as_float(0x7f800000u)

constexpr int DIM = SPARSE_DIM, VALUE_DIM = SPARSE_VALUE_DIM;
static_assert(DIM % 16 == 0 && DIM >= 16 && DIM <= 256 && VALUE_DIM % 16 == 0 && VALUE_DIM >= 16 && VALUE_DIM <= 256);

struct Shape {
  i32 sets;
  i32 queries;
  i32 width;
  i32 group;
  i32 heads_per_kv;  // query heads
  i32 tokens;        // N
  i32 slots;         // per split, a multiple of SLOTS
  i32 sink;          // slots before and after those of indices: a row has sink + width + recent
  i32 recent;
  float scaling;
  float softcap;  // 0: none
};

struct Task {
  int batch, set, query;
  __device__ __forceinline__ Task(const Shape& shape, int index)
      : batch(index / (shape.sets * shape.queries)),
        set(index / shape.queries % shape.sets),
        query(index % shape.queries) {}
};

// The token of a slot.
__device__ __forceinline__ i64 token_of(const i64* indices, const i64* always, int slot, const Shape& shape) {
  if (slot < shape.sink) return always ? __ldg(always + slot) : slot;
  const int behind = slot - shape.sink - shape.width;
  return behind < 0 ? __ldg(indices + slot - shape.sink) : i64(shape.tokens - shape.recent + behind);
}

// Where a token is: its number, or, with pages, its slot in the pool, page * 2^shift + place (the host checks that a
// pool has less than 2^31 slots); -1 for tokens outside [0, N).
__device__ __forceinline__ i32 place_of(i64 token, int tokens, const Pages& pages) {
  if (token < 0 || token >= tokens) return -1;
  if constexpr (!PAGED) return i32(token);
  const u32 page = __ldg(pages.table + (token >> pages.shift));
  return i32((page < pages.last ? page : pages.last) << pages.shift | (u32(token) & ((1u << pages.shift) - 1)));
}

// The row of keys or values at a place, which is not -1.
__device__ __forceinline__ const Half* row_at(const Half* from, const Rows& at, i32 place, const Pages& pages) {
  if constexpr (!PAGED) return from + place * at.token;
  return from + (place >> pages.shift) * at.batch + (place & ((1 << pages.shift) - 1)) * at.token;
}

// Partial sums are written and read in one access of COUNT floats, 2 or 4.
template <int COUNT>
__device__ __forceinline__ void put(float* to, const float (&x)[COUNT]) {
  static_assert(COUNT == 2 || COUNT == 4);
  if constexpr (COUNT == 4) {
    const uint4 y = {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
    *reinterpret_cast<uint4*>(to) = y;
  } else {
    const uint2 y = {__float_as_uint(x[0]), __float_as_uint(x[1])};
    *reinterpret_cast<uint2*>(to) = y;
  }
}

template <int COUNT>
__device__ __forceinline__ void get(const float* from, float (&x)[COUNT]) {
  static_assert(COUNT == 2 || COUNT == 4);
  if constexpr (COUNT == 4) {
    const uint4 y = *reinterpret_cast<const uint4*>(from);
    x[0] = __uint_as_float(y.x), x[1] = __uint_as_float(y.y), x[2] = __uint_as_float(y.z), x[3] = __uint_as_float(y.w);
  } else {
    const uint2 y = *reinterpret_cast<const uint2*>(from);
    x[0] = __uint_as_float(y.x), x[1] = __uint_as_float(y.y);
  }
}
