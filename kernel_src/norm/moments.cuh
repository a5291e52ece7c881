// What a row is normed with, taken from sums over it: for every kernel that holds a norm.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "norm.h"

namespace ltx_kernels {

// (h - mean)·rstd + shift. `mean` is rounded to fp32, which for a mean of 1000 is worse than eager; `shift` makes up
// for what the rounding lost, the mean of h - mean.
struct Moments {
  float mean = 0.f, shift = 0.f, rstd = 0.f;
};

// From the sums of h - mean and its squares. The squares are of a second pass: E[x²] - mean² would lose the variance to
// a large mean.
__device__ __forceinline__ void set_moments(float inverse_hidden, float eps, float sum, float squares,
                                            Moments& moments) {
  const float rest = sum * inverse_hidden;
  const float variance = squares * inverse_hidden - rest * rest;
  moments.rstd = __frsqrt_rn(variance + eps);  // rsqrtf is off by up to two units in the last place
  moments.shift = -rest * moments.rstd;
}

// Sums are spelled out: left to the compiler, kernels that must give the same bits would differ in what is contracted.
template <int kSize>
__device__ __forceinline__ float add_values(float sum, const float (&values)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum = __fadd_rn(sum, values[j]);
  return sum;
}

// Whether a norm of values of T makes up for what the rounding of its mean lost: bf16 cannot tell it apart, and it is a
// twelfth of the instructions of a layer norm. fp16 can: 1000 + randn would be less accurate than eager.
template <typename T, Statistic kStatistic>
constexpr bool kHasRest = kStatistic == Statistic::kLayer && !std::is_same_v<T, __nv_bfloat16>;

// Adds the first `count` of h - mean, for kRest, and their squares.
template <Statistic kStatistic, bool kRest = kStatistic == Statistic::kLayer, int kSize>
__device__ __forceinline__ void add_moments(float mean, int count, const float (&values)[kSize], float& sum,
                                            float& squares) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    if (j >= count) continue;
    const float centred = kStatistic == Statistic::kLayer ? __fsub_rn(values[j], mean) : values[j];
    if (kRest) sum = __fadd_rn(sum, centred);
    squares = fmaf(centred, centred, squares);
  }
}

template <Statistic kStatistic, int kSize>
__device__ __forceinline__ void normalize(const Moments& moments, float (&values)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    if constexpr (kStatistic == Statistic::kLayer) {
      values[j] = fmaf(__fsub_rn(values[j], moments.mean), moments.rstd, moments.shift);
    } else if constexpr (kStatistic == Statistic::kRms) {
      values[j] = __fmul_rn(values[j], moments.rstd);
    }
  }
}

}  // namespace ltx_kernels
