// The row-norm core: one kernel for every norm-like op. Each part of the sentence in norm.h is a uniform run-time switch, so that
// RMSNorm, LayerNorm, AdaLN, gated residual and their sums share one code path, one launch policy and one set of tests.
// A row is read once: it stays in shared memory, in its own dtype, between the statistic and the output.
#pragma once

#include <type_traits>

#include "../core/row.cuh"
#include "norm.h"

namespace ltx_kernels {

// residual + (gate + gate_table)·x for vector i, rounded to the residual's dtype, stored as new_residual. The norm reads the rounded
// value, as the next op of an unfused model would.
template <typename T>
__device__ __forceinline__ Vec<T, kVectorSize<T>> update_residual(const NormParams& p, const RowSlice<T>& slice, int i,
                                                                  const Vec<T, kVectorSize<T>>& x,
                                                                  const Vec<T, kVectorSize<T>>& residual) {
  constexpr int kSize = kVectorSize<T>;
  float h[kSize];
  to_floats(x, h);
  multiply_operand<T>(0.f, p.gate, &p.gate_table, slice, i, h);
#pragma unroll
  for (int j = 0; j < kSize; ++j) h[j] = round_if_mixed<T>(p.new_residual.dtype, h[j] + to_float(residual.value[j]));
  store<T, kSize>(p.new_residual, slice.offset(p.new_residual, i), slice.count(i), h);
  return from_floats<T, kSize>(h);
}

// What follows the statistic for vector i: the affine part, the modulation, the activation; rounded once.
template <typename T>
__device__ __forceinline__ void store_normed(const NormParams& p, const RowSlice<T>& slice, int i, float mean, float rstd,
                                             const Vec<T, kVectorSize<T>>& hidden) {
  constexpr int kSize = kVectorSize<T>;
  float y[kSize];
  to_floats(hidden, y);
#pragma unroll
  for (int j = 0; j < kSize; ++j) y[j] = (y[j] - mean) * rstd;
  if (p.cast_before_weight) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] = round_to(p.y.dtype, y[j]);
  }
  multiply_operand<T>(p.weight_offset, p.weight, nullptr, slice, i, y);
  add_operand<T>(p.bias, slice, i, y);
  multiply_operand<T>(1.f, p.scale, &p.scale_table, slice, i, y);
  add_operand<T>(p.shift, slice, i, y);
  add_operand<T>(p.shift_table, slice, i, y);
  if (p.silu) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] = y[j] / (1.f + expf(-y[j]));
  }
  store<T, kSize>(p.y, slice.offset(p.y, i), slice.count(i), y);
}

template <int kSize>
__device__ __forceinline__ float sum_of(const float (&values)[kSize]) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum += values[j];
  return sum;
}

// Sum of (h - mean)² over the columns that exist.
template <int kSize>
__device__ __forceinline__ float squares_of(const float (&values)[kSize], float mean, int count) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    const float centred = j < count ? values[j] - mean : 0.f;
    sum += centred * centred;
  }
  return sum;
}

// T: the dtype of h (float where x and the residual differ in dtype). `staged`: the row fits in shared memory and is read from there in
// each pass; a longer one is read again, from the L2 where it has just been.
template <typename T, Statistic kStatistic>
__global__ void __launch_bounds__(kMaxThreadsPerRow) norm_forward_kernel(const __grid_constant__ NormParams p, const bool staged) {
  constexpr int kSize = kVectorSize<T>;
  using Vector = Vec<T, kSize>;
  extern __shared__ int4 shared[];
  __shared__ float scratch[2][kMaxWarps];

  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = row < p.rows.count();
  const RowSlice<T> slice{RowIndex(exists ? row : 0, p.rows), exists ? static_cast<int>(p.rows.hidden) : 0};
  const bool has_residual = p.residual.data != nullptr;

  const int row_vectors = static_cast<int>(ceil_div(p.rows.hidden, kSize));
  Vector* const stage = reinterpret_cast<Vector*>(shared) + threadIdx.y * row_vectors;
  Vector* const residual_stage = stage + blockDim.y * row_vectors;
  if (staged) {
    stage_row<T>(p.x, slice, stage);
    if (has_residual) stage_row<T>(p.residual, slice, residual_stage);
    copy_async_commit();
    copy_async_wait<0>();
  }
  // Vector i of this thread, of x, residual or h.
  const auto read = [&](const Operand& operand, const Vector* stage, int i) -> Vector {
    if (staged) return stage[slice.column(i) / kSize];
    return load<T, kSize>(operand, slice.offset(operand, i), slice.count(i));
  };

  if (has_residual) {
    for (int i = 0; slice.count(i) > 0; ++i) {
      const Vector h = update_residual<T>(p, slice, i, read(p.x, stage, i), read(p.residual, residual_stage, i));
      if (staged) stage[slice.column(i) / kSize] = h;
    }
  }
  if constexpr (kStatistic == Statistic::kNone) return;
  const Operand& source = has_residual ? p.new_residual : p.x;

  float mean = 0.f;
  if constexpr (kStatistic == Statistic::kLayer) {
    float sum = 0.f;
#pragma unroll 2
    for (int i = 0; slice.count(i) > 0; ++i) {
      float h[kSize];
      to_floats(read(source, stage, i), h);
      sum += sum_of(h);
    }
    mean = row_sum(sum, scratch[0]) / static_cast<float>(p.rows.hidden);
  }
  // The variance in a second pass: E[x²] - mean² would lose it where the mean is large.
  float squares = 0.f;
#pragma unroll 2
  for (int i = 0; slice.count(i) > 0; ++i) {
    float h[kSize];
    to_floats(read(source, stage, i), h);
    squares += squares_of(h, mean, kStatistic == Statistic::kLayer ? slice.count(i) : kSize);
  }
  const float variance = row_sum(squares, scratch[1]) / static_cast<float>(p.rows.hidden);
  const float rstd = rsqrtf(variance + p.eps);

  if (p.rstd != nullptr && exists && threadIdx.x == 0) p.rstd[row] = rstd;
  for (int i = 0; slice.count(i) > 0; ++i) store_normed<T>(p, slice, i, mean, rstd, read(source, stage, i));
}

}  // namespace ltx_kernels
