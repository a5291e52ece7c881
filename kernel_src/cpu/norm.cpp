// The row-norm core on the CPU: the sentence of norm.h, a row at a time through fp32 buffers that stay in the L1/L2 cache.
#include "../norm/norm.h"

#include <algorithm>
#include <vector>

#include "rows.h"

namespace ltx_kernels {
namespace {

// values[i] += operand, nothing for an absent one. `scratch` holds a row.
inline void add_operand(const Operand& operand, const RowOffsets& row, int64_t hidden, float* scratch, float* values) {
  if (operand.data == nullptr) return;
  load_row(operand, row.of(operand), hidden, scratch);
  for (int64_t i = 0; i < hidden; ++i) values[i] += scratch[i];
}

// values[i] *= base + operand + table, nothing for an absent operand. `scratch` holds two rows.
inline void multiply_operand(float base, const Operand& operand, const Operand& table, const RowOffsets& row, int64_t hidden, float* scratch,
                             float* values) {
  if (operand.data == nullptr) return;
  float* const factor = scratch + hidden;
  std::fill(factor, factor + hidden, base);
  add_operand(operand, row, hidden, scratch, factor);
  add_operand(table, row, hidden, scratch, factor);
  for (int64_t i = 0; i < hidden; ++i) values[i] *= factor[i];
}

LTX_KERNELS_MULTIVERSION void forward_rows(const NormParams& p, int64_t begin, int64_t end) {
  const int64_t hidden = p.rows.hidden;
  std::vector<float> buffer(3 * hidden);
  float* const h = buffer.data();
  float* const scratch = h + hidden;
  for (int64_t number = begin; number < end; ++number) {
    const RowOffsets row(number, p.rows);
    load_row(p.x, row.of(p.x), hidden, h);
    if (p.residual.data != nullptr) {
      multiply_operand(0.f, p.gate, p.gate_table, row, hidden, scratch, h);
      add_operand(p.residual, row, hidden, scratch, h);
      store_row(p.new_residual, row.of(p.new_residual), hidden, h);
      round_row(p.new_residual.dtype, hidden, h);
    }
    if (p.statistic == Statistic::kNone) continue;

    const float mean = p.statistic == Statistic::kLayer ? sum_row(hidden, [&](int64_t i) { return h[i]; }) / static_cast<float>(hidden) : 0.f;
    const float squares = sum_row(hidden, [&](int64_t i) { return (h[i] - mean) * (h[i] - mean); });
    const float rstd = 1.f / std::sqrt(squares / static_cast<float>(hidden) + p.eps);
    if (p.rstd != nullptr) p.rstd[number] = rstd;

    for (int64_t i = 0; i < hidden; ++i) h[i] = (h[i] - mean) * rstd;
    if (p.cast_before_weight) round_row(p.y.dtype, hidden, h);
    multiply_operand(p.weight_offset, p.weight, {}, row, hidden, scratch, h);
    add_operand(p.bias, row, hidden, scratch, h);
    multiply_operand(1.f, p.scale, p.scale_table, row, hidden, scratch, h);
    add_operand(p.shift, row, hidden, scratch, h);
    add_operand(p.shift_table, row, hidden, scratch, h);
    if (p.silu) {
      for (int64_t i = 0; i < hidden; ++i) h[i] = h[i] / (1.f + std::exp(-h[i]));
    }
    store_row(p.y, row.of(p.y), hidden, h);
  }
}

// Every partials-th row from `first` on; their part of grad_weight goes to row `first` of the partial sums.
LTX_KERNELS_MULTIVERSION void backward_rows(const NormBackwardParams& p, int64_t first, int64_t step) {
  const int64_t hidden = p.rows.hidden;
  std::vector<float> buffer(5 * hidden);
  float* const grad_y = buffer.data();
  float* const normed = grad_y + hidden;
  float* const g = normed + hidden;
  float* const scratch = g + hidden;
  float* const grad_weight = p.grad_weight_partials != nullptr ? p.grad_weight_partials + first * hidden : nullptr;
  if (grad_weight != nullptr) std::fill(grad_weight, grad_weight + hidden, 0.f);
  for (int64_t number = first; number < p.rows.count(); number += step) {
    const RowOffsets row(number, p.rows);
    const float rstd = p.rstd[number];
    load_row(p.grad_y, row.of(p.grad_y), hidden, grad_y);
    load_row(p.x, row.of(p.x), hidden, normed);
    for (int64_t i = 0; i < hidden; ++i) normed[i] *= rstd;
    std::copy(grad_y, grad_y + hidden, g);
    multiply_operand(p.weight_offset, p.weight, {}, row, hidden, scratch, g);
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
  torch::stable::parallel_for(0, p.rows.count(), row_grain(p.rows.hidden), [&](int64_t begin, int64_t end) { forward_rows(p, begin, end); });
}

void norm_backward_cpu(const NormBackwardParams& p) {
  const int64_t partials = norm_backward_partials(p.rows);
  torch::stable::parallel_for(0, partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) backward_rows(p, i, partials);
  });
  if (p.grad_weight_partials == nullptr) return;
  std::vector<float> sum(p.rows.hidden, 0.f);
  for (int64_t i = 0; i < partials; ++i) {
    const float* const part = p.grad_weight_partials + i * p.rows.hidden;
    for (int64_t column = 0; column < p.rows.hidden; ++column) sum[column] += part[column];
  }
  store_row(p.grad_weight, 0, p.rows.hidden, sum.data());
}

}  // namespace ltx_kernels
