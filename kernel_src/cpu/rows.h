// What the CPU kernels have in common: rows of any dtype as fp32 and back, in loops that compilers vectorise on every
// architecture.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../norm/norm.h"

// Compiled for AVX2 and AVX-512 as well and chosen at load, where the compiler and the system can: wheels are built for
// the oldest x86-64.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define LTX_KERNELS_GCC_X86
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

// To nearest, ties to even. A NaN with its lowest 16 bits set may become something else.
inline uint16_t finite_to_bfloat16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// To nearest, ties to even; a NaN stays one.
inline uint16_t float_to_bfloat16(float value) {
  return value == value ? finite_to_bfloat16(value)
                        : static_cast<uint16_t>((bit_cast<uint32_t>(value) | 0x400000u) >> 16);
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

#if defined(LTX_KERNELS_GCC_X86)
#define LTX_KERNELS_F16C __attribute__((target("avx2,f16c")))
// Every processor with AVX2 converts half precision too. GCC 12 vectorises neither way, so it is written out, eight
// elements at a time; the caller has what is left over.
inline const bool has_f16c = __builtin_cpu_supports("avx2");

LTX_KERNELS_F16C inline int64_t halves_to_floats(const uint16_t* halves, int64_t count, float* floats) {
  using Halves [[gnu::vector_size(16)]] = short;
  using Floats [[gnu::vector_size(32)]] = float;
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + 8 <= count; i += 8) {
    Halves eight;
    std::memcpy(&eight, halves + i, sizeof(eight));
    const Floats converted = __builtin_ia32_vcvtph2ps256(eight);
    std::memcpy(floats + i, &converted, sizeof(converted));
  }
  return i;
}

LTX_KERNELS_F16C inline int64_t floats_to_halves(const float* floats, int64_t count, uint16_t* halves) {
  using Halves [[gnu::vector_size(16)]] = short;
  using Floats [[gnu::vector_size(32)]] = float;
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + 8 <= count; i += 8) {
    Floats eight;
    std::memcpy(&eight, floats + i, sizeof(eight));
    const Halves converted = __builtin_ia32_vcvtps2ph256(eight, 0);  // to nearest, ties to even
    std::memcpy(halves + i, &converted, sizeof(converted));
  }
  return i;
}
#else
constexpr bool has_f16c = false;
inline int64_t halves_to_floats(const uint16_t*, int64_t, float*) { return 0; }
inline int64_t floats_to_halves(const float*, int64_t, uint16_t*) { return 0; }
#endif

LTX_KERNELS_INLINE void load_halves(const uint16_t* source, int64_t count, float* __restrict values) {
  for (int64_t i = has_f16c ? halves_to_floats(source, count, values) : 0; i < count; ++i)
    values[i] = float16_to_float(source[i]);
}

LTX_KERNELS_INLINE void store_halves(const float* values, int64_t count, uint16_t* __restrict target) {
  for (int64_t i = has_f16c ? floats_to_halves(values, count, target) : 0; i < count; ++i)
    target[i] = float_to_float16(values[i]);
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
  if (operand.dtype == Dtype::kFloat16) {
    load_halves(static_cast<const uint16_t*>(operand.data) + offset, count, values);
  } else {
    for_each_element(operand, offset, count, [values](int64_t i, float value) { values[i] = value; });
  }
}

LTX_KERNELS_INLINE void store_row(const Operand& operand, int64_t offset, int64_t count, const float* values) {
  switch (operand.dtype) {
    case Dtype::kFloat32:
      std::memcpy(static_cast<float*>(operand.data) + offset, values, count * sizeof(float));
      return;
    case Dtype::kFloat16:
      store_halves(values, count, static_cast<uint16_t*>(operand.data) + offset);
      return;
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

// Σ f(i), in four times 16 lanes, for a single running sum may not be reordered, and one vector of them waits for each
// addition. A long row is summed in blocks, for a lane that runs over all of it loses accuracy: 1.6e-7 relative at
// 65,536 elements, beyond what torch's pairwise sum loses.
template <typename F>
LTX_KERNELS_INLINE float sum_row(int64_t count, F&& f) {
  constexpr int kLanes = 16;
  constexpr int64_t kBlock = 128 * kLanes;
  double total = 0.;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = begin + kBlock < count ? begin + kBlock : count;
    float a[kLanes] = {}, b[kLanes] = {}, c[kLanes] = {}, d[kLanes] = {};
    int64_t i = begin;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) a[lane] += f(i + lane);
      for (int lane = 0; lane < kLanes; ++lane) b[lane] += f(i + kLanes + lane);
      for (int lane = 0; lane < kLanes; ++lane) c[lane] += f(i + 2 * kLanes + lane);
      for (int lane = 0; lane < kLanes; ++lane) d[lane] += f(i + 3 * kLanes + lane);
    }
    for (int lane = 0; lane < kLanes; ++lane) a[lane] = (a[lane] + b[lane]) + (c[lane] + d[lane]);
    for (; i + kLanes <= end; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) a[lane] += f(i + lane);
    }
    for (; i < end; ++i) a[i % kLanes] += f(i);
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) a[lane] += a[lane + width];
    }
    total += a[0];
  }
  return static_cast<float>(total);
}

// What a row is normed by: norm(h)[i] is `of(h[i])`. The mean goes in two steps: what the rounding of the first leaves
// (3e-5 where a row lies around 1000) the second takes away, in the variance and the results at once.
struct RowMoments {
  float first = 0.f;
  float second = 0.f;  // in units of 1/rstd
  float rstd = 0.f;

  LTX_KERNELS_INLINE RowMoments(Statistic statistic, float eps, int64_t width, const float* h) {
    const float n = static_cast<float>(width);
    float rest = 0.f;
    if (statistic == Statistic::kLayer) {
      first = sum_row(width, [=](int64_t i) { return h[i]; }) / n;
      const float mean = first;
      rest = sum_row(width, [=](int64_t i) { return h[i] - mean; }) / n;
    }
    const float mean = first;
    const float squares = sum_row(width, [=](int64_t i) { return (h[i] - mean) * (h[i] - mean); });
    const float variance = std::max(squares / n - rest * rest, 0.f);  // of equal elements it may round to below 0
    rstd = 1.f / std::sqrt(variance + eps);
    second = rest * rstd;
  }

  LTX_KERNELS_INLINE float of(float value) const { return (value - first) * rstd - second; }
};

constexpr int64_t kCacheLine = 64;

// Floats that begin with a cache line: a vector that lies across two takes twice as long.
class FloatBuffer {
 public:
  explicit FloatBuffer(int64_t count) : lines_((count + kFloats - 1) / kFloats) {}
  float* data() { return reinterpret_cast<float*>(lines_.data()); }

 private:
  static constexpr int64_t kFloats = kCacheLine / sizeof(float);
  struct alignas(kCacheLine) Line {
    float floats[kFloats];
  };
  std::vector<Line> lines_;
};

// Where row number `row` starts in each operand.
class RowOffsets {
 public:
  RowOffsets(int64_t row, const Rows& rows) : index_{0, 0, row} {
    if (row < rows.sizes[2]) return;  // mostly; divisions take as long as a row of a hundred elements
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
