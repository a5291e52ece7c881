// Division of indices by what the launch knows (Granlund and Montgomery, "Division by Invariant Integers using
// Multiplication", 1994).
#pragma once

#include <cstdint>

#include "broadcast.cuh"

namespace ltx_kernels {

// Divides a number below 2^31, for two instructions in place of twenty.
struct Divisor {
  unsigned value = 1;
  unsigned multiplier = 0;  // 2^(31 + digits) / value, rounded up; digits: of value - 1
  unsigned shift = 0;       // digits - 1

  Divisor() = default;
  explicit Divisor(int64_t divisor) : value(static_cast<unsigned>(divisor)) {
    int digits = 0;
    while ((int64_t{1} << digits) < divisor) ++digits;
    if (digits == 0) return;
    multiplier = static_cast<unsigned>(((uint64_t{1} << (31 + digits)) + divisor - 1) / divisor);
    shift = digits - 1;
  }

  __device__ __forceinline__ int divide(int number, int* remainder) const {
    const int quotient = value == 1 ? number : __umulhi(number, multiplier) >> shift;
    *remainder = number - quotient * static_cast<int>(value);
    return quotient;
  }
};

// Divides any number: two multiplications while 31 bits hold it and the divisor, else the division of broadcast.cuh.
struct WideDivisor {
  int64_t value;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  explicit WideDivisor(int64_t divisor) : value(divisor) {
    while ((int64_t{1} << shift) < divisor) ++shift;
    if (shift < 32) multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }

  // Quotient and remainder.
  __device__ __forceinline__ int64_t divide(int64_t dividend, int64_t* remainder) const {
    if ((dividend | value) >> 31 != 0) return ltx_kernels::divide(dividend, value, remainder);
    const auto low = static_cast<uint32_t>(dividend);
    const uint32_t quotient = (__umulhi(low, multiplier) + low) >> shift;
    *remainder = low - quotient * static_cast<uint32_t>(value);
    return quotient;
  }
};

}  // namespace ltx_kernels
