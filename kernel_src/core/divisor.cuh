// Division of indices by what the launch knows.
#pragma once

#include <cstdint>

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

}  // namespace ltx_kernels
