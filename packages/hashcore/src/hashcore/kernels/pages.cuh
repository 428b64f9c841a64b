// Where a row's keys lie: one after the other, or, with HASHCORE_PAGES, in pages that a table names.
#pragma once
#include "common.cuh"

#ifdef HASHCORE_PAGES
constexpr bool PAGED = true;
#else
constexpr bool PAGED = false;
#endif

// Tables of pages of 2^shift keys: key i of a row is key i % 2^shift of page table[i >> shift]. The host cannot see page
// numbers; those out of range count as the last page, so that nothing outside the pool is read. Unused if not PAGED.
struct Pages {
  const i32* table;
  i64 page;   // words from one page to the next
  i64 width;  // entries from one table to the next
  i32 per;    // consecutive rows that share a table
  i32 shift;
  u32 last;   // the highest page number
};

// The keys of a row.
struct Keys {
  const u32* from;  // with pages: in page 0
  i64 step;         // words from one key to the next
  Pages of;         // `table` is the row's

  __device__ __forceinline__ Keys(const u32* from, i64 step) : from(from), step(step), of() {}

  __device__ __forceinline__ Keys(const u32* from, i64 step, const Pages& pages, int row) : Keys(from, step) {
    if constexpr (PAGED) of = pages, of.table += row / pages.per * pages.width;
  }

  __device__ __forceinline__ u32 page_of(int i) const {
    if constexpr (!PAGED) return 0;
    const u32 page = __ldg(of.table + (i >> of.shift));
    return page < of.last ? page : of.last;
  }

  __device__ __forceinline__ const u32* in_page(int i, u32 page) const {
    if constexpr (!PAGED) return from + i * step;
    return from + page * of.page + (i & ((1 << of.shift) - 1)) * step;
  }

  __device__ __forceinline__ const u32* at(int i) const { return in_page(i, page_of(i)); }
};
