// What the CPU kernels have in common: rows of any dtype as fp32 and back, in loops that compilers vectorise on every
// architecture.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../norm/norm.h"

// Compiled for AVX2 and AVX-512 as well and chosen at load, where the compiler and the system can: wheels are built for
// the oldest x86-64.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define LTX_KERNELS_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LTX_KERNELS_MULTIVERSION
#endif

// A function that a clone for AVX2 calls, and does not inline, is itself compiled for the oldest x86-64.
#define LTX_KERNELS_INLINE [[gnu::always_inline]] inline

namespace ltx_kernels {

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline float bfloat16_to_float(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// To nearest, ties to even; a NaN stays one.
inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

// The exponent is rebased by a multiplication, which also normalises subnormal halves; what was infinite or NaN comes
// out from 65536 on.
inline float float16_to_float(uint16_t half) {
  const uint32_t shifted = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(half)) << 13) & 0x8fffe000u;
  const float rebased = bit_cast<float>(shifted) * 0x1p112f;
  return bit_cast<float>(bit_cast<uint32_t>(rebased) | ((shifted & 0x0f800000u) == 0x0f800000u ? 0x7f800000u : 0u));
}

// To nearest, ties to even; from 65520 on infinity; a NaN stays one.
inline uint16_t float_to_float16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t bounded = magnitude < 0x47800000u ? magnitude : 0x47800000u;
  // Adding 0.5 lines a subnormal result's last bit up with the end of the significand: the addition rounds it.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(bounded) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (bounded + 0xc8000fffu + ((bounded >> 13) & 1u)) >> 13;
  const uint32_t half = bounded < 0x38800000u ? subnormal : normal;
  const uint32_t nan = magnitude > 0x7f800000u ? 0x200u : 0u;
  return static_cast<uint16_t>(half | nan | (bits >> 16 & 0x8000u));
}

// f(i, value in fp32) for the elements of a row: what follows a load is done in the same pass.
template <typename F>
LTX_KERNELS_INLINE void for_each_element(const Operand& operand, int64_t offset, int64_t count, F&& f) {
  switch (operand.dtype) {
    case Dtype::kFloat32: {
      const float* const source = static_cast<const float*>(operand.data) + offset;
      for (int64_t i = 0; i < count; ++i) f(i, source[i]);
      return;
    }
    case Dtype::kFloat16: {
      const uint16_t* const source = static_cast<const uint16_t*>(operand.data) + offset;
      for (int64_t i = 0; i < count; ++i) f(i, float16_to_float(source[i]));
      return;
    }
    case Dtype::kBFloat16: {
      const uint16_t* const source = static_cast<const uint16_t*>(operand.data) + offset;
      for (int64_t i = 0; i < count; ++i) f(i, bfloat16_to_float(source[i]));
      return;
    }
  }
}

LTX_KERNELS_INLINE void load_row(const Operand& operand, int64_t offset, int64_t count, float* __restrict values) {
  for_each_element(operand, offset, count, [values](int64_t i, float value) { values[i] = value; });
}

LTX_KERNELS_INLINE void store_row(const Operand& operand, int64_t offset, int64_t count, const float* values) {
  switch (operand.dtype) {
    case Dtype::kFloat32:
      std::memcpy(static_cast<float*>(operand.data) + offset, values, count * sizeof(float));
      return;
    case Dtype::kFloat16: {
      uint16_t* target = static_cast<uint16_t*>(operand.data) + offset;
      for (int64_t i = 0; i < count; ++i) target[i] = float_to_float16(values[i]);
      return;
    }
    case Dtype::kBFloat16: {
      uint16_t* target = static_cast<uint16_t*>(operand.data) + offset;
      for (int64_t i = 0; i < count; ++i) target[i] = float_to_bfloat16(values[i]);
      return;
    }
  }
}

// The values a tensor of this dtype would hold.
LTX_KERNELS_INLINE void round_row(Dtype dtype, int64_t count, float* values) {
  switch (dtype) {
    case Dtype::kFloat32:
      return;
    case Dtype::kFloat16:
      for (int64_t i = 0; i < count; ++i) values[i] = float16_to_float(float_to_float16(values[i]));
      return;
    case Dtype::kBFloat16:
      for (int64_t i = 0; i < count; ++i) values[i] = bfloat16_to_float(float_to_bfloat16(values[i]));
      return;
  }
}

// Σ f(i), in 16 lanes that vectorise: a single running sum may not be reordered. A long row is summed in blocks, for a
// lane that runs over all of it loses accuracy: 1.6e-7 relative at 65,536 elements, beyond what torch's pairwise sum
// loses.
template <typename F>
LTX_KERNELS_INLINE float sum_row(int64_t count, F&& f) {
  constexpr int kLanes = 16;
  constexpr int64_t kBlock = 128 * kLanes;
  double total = 0.;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    float lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += f(i + lane);
    }
    for (; i < end; ++i) lanes[i % kLanes] += f(i);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    }
    total += lanes[0];
  }
  return static_cast<float>(total);
}

// h becomes norm(h); returns what it was multiplied by. The mean goes in two steps: what the rounding of the first
// leaves (3e-5 where a row lies around 1000) the second takes away.
LTX_KERNELS_INLINE float normalize_row(Statistic statistic, float eps, int64_t width, float* h) {
  float mean = 0.f;
  if (statistic == Statistic::kLayer) {
    const float first = sum_row(width, [&](int64_t i) { return h[i]; }) / static_cast<float>(width);
    for (int64_t i = 0; i < width; ++i) h[i] -= first;
    mean = sum_row(width, [&](int64_t i) { return h[i]; }) / static_cast<float>(width);
  }
  const float squares = sum_row(width, [&](int64_t i) { return (h[i] - mean) * (h[i] - mean); });
  const float rstd = 1.f / std::sqrt(squares / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; ++i) h[i] = (h[i] - mean) * rstd;
  return rstd;
}

// Where row number `row` starts in each operand.
class RowOffsets {
 public:
  RowOffsets(int64_t row, const Rows& rows) {
    index_[2] = row % rows.sizes[2];
    index_[1] = row / rows.sizes[2] % rows.sizes[1];
    index_[0] = row / rows.sizes[2] / rows.sizes[1];
  }
  int64_t of(const Operand& operand) const {
    return index_[0] * operand.strides[0] + index_[1] * operand.strides[1] + index_[2] * operand.strides[2];
  }

 private:
  int64_t index_[Rows::kDims];
};

// Rows a task: about 32 KB of fp32, so that short rows are not dispatched one by one.
inline int64_t row_grain(int64_t hidden) { return hidden < 8192 ? 8192 / (hidden > 0 ? hidden : 1) : 1; }

}  // namespace ltx_kernels
