// The activations, and the parts of their formulas that both backends share.
#pragma once

#include <cstdint>

namespace ltx_kernels {

enum class Activation : int32_t { kGeluErf, kGeluTanh, kSilu };
constexpr int kActivations = 3;

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693359375f;  // ln 2 in two parts, the first of ten bits
constexpr float kLn2Low = -2.12194440e-4f;

// log2 of e^(-2u), u = √(2/π)·(x + 0.044715·x³) being the argument of tanh in gelu.
constexpr float log2_gelu_tanh(float x) { return x * (-0.102943240f * x * x - 2.30220819f); }

// log2 Φ(-a) for a >= 0, Φ the normal distribution: polynomials fitted such that the error they add to x·Φ(x) stays
// below that of fp32 arithmetic with erf, in the tail too, where 1 + erf cancels. kExact: for results of 24 bits, else
// of 11. The last coefficients are negative, so Φ goes to 0 beyond a = 6.
template <bool kExact>
constexpr float log2_normal_tail(float a) {
  float power = 0.f;
  if constexpr (kExact) {
    power = -5.07004856e-08f;
    power = power * a + 1.29893294e-06f;
    power = power * a - 1.45874646e-05f;
    power = power * a + 9.22013569e-05f;
    power = power * a - 0.000318742328f;
    power = power * a + 5.57318999e-05f;
    power = power * a + 0.00690321391f;
    power = power * a - 0.0524245091f;
    power = power * a - 0.459223181f;
    power = power * a - 1.15110421f;
  } else {
    power = -2.09493464e-06f;
    power = power * a + 3.07674636e-05f;
    power = power * a - 0.000146452992f;
    power = power * a - 0.000229926591f;
    power = power * a + 0.00718050078f;
    power = power * a - 0.052573327f;
    power = power * a - 0.459184617f;
    power = power * a - 1.15110755f;
  }
  return power * a - 1.f;
}

}  // namespace ltx_kernels
