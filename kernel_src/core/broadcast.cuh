// Where a row of the problem lies in each operand, so that scale[B,1,D], a chunk of [B,S,6D] or a slice of a QKV
// projection is read in place.
#pragma once

#include <cstdint>

#include "operand.h"

namespace ltx_kernels {

// Quotient and remainder; a 64-bit division costs about 100 instructions, so 32 bits where they do.
__device__ __forceinline__ int64_t divide(int64_t value, int64_t divisor, int64_t* remainder) {
  int64_t quotient;
  if ((value | divisor) >> 32 == 0) {
    quotient = static_cast<uint32_t>(value) / static_cast<uint32_t>(divisor);
  } else {
    quotient = value / divisor;
  }
  *remainder = value - quotient * divisor;
  return quotient;
}

struct RowIndex {
  int64_t index[Rows::kDims];

  // Of rows that fold into one dim.
  __device__ __forceinline__ explicit RowIndex(int64_t row) : index{0, 0, row} {}

  __device__ __forceinline__ RowIndex(int64_t row, const Rows& rows) : index{0, 0, row} {
    // Uniform branches: rows that fold into one or two dims need no division, or one.
    if (rows.sizes[2] != rows.count()) {
      index[1] = divide(row, rows.sizes[2], &index[2]);
      if (rows.sizes[0] != 1) index[0] = divide(index[1], rows.sizes[1], &index[1]);
    }
  }

  __device__ __forceinline__ int64_t offset(const Operand& operand) const {
    return index[0] * operand.strides[0] + index[1] * operand.strides[1] + index[2] * operand.strides[2];
  }
};

// The same for one operand; most problems fold into one dim, which saves two multiplications in 64 bits.
__device__ __forceinline__ int64_t row_offset(const Operand& operand, int64_t row, const Rows& rows) {
  if (rows.sizes[2] == rows.count()) return row * operand.strides[2];
  return RowIndex(row, rows).offset(operand);
}

}  // namespace ltx_kernels
