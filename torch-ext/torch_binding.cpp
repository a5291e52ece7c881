// Schemas and registration, nothing else.
#include "torch_binding.h"

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight) -> Tensor");
  ops.def(
      "rms_norm_with_rstd(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight) "
      "-> (Tensor y, Tensor rstd)");
  ops.def(
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, bool cast_before_weight, "
      "bool wants_grad_weight) -> (Tensor grad_x, Tensor grad_weight)");
  ops.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  ops.def(
      "ada_norm(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, bool layer, Tensor? scale_table, "
      "Tensor? shift_table) -> Tensor");
  ops.def("gated_residual(Tensor residual, Tensor x, Tensor? gate, Tensor? gate_table) -> Tensor");
  ops.def(
      "residual_ada_norm(Tensor residual, Tensor x, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, "
      "bool layer, Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, float weight_offset) -> (Tensor y, Tensor new_residual)");
}

namespace {
template <typename Backend>
void implement(torch::stable::detail::StableLibrary& ops) {
  ops.impl("rms_norm", TORCH_BOX(&ltx_kernels::rms_norm<Backend>));
  ops.impl("rms_norm_with_rstd", TORCH_BOX(&ltx_kernels::rms_norm_with_rstd<Backend>));
  ops.impl("rms_norm_backward", TORCH_BOX(&ltx_kernels::rms_norm_backward<Backend>));
  ops.impl("layer_norm", TORCH_BOX(&ltx_kernels::layer_norm<Backend>));
  ops.impl("ada_norm", TORCH_BOX(&ltx_kernels::ada_norm<Backend>));
  ops.impl("gated_residual", TORCH_BOX(&ltx_kernels::gated_residual<Backend>));
  ops.impl("residual_ada_norm", TORCH_BOX(&ltx_kernels::residual_ada_norm<Backend>));
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { implement<ltx_kernels::Cpu>(ops); }

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { implement<ltx_kernels::Cuda>(ops); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
