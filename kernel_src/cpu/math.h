// Activations on the CPU, without calls and branches, so that loops over them vectorise on every architecture (std::exp
// does not).
#pragma once

#include <cstdint>

#include "../core/activation.h"
#include "rows.h"

namespace ltx_kernels {

// x to the nearest integer, as a number and, plus 127, in the exponent of a float: 2 to it. For -127 <= x <= 128.
struct Power {
  float whole;
  float power;

  explicit Power(float x) {
    constexpr float kMagic = 12582912.f + 127.f;  // 1.5·2^23: the last bit of the sum is worth 1
    const float sum = x + kMagic;
    whole = sum - kMagic;
    power = bit_cast<float>(bit_cast<uint32_t>(sum) << 23);
  }
};

// 2^x for |x| <= 0.5, to 1 ulp.
inline float exp2_part(float x) {
  float y = 1.5403530e-4f;
  y = y * x + 1.3333558e-3f;
  y = y * x + 9.6181291e-3f;
  y = y * x + 5.5504109e-2f;
  y = y * x + 2.4022651e-1f;
  y = y * x + 6.9314718e-1f;
  return y * x + 1.f;
}

// Not below `low`, not above `high`; a NaN stays one.
inline float at_least(float low, float x) { return x < low ? low : x; }
inline float at_most(float high, float x) { return x > high ? high : x; }

// 2^x and e^x: 0 below 2^-127, infinity from 2^128 on.
inline float fast_exp2(float x) {
  x = at_most(128.f, at_least(-127.f, x));
  const Power p(x);
  return exp2_part(x - p.whole) * p.power;
}

inline float fast_exp(float x) {
  x = at_most(88.8f, at_least(-88.1f, x));
  const Power p(x * kLog2E);
  return exp2_part(((x - p.whole * kLn2High) - p.whole * kLn2Low) * kLog2E) * p.power;
}

inline float silu(float x) { return x / (1.f + fast_exp(-x)); }
inline float gelu_tanh(float x) { return x / (1.f + fast_exp2(log2_gelu_tanh(x))); }
template <bool kExact>
inline float gelu_erf(float x) {
  const float tail = fast_exp2(log2_normal_tail<kExact>(x < 0.f ? -x : x));
  return x * (x > 0.f ? 1.f - tail : tail);
}

}  // namespace ltx_kernels
