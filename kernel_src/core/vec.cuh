// 16-byte vectors, the conversions to and from fp32, and the loads and stores of every kernel. bf16 and fp16 are only
// ever converted, never computed with: sm_75 has no bf16 arithmetic, and one rounding at the end is more accurate than
// a chain of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "operand.h"

namespace ltx_kernels {

template <typename T>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
constexpr Dtype kDtype = Dtype::kFloat32;
template <>
constexpr Dtype kDtype<__half> = Dtype::kFloat16;
template <>
constexpr Dtype kDtype<__nv_bfloat16> = Dtype::kBFloat16;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// The value a tensor of this dtype would hold.
__device__ __forceinline__ float round_to(Dtype dtype, float value) {
  switch (dtype) {
    case Dtype::kFloat16:
      return to_float(from_float<__half>(value));
    case Dtype::kBFloat16:
      return to_float(from_float<__nv_bfloat16>(value));
    default:
      return value;
  }
}

// Kernels of T = float also carry mixed dtypes, which the tensor they write would round to; in the others T says it
// all.
template <typename T>
__device__ __forceinline__ float round_if_mixed(Dtype dtype, float value) {
  return std::is_same_v<T, float> ? round_to(dtype, value) : to_float(from_float<T>(value));
}

template <typename T, int kSize = kVectorSize<T>>
struct alignas(sizeof(T) * kSize < kVectorBytes ? sizeof(T) * kSize : kVectorBytes) Vec {
  T value[kSize];
};

// `count` of the elements exist: fewer than kSize at a row's end. The rest are zero.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> load_elements(const T* source, int count) {
  Vec<T, kSize> vector;
#pragma unroll
  for (int i = 0; i < kSize; ++i) vector.value[i] = i < count ? source[i] : from_float<T>(0.f);
  return vector;
}

template <typename T, int kSize>
__device__ __forceinline__ void store_elements(T* target, const Vec<T, kSize>& vector, int count) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i < count) target[i] = vector.value[i];
  }
}

template <typename T, int kSize>
__device__ __forceinline__ void to_floats(const Vec<T, kSize>& vector, float (&values)[kSize]) {
  if constexpr (!std::is_same_v<T, float> && kSize % 2 == 0) {
    // Pairs as words: element by element the compiler unpacks early, holds bf16 in twice the registers, and sorts fp16
    // into other pairs.
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      uint32_t word;
      memcpy(&word, &vector.value[i], sizeof(word));
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        values[i] = __uint_as_float(word << 16);
        values[i + 1] = __uint_as_float(word & 0xffff0000u);
      } else {
        // Opaque, or it is taken apart all the same.
        asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
            : "=f"(values[i]), "=f"(values[i + 1])
            : "r"(word));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = to_float(vector.value[i]);
  }
}

// Keeps a vector that is converted twice packed in between: else the compiler holds the floats, in twice the registers.
template <typename T>
__device__ __forceinline__ void keep_packed(Vec<T, kVectorSize<T>>& vector) {
  uint32_t words[kVectorBytes / 4];
  memcpy(words, &vector, sizeof(words));
#pragma unroll
  for (uint32_t& word : words) asm volatile("" : "+r"(word));
  memcpy(&vector, words, sizeof(words));
}

template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> from_floats(const float (&values)[kSize]) {
  Vec<T, kSize> vector;
#pragma unroll
  for (int i = 0; i < kSize; ++i) vector.value[i] = from_float<T>(values[i]);
  return vector;
}

// To global memory, in stores of 16 bytes where there are as many. Those of a Vec that is assigned the compiler at
// times takes apart, into stores of four bytes: pixel_norm_held_kernel took 20.4 us so, 13.4 now (512 channels; the end
// of benchmarks/results/h200/tuning/pixel_norm_held.txt).
template <typename T, int kSize>
__device__ __forceinline__ void store_vector(T* target, const Vec<T, kSize>& vector) {
  constexpr int kWhole = static_cast<int>(sizeof(vector)) / kVectorBytes;
#pragma unroll
  for (int i = 0; i < kWhole; ++i) {
    uint32_t words[4];
    memcpy(words, &vector.value[i * kVectorSize<T>], sizeof(words));
    asm volatile(
        "st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target + i * kVectorSize<T>)),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
        : "memory");
  }
  if constexpr (kWhole == 0) *reinterpret_cast<Vec<T, kSize>*>(target) = vector;
}

template <typename S, int kSize>
__device__ __forceinline__ void load_floats_as(const void* data, int64_t offset, bool vectorized, int count,
                                               float (&values)[kSize]) {
  const S* source = static_cast<const S*>(data) + offset;
  if (vectorized) {
    // Two loads of 16 bytes where kSize elements are 32 bytes (fp32 beside a 16-bit tensor).
    constexpr int kPart = kSize < kVectorSize<S> ? kSize : kVectorSize<S>;
#pragma unroll
    for (int part = 0; part < kSize / kPart; ++part) {
      const Vec<S, kPart> vector = *reinterpret_cast<const Vec<S, kPart>*>(source + part * kPart);
      float floats[kPart];
      to_floats(vector, floats);
#pragma unroll
      for (int i = 0; i < kPart; ++i) values[part * kPart + i] = floats[i];
    }
  } else {
    to_floats(load_elements<S, kSize>(source, count), values);
  }
}

// kSize elements of an operand of any dtype as fp32. The branches are uniform: dtype and alignment are the launch's.
template <int kSize>
__device__ __forceinline__ void load_floats(const Operand& operand, int64_t offset, int count, float (&values)[kSize]) {
  switch (operand.dtype) {
    case Dtype::kFloat32:
      return load_floats_as<float>(operand.data, offset, operand.vectorized, count, values);
    case Dtype::kFloat16:
      return load_floats_as<__half>(operand.data, offset, operand.vectorized, count, values);
    case Dtype::kBFloat16:
      return load_floats_as<__nv_bfloat16>(operand.data, offset, operand.vectorized, count, values);
  }
}

// kSize elements of an operand that holds T, or, where the kernel computes in fp32 storage for mixed dtypes (T =
// float), anything.
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> load(const Operand& operand, int64_t offset, int count) {
  if constexpr (std::is_same_v<T, float>) {
    if (operand.dtype != Dtype::kFloat32) {
      Vec<float, kSize> vector;
      load_floats<kSize>(operand, offset, count, vector.value);
      return vector;
    }
  }
  const T* source = static_cast<const T*>(operand.data) + offset;
  if (operand.vectorized) return *reinterpret_cast<const Vec<T, kSize>*>(source);
  return load_elements<T, kSize>(source, count);
}

template <typename S, int kSize>
__device__ __forceinline__ void store_floats_as(void* data, int64_t offset, bool vectorized, int count,
                                                const float (&values)[kSize]) {
  S* target = static_cast<S*>(data) + offset;
  const Vec<S, kSize> vector = from_floats<S, kSize>(values);
  if (vectorized) {
    store_vector(target, vector);
  } else {
    store_elements(target, vector, count);
  }
}

template <typename T, int kSize>
__device__ __forceinline__ void store(const Operand& operand, int64_t offset, int count, const float (&values)[kSize]) {
  if constexpr (std::is_same_v<T, float>) {
    if (operand.dtype == Dtype::kFloat16)
      return store_floats_as<__half>(operand.data, offset, operand.vectorized, count, values);
    if (operand.dtype == Dtype::kBFloat16) {
      return store_floats_as<__nv_bfloat16>(operand.data, offset, operand.vectorized, count, values);
    }
  }
  store_floats_as<T>(operand.data, offset, operand.vectorized, count, values);
}

}  // namespace ltx_kernels
