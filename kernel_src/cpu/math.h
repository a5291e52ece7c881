// Activations on the CPU, without calls and branches, so that loops over them vectorise on every architecture (std::exp
// does not).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../core/activation.h"
#include "rows.h"

namespace ltx_kernels {

// |x|, at most `bound`, which a NaN becomes. As integers: comparisons of floats GCC makes branches of, and a vectorised
// loop then computes all of them and selects.
inline float bounded_magnitude(float bound, float x) {
  return bit_cast<float>(std::min(bit_cast<int32_t>(x) & 0x7fffffff, bit_cast<int32_t>(bound)));
}

// x to the nearest integer, as a number and, plus 127, in the exponent of a float: 2 to it, 0 below 2^-126, infinity at
// 2^128. For -2^22 < x <= 128.5.
struct Power {
  float whole;
  float power;

  explicit Power(float x) {
    constexpr float kZero = 12582912.f;  // 1.5·2^23: the last bit of the sum is worth 1
    constexpr float kMagic = kZero + 127.f;
    const float sum = x + kMagic;
    whole = sum - kMagic;
    const int32_t bits = std::max(bit_cast<int32_t>(sum), bit_cast<int32_t>(kZero));
    power = bit_cast<float>(static_cast<uint32_t>(bits) << 23);
  }
};

// 2^x for |x| <= 0.5, to 1 ulp; not kExact, for results of 11 bits: to 2.8e-6.
template <bool kExact>
inline float exp2_part(float x) {
  float y;
  if constexpr (kExact) {
    y = 1.5403530e-4f;
    y = y * x + 1.3333558e-3f;
    y = y * x + 9.6181291e-3f;
    y = y * x + 5.5504109e-2f;
    y = y * x + 2.4022651e-1f;
    y = y * x + 6.9314718e-1f;
  } else {
    y = 9.5828529e-3f;
    y = y * x + 5.5906426e-2f;
    y = y * x + 2.4024099e-1f;
    y = y * x + 6.9312418e-1f;
  }
  return y * x + 1.f;
}

// 2^x for -2^22 < x <= 128: 0 below 2^-126.
template <bool kExact>
inline float bounded_exp2(float x) {
  const Power p(x);
  return exp2_part<kExact>(x - p.whole) * p.power;
}

// 2^x and e^x: 0 below 2^-126, infinity from 2^128 on. A NaN is lost: the formulas below multiply by their argument.
template <bool kExact>
inline float fast_exp2(float x) {
  return bounded_exp2<kExact>(std::copysign(bounded_magnitude(128.f, x), x));
}

inline float fast_exp(float x) {
  x = std::copysign(bounded_magnitude(88.8f, x), x);
  const Power p(x * kLog2E);
  return exp2_part<true>(((x - p.whole * kLn2High) - p.whole * kLn2Low) * kLog2E) * p.power;
}

// kExact: for results of 24 bits, else of 11.
template <bool kExact = true>
inline float silu(float x) {
  return x / (1.f + (kExact ? fast_exp(-x) : fast_exp2<false>(-kLog2E * x)));
}
template <bool kExact = true>
inline float gelu_tanh(float x) {
  return x / (1.f + fast_exp2<kExact>(log2_gelu_tanh(x)));
}
// x·Φ(x) = |x|·(1 - Φ(-|x|)) for a positive x, else |x|·(0 - Φ(-|x|)), the 1 or 0 made of x's sign: less to compute
// than both and a choice.
template <bool kExact = true>
inline float gelu_erf(float x) {
  const float tail = bounded_exp2<kExact>(log2_normal_tail<kExact>(bounded_magnitude(16.f, x)));
  const int32_t negative = bit_cast<int32_t>(x) >> 31;
  const float one_if_positive = bit_cast<float>(~negative & bit_cast<int32_t>(1.f));
  return std::fabs(x) * (one_if_positive - tail);
}

}  // namespace ltx_kernels
