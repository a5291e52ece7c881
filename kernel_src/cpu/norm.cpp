// The row-norm core on the CPU: the sentence of norm.h, a row at a time through fp32 buffers that stay in the L1/L2
// cache.
#include "../norm/norm.h"

#include <algorithm>
#include <vector>

#include "math.h"
#include "rows.h"

namespace ltx_kernels {
namespace {

// values[i] += operand, nothing for an absent one.
LTX_KERNELS_INLINE void add_operand(const Operand& operand, const RowOffsets& row, int64_t hidden,
                                    float* __restrict values) {
  if (operand.data == nullptr) return;
  for_each_element(operand, row.of(operand), hidden, [values](int64_t i, float value) { values[i] += value; });
}

// values[i] *= base + operand + table, nothing for an absent operand. `scratch` holds a row.
LTX_KERNELS_INLINE void multiply_operand(float base, const Operand& operand, const Operand& table,
                                         const RowOffsets& row, int64_t hidden, float* __restrict scratch,
                                         float* __restrict values) {
  if (operand.data == nullptr) return;
  if (table.data == nullptr) {
    for_each_element(operand, row.of(operand), hidden, [=](int64_t i, float value) { values[i] *= base + value; });
    return;
  }
  load_row(operand, row.of(operand), hidden, scratch);
  for_each_element(table, row.of(table), hidden,
                   [=](int64_t i, float value) { values[i] *= base + scratch[i] + value; });
}

LTX_KERNELS_MULTIVERSION void forward_rows(const NormParams& p, int64_t begin, int64_t end) {
  const int64_t hidden = p.rows.hidden;
  std::vector<float> buffer(2 * hidden);
  float* const h = buffer.data();
  float* const scratch = h + hidden;
  for (int64_t number = begin; number < end; ++number) {
    const RowOffsets row(number, p.rows);
    load_row(p.x, row.of(p.x), hidden, h);
    if (p.residual.data != nullptr) {
      multiply_operand(0.f, p.gate, p.gate_table, row, hidden, scratch, h);
      add_operand(p.residual, row, hidden, h);
      store_row(p.new_residual, row.of(p.new_residual), hidden, h);
      if (p.statistic == Statistic::kNone) continue;
      round_row(p.new_residual.dtype, hidden, h);
    }

    const float rstd = normalize_row(p.statistic, p.eps, hidden, h);
    if (p.rstd != nullptr) p.rstd[number] = rstd;
    if (p.cast_before_weight) round_row(p.y.dtype, hidden, h);
    multiply_operand(p.weight_offset, p.weight, {}, row, hidden, scratch, h);
    add_operand(p.bias, row, hidden, h);
    multiply_operand(1.f, p.scale, p.scale_table, row, hidden, scratch, h);
    add_operand(p.shift, row, hidden, h);
    add_operand(p.shift_table, row, hidden, h);
    if (p.silu) {
      for (int64_t i = 0; i < hidden; ++i) h[i] = silu(h[i]);
    }
    store_row(p.y, row.of(p.y), hidden, h);
  }
}

// Every partials-th row from `first` on; their part of grad_weight goes to row `first` of the partial sums.
LTX_KERNELS_MULTIVERSION void backward_rows(const NormBackwardParams& p, int64_t first, int64_t step) {
  const int64_t hidden = p.rows.hidden;
  std::vector<float> buffer(4 * hidden);
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
  torch::stable::parallel_for(0, p.rows.count(), row_grain(p.rows.hidden),
                              [&](int64_t begin, int64_t end) { forward_rows(p, begin, end); });
}

void norm_backward_cpu(const NormBackwardParams& p) {
  const int64_t partials = norm_backward_partials(p.rows);
  torch::stable::parallel_for(0, partials, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) backward_rows(p, i, partials);
  });
  if (p.grad_weight_partials == nullptr) return;
  // In fp64: one column's sum runs over hundreds of parts.
  std::vector<double> sum(p.rows.hidden, 0.);
  for (int64_t i = 0; i < partials; ++i) {
    const float* const part = p.grad_weight_partials + i * p.rows.hidden;
    for (int64_t column = 0; column < p.rows.hidden; ++column) sum[column] += part[column];
  }
  const std::vector<float> grad_weight(sum.begin(), sum.end());
  store_row(p.grad_weight, 0, p.rows.hidden, grad_weight.data());
}

}  // namespace ltx_kernels
