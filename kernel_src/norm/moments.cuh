// What a row is normed with, taken from sums over it: for every kernel that holds a norm.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "norm.h"

namespace ltx_kernels {

// (h - mean)·rstd + shift. `mean` is rounded to fp32, which for a mean of 1000 is worse than eager; where the rest is
// taken, `shift` makes up for what the rounding lost, the mean of h - mean.
struct Moments {
  float mean = 0.f, shift = 0.f, rstd = 0.f;
};

// The mean of `count` values, to the last bit that their sum allows: by the rounded inverse alone, a row of equal
// values would differ from its mean, and rstd make 0.06 of it (1920 times 1000, eps 1e-6).
__device__ __forceinline__ float mean_of(float sum, float count, float inverse_count) {
  const float mean = __fmul_rn(sum, inverse_count);
  return fmaf(fmaf(-mean, count, sum), inverse_count, mean);
}

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

// Whether the rest is taken in a norm of values of T: it is a twelfth of the instructions of a layer norm, and less
// than what values of bf16 are apart. In fp16, 1000 + randn would be less accurate than eager without.
template <typename T, Statistic kStatistic>
constexpr bool kHasRest = kStatistic == Statistic::kLayer && !std::is_same_v<T, __nv_bfloat16>;

// Adds the squares of the first `count` of h - mean to `squares`, and, for the rest, themselves to `sum`.
template <typename T, Statistic kStatistic, int kSize>
__device__ __forceinline__ void add_moments(float mean, int count, const float (&values)[kSize], float& sum,
                                            float& squares) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    if (j >= count) continue;
    const float centred = kStatistic == Statistic::kLayer ? __fsub_rn(values[j], mean) : values[j];
    if (kHasRest<T, kStatistic>) sum = __fadd_rn(sum, centred);
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
