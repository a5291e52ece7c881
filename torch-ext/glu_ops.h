// The gated activations: from tensors to GluParams (kernel_src/activation/glu.h) and to a backend. No maths here.
#pragma once

#include "../kernel_src/activation/glu.h"
#include "backend.h"
#include "checks.h"

namespace ltx_kernels {

template <typename Backend>
Tensor run_glu(const Tensor& gate, const OptionalTensor& value, int64_t activation) {
  if (activation < 0 || activation >= kActivations)
    fail("activation is ", activation, "; 0 (gelu), 1 (gelu, tanh) or 2 (silu) is needed");
  GluParams params;
  params.activation = static_cast<Activation>(activation);
  RowSpace space(gate);
  space.add(gate, "x", &params.gate);
  space.add(value, "up", &params.value);
  Tensor y = allocate_like(gate);
  space.add(y, "output", &params.y);
  params.rows = space.fold();
  if (params.rows.count() > 0 && params.rows.hidden > 0) Backend::glu(params, gate);
  return y;
}

inline void check_has_rows(const Tensor& x) {
  if (x.dim() < 1) fail("x has shape []; at least one dimension is needed");
}

// x [*, 2·D]: the gate and the value side by side.
template <typename Backend>
Tensor glu(Tensor x, int64_t activation, bool gate_first) {
  check_has_rows(x);
  dtype_of(x, "x");
  const int64_t last = x.dim() - 1;
  const int64_t half = x.size(last) / 2;
  if (x.size(last) % 2 != 0)
    fail("x has shape ", shape_of(x), "; an even last dimension is needed, the gate and the value side by side");
  if (x.stride(last) != 1) x = contiguous_copy(x);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = half;
  const Tensor first = view_of(x, sizes, strides_of(x));
  const Tensor second = view_of(x, sizes, strides_of(x), half);
  return gate_first ? run_glu<Backend>(first, second, activation) : run_glu<Backend>(second, first, activation);
}

// activation(x)·up, or activation(x).
template <typename Backend>
Tensor activate(Tensor x, OptionalTensor up, int64_t activation) {
  check_has_rows(x);
  dtype_of(x, "x");
  if (up.has_value()) {
    check_same_shape(*up, "up", x, "x");
    check_device(*up, "up", x, "x");
    if (dtype_of(*up, "up") != dtype_of(x, "x")) {
      fail("up has dtype ", name_of(up->scalar_type()), "; the dtype of x is needed: ", name_of(x.scalar_type()));
    }
  }
  return run_glu<Backend>(x, up, activation);
}

}  // namespace ltx_kernels
