// One thread's share of a row, and the operands along it: what the kernels that reduce over rows have in common.
#pragma once

#include "broadcast.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "stage.cuh"
#include "vec.cuh"

namespace ltx_kernels {

// Vectors threadIdx.x, threadIdx.x + blockDim.x, ... of kSize elements.
template <typename T>
struct RowSlice {
  static constexpr int kSize = kVectorSize<T>;
  RowIndex row;
  int hidden;  // 0 past the last row: such threads only take part in the reductions

  __device__ __forceinline__ int column(int i) const { return (i * blockDim.x + threadIdx.x) * kSize; }
  __device__ __forceinline__ int count(int i) const { return min(kSize, max(0, hidden - column(i))); }
  __device__ __forceinline__ int64_t offset(const Operand& operand, int i) const { return row.offset(operand) + column(i); }
};

// Copies this thread's vectors of an operand to shared memory, all in flight at once; copy_async_wait() completes them.
template <typename T>
__device__ __forceinline__ void stage_row(const Operand& operand, const RowSlice<T>& slice, Vec<T, kVectorSize<T>>* stage) {
  constexpr int kSize = kVectorSize<T>;
  if (operand.vectorized && operand.dtype == kDtype<T>) {
    const T* source = static_cast<const T*>(operand.data) + slice.row.offset(operand);
    for (int column = slice.column(0); column < slice.hidden; column += blockDim.x * kSize) {
      copy_async_16(stage + column / kSize, source + column);
    }
  } else {
    for (int i = 0; slice.count(i) > 0; ++i) {
      stage[slice.column(i) / kSize] = load<T, kSize>(operand, slice.offset(operand, i), slice.count(i));
    }
  }
}

// sum[j] += operand, nothing for an absent one.
template <typename T>
__device__ __forceinline__ void add_operand(const Operand& operand, const RowSlice<T>& slice, int i, float (&sum)[kVectorSize<T>]) {
  constexpr int kSize = kVectorSize<T>;
  if (operand.data == nullptr) return;
  float values[kSize];
  load_floats<kSize>(operand, slice.offset(operand, i), slice.count(i), values);
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum[j] += values[j];
}

// values[j] *= base + operand + table, nothing for an absent operand.
template <typename T>
__device__ __forceinline__ void multiply_operand(float base, const Operand& operand, const Operand* table, const RowSlice<T>& slice,
                                                 int i, float (&values)[kVectorSize<T>]) {
  constexpr int kSize = kVectorSize<T>;
  if (operand.data == nullptr) return;
  float factor[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j) factor[j] = base;
  add_operand<T>(operand, slice, i, factor);
  if (table != nullptr) add_operand<T>(*table, slice, i, factor);
#pragma unroll
  for (int j = 0; j < kSize; ++j) values[j] *= factor[j];
}

}  // namespace ltx_kernels
