// Writes codes to their slots in pages: one word for each thread.
//
// codes i32 [T][H][W] contiguous; slots i64 [T]: page * S + place in the page; a token whose slot is not in [0, M S) is
// skipped. pages: words, with strides of page, head and token, and contiguous words of a code.
//
// Bytes: 8 W a token and head, and 8 of each slot.
#include "common.cuh"

struct Target {
  u32* words;
  i64 page;  // strides in words
  i64 head;
  i64 token;
  i64 slots;  // M S
  i32 size;   // S
};

extern "C" __global__ void place_codes(const u32* __restrict__ codes, const i64* __restrict__ slots, Target target,
                                       i32 heads, i32 words, i64 count) {
  const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const i64 row = i / words, slot = slots[row / heads];
  if (slot < 0 || slot >= target.slots) return;
  const i64 place = slot / target.size * target.page + slot % target.size * target.token;
  target.words[place + row % heads * target.head + i % words] = codes[i];
}
