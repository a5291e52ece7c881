// The gated activation core on the CPU: one loop a row, of which each combination of dtype and activation is compiled
// to vectorise.
#include "../activation/glu.h"

#include <algorithm>
#include <type_traits>

#include "math.h"
#include "rows.h"

namespace ltx_kernels {
namespace {

// Elements of a task: a long row is several.
constexpr int64_t kPiece = 4096;

struct Float32 {
  using Storage = float;
  static float load(float value) { return value; }
  static float store(float value) { return value; }
};
struct BFloat16 {
  using Storage = uint16_t;
  static float load(uint16_t bits) { return bfloat16_to_float(bits); }
  // A NaN here is one of the inputs, or the one that arithmetic makes: its lowest bits are 0.
  static uint16_t store(float value) { return finite_to_bfloat16(value); }
};

// Two neighbouring bf16 elements. Each is a shift or a mask away from a float, where a vector of single ones would be
// widened and narrowed: 5 to 9% of an activation.
struct BFloat16Pair {
  float low, high;

  BFloat16Pair(float low, float high) : low(low), high(high) {}
  explicit BFloat16Pair(const uint16_t* source) {
    uint32_t bits;
    std::memcpy(&bits, source, sizeof(bits));
    low = bit_cast<float>(bits << 16);
    high = bit_cast<float>(bits & 0xffff0000u);
  }
  void store(uint16_t* target) const {
    const uint32_t bits = BFloat16::store(low) | static_cast<uint32_t>(BFloat16::store(high)) << 16;
    std::memcpy(target, &bits, sizeof(bits));
  }
};

struct Float16 {
  using Storage = uint16_t;
};

// y[i] = f(gate[i])·value[i]; no `value`: f(gate[i]). The tensors do not overlap: y is new.
template <typename T, typename F>
LTX_KERNELS_INLINE void activate_piece(const typename T::Storage* gate, const typename T::Storage* value, int64_t count,
                                       typename T::Storage* __restrict y, F&& f) {
  if constexpr (std::is_same_v<T, Float16>) {  // converted a run at a time
    constexpr int64_t kRun = 512;
    alignas(kCacheLine) float gates[kRun], values[kRun], results[kRun];
    for (int64_t first = 0; first < count; first += kRun) {
      const int64_t run = std::min(kRun, count - first);
      load_halves(gate + first, run, gates);
      if (value != nullptr) load_halves(value + first, run, values);
      activate_piece<Float32>(gates, value != nullptr ? values : nullptr, run, results, f);
      store_halves(results, run, y + first);
    }
  } else {
    constexpr bool kPairs = std::is_same_v<T, BFloat16>;
    int64_t i = 0;
    if (value != nullptr) {
      if constexpr (kPairs) {
        for (; i + 2 <= count; i += 2) {
          const BFloat16Pair g(gate + i), v(value + i);
          BFloat16Pair(f(g.low) * v.low, f(g.high) * v.high).store(y + i);
        }
      }
      for (; i < count; ++i) y[i] = T::store(f(T::load(gate[i])) * T::load(value[i]));
    } else {
      if constexpr (kPairs) {
        for (; i + 2 <= count; i += 2) {
          const BFloat16Pair g(gate + i);
          BFloat16Pair(f(g.low), f(g.high)).store(y + i);
        }
      }
      for (; i < count; ++i) y[i] = T::store(f(T::load(gate[i])));
    }
  }
}

template <typename T>
LTX_KERNELS_INLINE void activate_pieces(const GluParams& p, int64_t row_pieces, int64_t begin, int64_t end) {
  using Storage = typename T::Storage;
  constexpr bool kExact = std::is_same_v<T, Float32>;
  for (int64_t number = begin; number < end; ++number) {
    const RowOffsets row(number / row_pieces, p.rows);
    const int64_t first = number % row_pieces * kPiece;
    const int64_t count = std::min(kPiece, p.rows.hidden - first);
    const auto* gate = static_cast<const Storage*>(p.gate.data) + row.of(p.gate) + first;
    const auto* value =
        p.value.data != nullptr ? static_cast<const Storage*>(p.value.data) + row.of(p.value) + first : nullptr;
    auto* y = static_cast<Storage*>(p.y.data) + row.of(p.y) + first;
    switch (p.activation) {
      case Activation::kGeluErf:
        activate_piece<T>(gate, value, count, y, [](float x) { return gelu_erf<kExact>(x); });
        break;
      case Activation::kGeluTanh:
        activate_piece<T>(gate, value, count, y, [](float x) { return gelu_tanh<kExact>(x); });
        break;
      case Activation::kSilu:
        activate_piece<T>(gate, value, count, y, [](float x) { return silu<kExact>(x); });
        break;
    }
  }
}

LTX_KERNELS_MULTIVERSION void activate_pieces(const GluParams& p, int64_t row_pieces, int64_t begin, int64_t end) {
  switch (p.y.dtype) {
    case Dtype::kFloat32:
      return activate_pieces<Float32>(p, row_pieces, begin, end);
    case Dtype::kFloat16:
      return activate_pieces<Float16>(p, row_pieces, begin, end);
    case Dtype::kBFloat16:
      return activate_pieces<BFloat16>(p, row_pieces, begin, end);
  }
}

}  // namespace

void glu_cpu(const GluParams& params) {
  GluParams p = params;
  join_rows(&p);
  const int64_t row_pieces = (p.rows.hidden + kPiece - 1) / kPiece;
  torch::stable::parallel_for(0, p.rows.count() * row_pieces, row_grain(std::min(kPiece, p.rows.hidden)),
                              [&](int64_t begin, int64_t end) { activate_pieces(p, row_pieces, begin, end); });
}

}  // namespace ltx_kernels
