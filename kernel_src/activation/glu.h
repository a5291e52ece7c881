// Gated activations, as plain data: y = activation(gate)·value, or activation(gate) alone.
#pragma once

#include <initializer_list>

#include "../core/activation.h"
#include "../core/operand.h"

namespace ltx_kernels {

// Operands are [*rows, hidden], all of one dtype.
struct GluParams {
  Rows rows;
  Activation activation = Activation::kGeluErf;
  Operand gate;
  Operand value;  // no data: the activation alone
  Operand y;
};

// Rows that follow each other without a gap in every operand are one long row: no ragged ends then, whatever the hidden
// size.
inline void join_rows(GluParams* params) {
  Rows& rows = params->rows;
  if (rows.sizes[2] != rows.count()) return;
  for (const Operand* operand : {&params->gate, &params->value, &params->y}) {
    if (operand->data != nullptr && rows.sizes[2] > 1 && operand->strides[2] != rows.hidden) return;
  }
  rows.hidden *= rows.sizes[2];
  rows.sizes[2] = 1;
}

int glu_cuda(const GluParams& params, void* stream);
void glu_cpu(const GluParams& params);

}  // namespace ltx_kernels
