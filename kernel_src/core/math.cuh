// Activations in fp32, a few instructions each: at the speed of memory, an H200 has about 28 of them for each bf16
// element that a kernel reads and writes, and one exp2 or reciprocal takes the place of eight. Infinities and NaN give
// what torch's formulas give.
#pragma once

#include "activation.h"

namespace ltx_kernels {

// The hardware's 2^x and 1/x: 2 ulp and 1 ulp, subnormals flushed.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / (1 + e^-x). kExact: the rounding of x·log2(e), which e^-x multiplies by |x|, is made up for; it is far below the
// last bit of a 16-bit result, and costs five instructions.
template <bool kExact>
__device__ __forceinline__ float silu(float x) {
  if constexpr (!kExact) return x * fast_reciprocal(1.f + fast_exp2(-kLog2E * x));
  const float bounded =
      fmaxf(fminf(x, 126.f), -200.f);  // an infinite power would meet a zero below, or another infinity
  const float power = -kLog2E * bounded;
  const float rest = fmaf(-kLn2Low, power, fmaf(-kLn2High, power, -bounded));
  return x * fast_reciprocal(1.f + fast_exp2(power) * (1.f + rest));
}

// x/2·(1 + tanh(u)) = x / (1 + e^(-2u)): no cancellation where tanh is near -1.
__device__ __forceinline__ float gelu_tanh(float x) { return x * fast_reciprocal(1.f + fast_exp2(log2_gelu_tanh(x))); }

// x·Φ(x): half the instructions of erff, and more accurate in the tail, where 1 + erf cancels.
template <bool kExact>
__device__ __forceinline__ float gelu_erf(float x) {
  const float tail = fast_exp2(log2_normal_tail<kExact>(fabsf(x)));
  return x * (x > 0.f ? 1.f - tail : tail);
}

}  // namespace ltx_kernels
