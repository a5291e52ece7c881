// The plain data that passes from the binding to the kernels. No torch, no CUDA: both backends and both compilers read
// it.
#pragma once

#include <cstdint>

namespace ltx_kernels {

constexpr int kVectorBytes = 16;

enum class Dtype : int32_t { kFloat32, kFloat16, kBFloat16 };

constexpr int size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// The rows of a problem: its leading dims folded into three, the innermost last, and the length of a row.
struct Rows {
  static constexpr int kDims = 3;
  int64_t sizes[kDims] = {1, 1, 1};
  int64_t hidden = 0;
  float inverse_hidden = 0.f;  // a division a row costs a thread as much as two elements

  constexpr int64_t count() const { return sizes[0] * sizes[1] * sizes[2]; }
};

// One tensor of the problem, read in place: a row starts at the sum of its index times the stride (in elements; 0 where
// the tensor is broadcast), and its elements are contiguous. An absent tensor has no data. `vectorized`: every row
// starts on a multiple of 16 bytes.
struct Operand {
  void* data = nullptr;
  int64_t strides[Rows::kDims] = {0, 0, 0};
  Dtype dtype = Dtype::kFloat32;
  bool vectorized = false;
};

}  // namespace ltx_kernels
