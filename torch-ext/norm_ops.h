// The ops of the norm family: from tensors to NormParams (kernel_src/norm/norm.h) and to a backend. No maths here.
#pragma once

#include <tuple>

#include "../kernel_src/norm/norm.h"
#include "backend.h"
#include "checks.h"

namespace ltx_kernels {

// [hidden] or anything else of the sentence, on x's device, ready to be read in place.
class NormArguments {
 public:
  NormArguments(const Tensor& x, Statistic statistic, double eps) : x_(x), space_((check_has_hidden(x, "x"), x)) {
    params.statistic = statistic;
    params.eps = static_cast<float>(eps);
    space_.add(x, "x", &params.x);
  }

  // A tensor that broadcasts to x.
  void broadcast(const OptionalTensor& tensor, const char* name, Operand* target) {
    if (!tensor.has_value()) return;
    check_device(*tensor, name, x_, "x");
    space_.add(tensor, name, target);
  }

  // The table added to a modulation; alone it has no meaning.
  void table(const OptionalTensor& tensor, const char* name, const OptionalTensor& modulation,
             const char* modulation_name, Operand* target) {
    if (tensor.has_value() && !modulation.has_value())
      fail(name, " is given without ", modulation_name, "; it is added to it");
    broadcast(tensor, name, target);
  }

  // A weight or bias: [hidden], nothing else.
  void vector(const OptionalTensor& tensor, const char* name, Operand* target) {
    if (!tensor.has_value()) return;
    const int64_t hidden = x_.size(x_.dim() - 1);
    if (tensor->dim() != 1 || tensor->size(0) != hidden) {
      fail(name, " has shape ", shape_of(*tensor), "; [", hidden, "], the last dimension of x, is needed");
    }
    broadcast(tensor, name, target);
  }

  // A tensor of x's shape.
  void full(const Tensor& tensor, const char* name, Operand* target) {
    check_same_shape(tensor, name, x_, "x");
    broadcast(tensor, name, target);
  }

  Tensor output(const Tensor& like, Operand* target) {
    Tensor tensor = allocate_like(like);
    space_.add(tensor, "output", target);
    return tensor;
  }

  template <typename Backend>
  void run() {
    params.rows = space_.fold();
    if (params.rows.count() > 0 && params.rows.hidden > 0) Backend::norm_forward(params, x_);
  }

  NormParams params;

 private:
  const Tensor& x_;
  RowSpace space_;
};

inline Statistic statistic_of(bool layer) { return layer ? Statistic::kLayer : Statistic::kRms; }

// y, or y and rstd [*leading] fp32 where `rstd` is given a place.
template <typename Backend>
Tensor rms_norm_forward(const Tensor& x, const OptionalTensor& weight, double eps, double weight_offset,
                        bool cast_before_weight, OptionalTensor* rstd) {
  NormArguments arguments(x, Statistic::kRms, eps);
  NormParams& params = arguments.params;
  params.weight_offset = static_cast<float>(weight_offset);
  params.cast_before_weight = cast_before_weight;
  arguments.vector(weight, "weight", &params.weight);
  Tensor y = arguments.output(x, &params.y);
  if (rstd != nullptr) {
    std::vector<int64_t> leading = sizes_of(x);
    leading.pop_back();
    *rstd = allocate(leading, ScalarType::Float, x);
    params.rstd = static_cast<float*>((*rstd)->data_ptr());
  }
  arguments.template run<Backend>();
  return y;
}

template <typename Backend>
Tensor rms_norm(Tensor x, OptionalTensor weight, double eps, double weight_offset, bool cast_before_weight) {
  return rms_norm_forward<Backend>(x, weight, eps, weight_offset, cast_before_weight, nullptr);
}

// Also returns rstd, which the backward needs.
template <typename Backend>
std::tuple<Tensor, Tensor> rms_norm_with_rstd(Tensor x, OptionalTensor weight, double eps, double weight_offset,
                                              bool cast_before_weight) {
  OptionalTensor rstd;
  Tensor y = rms_norm_forward<Backend>(x, weight, eps, weight_offset, cast_before_weight, &rstd);
  return {y, *rstd};
}

// (grad_x, grad_weight); grad_weight is empty ([0]) where it is not wanted or there is no weight.
template <typename Backend>
std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad_y, Tensor x, OptionalTensor weight, Tensor rstd,
                                             double weight_offset, bool cast_before_weight, bool wants_grad_weight) {
  check_has_hidden(x, "x");
  check_same_shape(grad_y, "grad_y", x, "x");
  check_device(grad_y, "grad_y", x, "x");
  if (dtype_of(grad_y, "grad_y") != dtype_of(x, "x")) {
    fail("grad_y has dtype ", name_of(grad_y.scalar_type()), "; the dtype of x is needed: ", name_of(x.scalar_type()));
  }
  NormBackwardParams params;
  params.weight_offset = static_cast<float>(weight_offset);
  params.cast_before_weight = cast_before_weight;
  params.rstd = static_cast<const float*>(rstd.data_ptr());
  RowSpace space(x);
  space.add(grad_y, "grad_y", &params.grad_y);
  space.add(x, "x", &params.x);
  space.add(weight, "weight", &params.weight);
  Tensor grad_x = allocate_like(x);
  space.add(grad_x, "grad_x", &params.grad_x);
  params.rows = space.fold();

  wants_grad_weight = wants_grad_weight && weight.has_value();
  Tensor grad_weight = wants_grad_weight ? allocate_like(*weight) : allocate({0}, x.scalar_type(), x);
  OptionalTensor partials;
  if (wants_grad_weight) {
    params.partials = Backend::partial_sums(params.rows);
    if (params.partials > 0) {
      partials = allocate({params.partials, params.rows.hidden}, ScalarType::Float, x);
      params.grad_weight_partials = static_cast<float*>(partials->data_ptr());
    }
    params.grad_weight.data = grad_weight.data_ptr();
    params.grad_weight.dtype = dtype_of(grad_weight, "weight");
  }
  if (params.rows.hidden > 0) Backend::norm_backward(params, x);
  return {grad_x, grad_weight};
}

template <typename Backend>
Tensor layer_norm(Tensor x, OptionalTensor weight, OptionalTensor bias, double eps) {
  NormArguments arguments(x, Statistic::kLayer, eps);
  NormParams& params = arguments.params;
  arguments.vector(weight, "weight", &params.weight);
  arguments.vector(bias, "bias", &params.bias);
  Tensor y = arguments.output(x, &params.y);
  arguments.template run<Backend>();
  return y;
}

// The part of the sentence after the statistic.
inline void add_modulation(NormArguments& arguments, const OptionalTensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& scale, const OptionalTensor& scale_table, const OptionalTensor& shift,
                           const OptionalTensor& shift_table) {
  NormParams& params = arguments.params;
  arguments.vector(weight, "weight", &params.weight);
  arguments.vector(bias, "bias", &params.bias);
  arguments.broadcast(scale, "scale", &params.scale);
  arguments.table(scale_table, "scale_table", scale, "scale", &params.scale_table);
  arguments.broadcast(shift, "shift", &params.shift);
  arguments.table(shift_table, "shift_table", shift, "shift", &params.shift_table);
}

template <typename Backend>
Tensor ada_norm(Tensor x, OptionalTensor scale, OptionalTensor shift, OptionalTensor weight, OptionalTensor bias,
                double eps, bool layer, OptionalTensor scale_table, OptionalTensor shift_table) {
  NormArguments arguments(x, statistic_of(layer), eps);
  add_modulation(arguments, weight, bias, scale, scale_table, shift, shift_table);
  Tensor y = arguments.output(x, &arguments.params.y);
  arguments.template run<Backend>();
  return y;
}

template <typename Backend>
Tensor gated_residual(Tensor residual, Tensor x, OptionalTensor gate, OptionalTensor gate_table) {
  NormArguments arguments(x, Statistic::kNone, 0.);
  NormParams& params = arguments.params;
  arguments.full(residual, "residual", &params.residual);
  arguments.broadcast(gate, "gate", &params.gate);
  arguments.table(gate_table, "gate_table", gate, "gate", &params.gate_table);
  Tensor new_residual = arguments.output(residual, &params.new_residual);
  arguments.template run<Backend>();
  return new_residual;
}

// (y, new_residual): y of x's dtype, new_residual of the residual's.
template <typename Backend>
std::tuple<Tensor, Tensor> residual_ada_norm(Tensor residual, Tensor x, OptionalTensor gate, OptionalTensor scale,
                                             OptionalTensor shift, OptionalTensor weight, OptionalTensor bias,
                                             double eps, bool layer, OptionalTensor gate_table,
                                             OptionalTensor scale_table, OptionalTensor shift_table,
                                             double weight_offset) {
  NormArguments arguments(x, statistic_of(layer), eps);
  NormParams& params = arguments.params;
  params.weight_offset = static_cast<float>(weight_offset);
  arguments.full(residual, "residual", &params.residual);
  arguments.broadcast(gate, "gate", &params.gate);
  arguments.table(gate_table, "gate_table", gate, "gate", &params.gate_table);
  add_modulation(arguments, weight, bias, scale, scale_table, shift, shift_table);
  Tensor y = arguments.output(x, &params.y);
  Tensor new_residual = arguments.output(residual, &params.new_residual);
  arguments.template run<Backend>();
  return {y, new_residual};
}

}  // namespace ltx_kernels
