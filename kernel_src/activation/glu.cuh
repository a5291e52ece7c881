// The gated activation core: one elementwise kernel for geglu, swiglu and gelu, read and written once. The packed
// halves of [*, 2·D] are two operands with the same strides. What distinguishes it from a plain elementwise kernel is
// the width of an access: a second half starts anywhere, so the launch takes the widest access that every row of every
// operand is aligned for.
#pragma once

#include "../core/broadcast.cuh"
#include "../core/divisor.cuh"
#include "../core/kernel.cuh"
#include "../core/launch.cuh"
#include "../core/math.cuh"
#include "../core/vec.cuh"
#include "glu.h"

namespace ltx_kernels {

// Threads of a block. gelu bf16 (erf) with 256, 128: [2, 2688, 16384] 86.9, 84.7 us; [2, 8064, 8192] 129.3, 125.6
// (benchmarks/results/h200/tuning/glu_units.txt).
template <bool kGated>
constexpr int kGluThreads = kGated ? 256 : 128;

// Accesses of each operand that a thread has in flight. With a gate and a value one of 16 bytes: threads enough live
// for memory, and a small call has more blocks. swiglu bf16 with two, one: [1, 14336] 1.43, 1.07 us; [1024, 2048] 5.37,
// 4.53; [16384, 4096] 94.1, 93.5 (benchmarks/results/h200/tuning/glu_units.txt).
template <typename T, int kSize, bool kGated>
constexpr int kGluUnits = sizeof(T) * kSize < kVectorBytes ? 4
                          : kGated                         ? 1
                                                           : 2;

// The grid: slices of the outer two dims, slice_blocks blocks each. A row is row_units accesses of kSize elements;
// a thread's next access, as many further as a block has threads, is step_rows rows and step_units accesses away.
struct GluGrid {
  int64_t slice_blocks;
  WideDivisor row_units;
  int64_t step_rows;
  int64_t step_units;

  GluGrid(const Rows& rows, int size, int threads, int units) : row_units(rows.hidden / size) {
    slice_blocks = ceil_div(rows.sizes[2] * row_units.value, threads * units);
    step_rows = threads / row_units.value;
    step_units = threads % row_units.value;
  }
};

template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> load_unit(const T* source) {
  return *reinterpret_cast<const Vec<T, kSize>*>(source);
}

template <bool kExact, int kSize>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kSize]) {
  // Uniform: the switch is outside the loops, which unroll.
  switch (activation) {
    case Activation::kGeluErf:
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = gelu_erf<kExact>(values[j]);
      return;
    case Activation::kGeluTanh:
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = gelu_tanh(values[j]);
      return;
    case Activation::kSilu:
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = silu<kExact>(values[j]);
      return;
  }
}

template <bool kGated, typename T, int kSize>
__device__ __forceinline__ void store_activated(const GluParams& p, T* target, const Vec<T, kSize>& gate,
                                                const Vec<T, kSize>& value) {
  float y[kSize];
  to_floats(gate, y);
  activate<std::is_same_v<T, float>>(p.activation, y);
  if constexpr (kGated) {
    float factor[kSize];
    to_floats(value, factor);
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] *= factor[j];
  }
  store_vector(target, from_floats<T, kSize>(y));
}

// Rows are whole accesses of kSize elements, aligned to their size; only a single row may have a few elements more.
// kGated: y = activation(gate)·value, else activation(gate).
template <typename T, int kSize, bool kGated>
__global__ void __launch_bounds__(kGluThreads<kGated>)
    glu_kernel(const __grid_constant__ GluParams p, const __grid_constant__ GluGrid grid) {
  wait_for_previous_kernel();
  constexpr int kUnits = kGluUnits<T, kSize, kGated>;
  using Unit = Vec<T, kSize>;
  const T* gates = static_cast<const T*>(p.gate.data);
  const T* values = static_cast<const T*>(p.value.data);
  T* targets = static_cast<T*>(p.y.data);
  int64_t block = blockIdx.x;
  if (grid.slice_blocks != gridDim.x) {
    int64_t index[2];
    index[0] = divide(divide(block, grid.slice_blocks, &block), p.rows.sizes[1], &index[1]);
    gates += index[0] * p.gate.strides[0] + index[1] * p.gate.strides[1];
    values += index[0] * p.value.strides[0] + index[1] * p.value.strides[1];
    targets += index[0] * p.y.strides[0] + index[1] * p.y.strides[1];
  }

  int64_t unit;
  int64_t row = grid.row_units.divide(block * (kGluThreads<kGated> * kUnits) + threadIdx.x, &unit);
  // All loads first, then the arithmetic.
  Unit gate[kUnits], value[kUnits];
  int64_t target[kUnits];  // negative: no such access
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    target[i] = -1;
    if (row < p.rows.sizes[2]) {
      const int64_t column = unit * kSize;
      gate[i] = load_unit<T, kSize>(gates + row * p.gate.strides[2] + column);
      if constexpr (kGated) value[i] = load_unit<T, kSize>(values + row * p.value.strides[2] + column);
      target[i] = row * p.y.strides[2] + column;
    }
    // The next access, without another division.
    row += grid.step_rows;
    unit += grid.step_units;
    if (unit >= grid.row_units.value) {
      unit -= grid.row_units.value;
      ++row;
    }
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (target[i] >= 0) store_activated<kGated, T, kSize>(p, targets + target[i], gate[i], value[i]);
  }

  const int64_t rest = grid.row_units.value * kSize + threadIdx.x;
  if (kSize > 1 && blockIdx.x == 0 && rest < p.rows.hidden) {
    const Vec<T, 1> last = load_unit<T, 1>(gates + rest);
    store_activated<kGated, T, 1>(p, targets + rest, last, kGated ? load_unit<T, 1>(values + rest) : last);
  }
}

}  // namespace ltx_kernels
