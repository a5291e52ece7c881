// The row-norm core on the CPU: the sentence of norm.h, a row at a time through fp32 buffers that stay in the L1/L2
// cache.
#include "../norm/norm.h"

#include <algorithm>
#include <vector>

#include "math.h"
#include "rows.h"

namespace ltx_kernels {
namespace {

// Elements that are computed at a time: the first-level cache has no room for whole rows of all operands.
constexpr int64_t kStrip = 512;

// Elements of an operand as fp32: in place where they are that, else converted to the buffer.
LTX_KERNELS_INLINE const float* floats_of(const Operand& operand, int64_t offset, int64_t count, float* buffer) {
  if (operand.dtype == Dtype::kFloat32) return static_cast<const float*>(operand.data) + offset;
  load_row(operand, offset, count, buffer);
  return buffer;
}

// The rows of an operand as fp32: in place where they are that, else converted. Null for an absent operand. A row that
// is the one before, as that of a weight or of a scale that all tokens of an image share, is not converted again.
class RowReader {
 public:
  RowReader(const Operand& operand, int64_t hidden)
      : operand_(operand),
        hidden_(hidden),
        buffer_(operand.data == nullptr || operand.dtype == Dtype::kFloat32 ? 0 : hidden) {}

  LTX_KERNELS_INLINE const float* at(const RowOffsets& row) {
    if (operand_.data == nullptr) return nullptr;
    const int64_t offset = row.of(operand_);
    if (offset != offset_) floats_ = floats_of(operand_, offset, hidden_, buffer_.data());
    offset_ = offset;
    return floats_;
  }

 private:
  const Operand& operand_;
  const int64_t hidden_;
  FloatBuffer buffer_;
  const float* floats_ = nullptr;
  int64_t offset_ = -1;
};

inline const float* advanced(const float* row, int64_t count) { return row == nullptr ? nullptr : row + count; }

// Where a row is computed: in its place where it is fp32, else in the buffer, from which it is stored.
inline float* place_of(const Operand& operand, const RowOffsets& row, float* buffer) {
  return operand.dtype == Dtype::kFloat32 ? static_cast<float*>(operand.data) + row.of(operand) : buffer;
}

// out[i] = f(i). What f reads does not overlap with `out`.
template <typename F>
LTX_KERNELS_INLINE void compute_row(int64_t count, float* __restrict out, F&& f) {
  for (int64_t i = 0; i < count; ++i) out[i] = f(i);
}

LTX_KERNELS_MULTIVERSION void forward_rows(const NormParams& p, int64_t begin, int64_t end) {
  const int64_t hidden = p.rows.hidden;
  const bool sums_are_normed = p.residual.data != nullptr && p.statistic != Statistic::kNone;
  FloatBuffer h_buffer(sums_are_normed ? hidden : 0);
  alignas(kCacheLine) float x_strip[kStrip];
  alignas(kCacheLine) float residual_strip[kStrip];
  alignas(kCacheLine) float y_strip[kStrip];
  RowReader x_rows(p.x, hidden);
  RowReader gate_rows(p.gate, hidden), gate_table_rows(p.gate_table, hidden);
  RowReader weight_rows(p.weight, hidden), bias_rows(p.bias, hidden);
  RowReader scale_rows(p.scale, hidden), scale_table_rows(p.scale_table, hidden);
  RowReader shift_rows(p.shift, hidden), shift_table_rows(p.shift_table, hidden);
  for (int64_t number = begin; number < end; ++number) {
    const RowOffsets row(number, p.rows);
    const float* h = nullptr;
    if (p.residual.data != nullptr) {
      const float* const gates = gate_rows.at(row);
      const float* const tables = gate_table_rows.at(row);
      const bool in_place = p.new_residual.dtype == Dtype::kFloat32;
      float* const sums = place_of(p.new_residual, row, h_buffer.data());
      for (int64_t first = 0; first < hidden; first += kStrip) {
        const int64_t count = std::min(kStrip, hidden - first);
        const float* const x = floats_of(p.x, row.of(p.x) + first, count, x_strip);
        const float* const residual = floats_of(p.residual, row.of(p.residual) + first, count, residual_strip);
        const float* const gate = advanced(gates, first);
        const float* const table = advanced(tables, first);
        float* const sum = in_place || sums_are_normed ? sums + first : y_strip;
        if (gate == nullptr) {
          compute_row(count, sum, [=](int64_t i) { return residual[i] + x[i]; });
        } else if (table == nullptr) {
          compute_row(count, sum, [=](int64_t i) { return residual[i] + gate[i] * x[i]; });
        } else {
          compute_row(count, sum, [=](int64_t i) { return residual[i] + (gate[i] + table[i]) * x[i]; });
        }
        if (!in_place) store_row(p.new_residual, row.of(p.new_residual) + first, count, sum);
      }
      if (!sums_are_normed) continue;
      round_row(p.new_residual.dtype, hidden, sums);
      h = sums;
    } else {
      h = x_rows.at(row);
    }

    const RowMoments moments(p.statistic, p.eps, hidden, h);
    if (p.rstd != nullptr) p.rstd[number] = moments.rstd;

    const float* const weights = weight_rows.at(row);
    const float* const biases = bias_rows.at(row);
    const float* const scales = scale_rows.at(row);
    const float* const scale_tables = scale_table_rows.at(row);
    const float* const shifts = shift_rows.at(row);
    const float* const shift_tables = shift_table_rows.at(row);
    for (int64_t first = 0; first < hidden; first += kStrip) {
      const int64_t count = std::min(kStrip, hidden - first);
      const float* const x = h + first;
      const float* const weight = advanced(weights, first);
      const float* const bias = advanced(biases, first);
      float* const y = p.y.dtype == Dtype::kFloat32 ? place_of(p.y, row, nullptr) + first : y_strip;
      const float offset = p.weight_offset;
      const auto normed = [=](int64_t i) { return moments.of(x[i]); };
      if (weight == nullptr && bias == nullptr) {
        compute_row(count, y, normed);
      } else if (bias == nullptr && !p.cast_before_weight) {
        compute_row(count, y, [=](int64_t i) { return normed(i) * (offset + weight[i]); });
      } else if (weight != nullptr && !p.cast_before_weight) {
        compute_row(count, y, [=](int64_t i) { return normed(i) * (offset + weight[i]) + bias[i]; });
      } else {
        compute_row(count, y, normed);
        if (p.cast_before_weight) round_row(p.y.dtype, count, y);
        for (int64_t i = 0; weight != nullptr && i < count; ++i) y[i] *= offset + weight[i];
        for (int64_t i = 0; bias != nullptr && i < count; ++i) y[i] += bias[i];
      }
      const float* const scale = advanced(scales, first);
      const float* const scale_table = advanced(scale_tables, first);
      if (scale_table != nullptr) {
        for (int64_t i = 0; i < count; ++i) y[i] *= 1.f + scale[i] + scale_table[i];
      } else if (scale != nullptr) {
        for (int64_t i = 0; i < count; ++i) y[i] *= 1.f + scale[i];
      }
      const float* const shift = advanced(shifts, first);
      const float* const shift_table = advanced(shift_tables, first);
      if (shift_table != nullptr) {
        for (int64_t i = 0; i < count; ++i) y[i] += shift[i] + shift_table[i];
      } else if (shift != nullptr) {
        for (int64_t i = 0; i < count; ++i) y[i] += shift[i];
      }
      if (p.silu) {
        for (int64_t i = 0; i < count; ++i) y[i] = silu(y[i]);
      }
      if (y == y_strip) store_row(p.y, row.of(p.y) + first, count, y);
    }
  }
}

// Every step-th row from `first` on; their part of grad_weight is added to `grad_weight`, fp32 [hidden], where it
// is wanted.
LTX_KERNELS_MULTIVERSION void backward_rows(const NormBackwardParams& p, int64_t first, int64_t step,
                                            float* grad_weight) {
  const int64_t hidden = p.rows.hidden;
  FloatBuffer buffer(3 * hidden);
  float* const grad_y = buffer.data();
  float* const normed = grad_y + hidden;
  float* const g = normed + hidden;
  RowReader weight_rows(p.weight, hidden);
  for (int64_t number = first; number < p.rows.count(); number += step) {
    const RowOffsets row(number, p.rows);
    const float rstd = p.rstd[number];
    load_row(p.grad_y, row.of(p.grad_y), hidden, grad_y);
    load_row(p.x, row.of(p.x), hidden, normed);
    for (int64_t i = 0; i < hidden; ++i) normed[i] *= rstd;
    std::copy(grad_y, grad_y + hidden, g);
    if (const float* const weight = weight_rows.at(row)) {
      for (int64_t i = 0; i < hidden; ++i) g[i] *= p.weight_offset + weight[i];
    }
    const float mean = sum_row(hidden, [&](int64_t i) { return g[i] * normed[i]; }) / static_cast<float>(hidden);
    for (int64_t i = 0; i < hidden; ++i) g[i] = rstd * (g[i] - normed[i] * mean);
    store_row(p.grad_x, row.of(p.grad_x), hidden, g);
    if (grad_weight == nullptr) continue;
    if (p.cast_before_weight) round_row(p.x.dtype, hidden, normed);
    for (int64_t i = 0; i < hidden; ++i) grad_weight[i] += grad_y[i] * normed[i];
  }
}

}  // namespace

void norm_forward_cpu(const NormParams& p) {
  torch::stable::parallel_for(0, p.rows.count(), row_grain(p.rows.hidden),
                              [&](int64_t begin, int64_t end) { forward_rows(p, begin, end); });
}

void norm_backward_cpu(const NormBackwardParams& p) {
  // A function of the shape alone: the bits do not depend on the number of threads.
  constexpr int64_t kParts = 128;
  const int64_t parts = std::clamp(p.rows.count() / 4, int64_t{1}, kParts);
  const bool wants_weight = p.grad_weight.data != nullptr;
  std::vector<float> partials(wants_weight ? parts * p.rows.hidden : 0);
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      backward_rows(p, i, parts, wants_weight ? partials.data() + i * p.rows.hidden : nullptr);
  });
  if (!wants_weight) return;
  // In fp64: one column's sum runs over up to kParts parts.
  std::vector<double> sum(p.rows.hidden, 0.);
  for (int64_t i = 0; i < parts; ++i) {
    const float* const part = partials.data() + i * p.rows.hidden;
    for (int64_t column = 0; column < p.rows.hidden; ++column) sum[column] += part[column];
  }
  const std::vector<float> grad_weight(sum.begin(), sum.end());
  store_row(p.grad_weight, 0, p.rows.hidden, grad_weight.data());
}

}  // namespace ltx_kernels
