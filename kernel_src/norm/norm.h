// The sentence of every norm-like op, as plain data:
//   h = residual + (gate + gate_table)·x,  or x without a residual
//   y = activation((norm(h)·(weight_offset + weight) + bias)·(1 + scale + scale_table) + (shift + shift_table))
#pragma once

#include "../core/operand.h"

namespace ltx_kernels {

enum class Statistic : int32_t { kNone, kRms, kLayer };  // kNone: only new_residual is wanted

// Operands are [*rows, hidden]; one without data is left out of the sentence. What every norm reads stands first: a
// kernel's parameters are fetched a cache line at a time, which a small launch waits for.
struct NormParams {
  Rows rows;
  Operand x;
  Operand y;
  Operand weight;  // [hidden]
  float eps = 0.f;
  float weight_offset = 0.f;
  Statistic statistic = Statistic::kRms;
  bool cast_before_weight = false;  // round norm(h) to y's dtype before the weight, as Llama does
  bool silu = false;
  float* rstd = nullptr;  // [rows], kept for a backward
  Operand bias;           // [hidden]
  Operand scale, scale_table, shift, shift_table;
  Operand residual, gate, gate_table;
  Operand new_residual;
};

// Gradients of y = norm(x)·(weight_offset + weight) for the rms statistic.
struct NormBackwardParams {
  Rows rows;
  Operand grad_y, x;                      // [*rows, hidden]
  Operand weight;                         // [hidden]
  Operand grad_x;                         // [*rows, hidden]
  const float* rstd = nullptr;            // [rows]
  float* grad_weight_partials = nullptr;  // [partials, hidden] fp32
  int64_t partials = 0;                   // 0: grad_weight is summed without them
  Operand grad_weight;                    // [hidden], no data: not wanted
  float weight_offset = 0.f;
  bool cast_before_weight = false;  // the weight saw norm(x) rounded to x's dtype
};

// Columns of a row that a block of the fused backward holds.
constexpr int64_t kFusedColumns = 8192;

// How the fused backward is spread: tuning as data, measured on an H200
// (benchmarks/results/h200/tuning/norm_backward.txt, norm_backward_few_rows.txt, spreads_and_hints.txt).
struct BackwardSpread {
  int segments;       // blocks a row, a cluster where there are several; 0: it is too long
  int walkers;        // blocks, or clusters, that walk over the rows: as many as the 132 SMs of an H100 hold at a time
  int block_threads;  // at least
  int few_rows;       // up to so many, other blocks sum grad_weight, from grad_y and x
};

inline BackwardSpread norm_backward_spread(int64_t hidden) {
  if (hidden <= 2048) return {1, 264, 256, 256};
  if (hidden <= kFusedColumns) return {1, 132, 512, 256};
  if (hidden <= 2 * kFusedColumns) return {2, 66, 512, 64};
  // A cluster lies within a GPC, whose SMs are no multiple of 4 or 8: [4096, 32768] bf16 takes 267 us with 30 clusters
  // and 488 with 31, which do not fit at a time. How many do differs from chip to chip.
  if (hidden <= 4 * kFusedColumns) return {4, 28, 512, 0};
  if (hidden <= 8 * kFusedColumns) return {8, 14, 512, 0};
  return {0, 0, 0, INT32_MAX};
}

// Rows of the fp32 scratch that the weight gradient is summed from, one for each walker that finds four rows; none
// where the rows are few. A function of the shape alone, so that bits agree across GPUs that run the same kernel.
inline int64_t norm_backward_partials(const Rows& rows) {
  const BackwardSpread spread = norm_backward_spread(rows.hidden);
  if (rows.count() <= spread.few_rows) return 0;
  const int64_t least = (rows.count() + 3) / 4;
  return least < spread.walkers ? least : spread.walkers;
}

// Each returns a cudaError_t as int; the stream is a cudaStream_t.
int norm_forward_cuda(const NormParams& params, void* stream);
int norm_backward_cuda(const NormBackwardParams& params, void* stream);

void norm_forward_cpu(const NormParams& params);
void norm_backward_cpu(const NormBackwardParams& params);

}  // namespace ltx_kernels
