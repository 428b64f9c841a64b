// Every FOLD steps: add tokens to the sums of add_token (moments.cu), and round these.
#pragma once
#include "moments.cuh"

// a / b as IEEE 754 rounds it, for b and quotients far from the ends of float32's range. The operator is a call for
// such ends, around which registers would be spilled.
__device__ __forceinline__ float divide(float a, float b) {
#ifdef HOSTSIM
  return a / b;
#else
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
  r = fmaf(fmaf(-b, r, 1.0f), r, r);
  const float quotient = a * r;
  return fmaf(fmaf(-b, quotient, a), r, quotient);
#endif
}

// 1 / b likewise, for a number of tokens.
__device__ __forceinline__ double reciprocal(double b) {
#ifdef HOSTSIM
  return 1.0 / b;
#else
  double r = divide(1.0f, float(b));
  for (int step = 0; step < 3; step++) r = fma(fma(-b, r, 1.0), r, r);
  return r;
#endif
}

// Add the tokens to the spread, and round each row to levels; a warp has ROWS rows at a time.
__device__ __forceinline__ void fold(float* spread, const Fresh& fresh, u32 joined, float n, float spoilt,
                                     i8* levels, float* scales) {
  constexpr int FOURS = up(VALUE_DIM, 128), ROWS = FOURS == 1 ? 8 : 4;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int d = threadIdx.x / 32 * ROWS; d < DIM; d += WARPS * ROWS) {
    Four x[ROWS][FOURS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int j = 0; j < FOURS; j++) {
        const int column = 4 * (lane + 32 * j);
        if (column < VALUE_DIM) x[r][j] = four(spread + (d + r) * VALUE_DIM + column);
      }
    }
#pragma unroll
    for (int j = 0; j < FOURS; j++) {
      const int column = 4 * (lane + 32 * j);
      if (column >= VALUE_DIM) continue;
      const Four drift = four(fresh.drift + DIM + column);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const float along = n * fresh.drift[d + r];
#pragma unroll
        for (int c = 0; c < 4; c++) x[r][j].at[c] -= along * drift.at[c];
      }
#pragma unroll 2
      for (int t = 0; t < FOLD; t++) {
        if (!(joined >> t & 1)) continue;
        const Four value = fresh.fars(t, DIM + column);
#pragma unroll
        for (int r = 0; r < ROWS; r += 4) {
          const Four key = fresh.fars(t, d + r);
#pragma unroll
          for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int c = 0; c < 4; c++) x[r + i][j].at[c] += key.at[i] * value.at[c];
          }
        }
      }
    }
    float top[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int j = 0; j < FOURS; j++) {
        const int column = 4 * (lane + 32 * j);
#pragma unroll
        for (int c = 0; c < 4; c++) {
          x[r][j].at[c] += spoilt;
          top[r] = fmaxf(top[r], fabsf(x[r][j].at[c]));
        }
        if (column < VALUE_DIM) *reinterpret_cast<Four*>(spread + (d + r) * VALUE_DIM + column) = x[r][j];
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {  // of all rows at once: a shuffle waits for the one before
#pragma unroll
      for (int r = 0; r < ROWS; r++) top[r] = fmaxf(top[r], __shfl_xor_sync(FULL_WARP, top[r], step));
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float scale = divide(top[r], 127.0f);
#pragma unroll
      for (int j = 0; j < FOURS; j++) {
        const int column = 4 * (lane + 32 * j);
        u32 word = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const float level = scale > 1e-30f ? divide(x[r][j].at[c], scale) : 0.0f;
          word |= u32(u8(i8(rintf(level)))) << 8 * c;
        }
        if (column < VALUE_DIM) *reinterpret_cast<u32*>(levels + (d + r) * VALUE_DIM + column) = word;
      }
      if (lane == 0) scales[d + r] = scale + spoilt;
    }
  }
}
