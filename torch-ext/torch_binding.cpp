// Schemas and registration, nothing else.
#include "torch_binding.h"

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def("rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight) -> Tensor");
  ops.def(
      "rms_norm_with_rstd(Tensor x, Tensor? weight, float eps, float weight_offset, bool cast_before_weight) "
      "-> (Tensor y, Tensor rstd)");
  ops.def(
      "rms_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, bool "
      "cast_before_weight, "
      "bool wants_grad_weight) -> (Tensor grad_x, Tensor grad_weight)");
  ops.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  ops.def(
      "ada_norm(Tensor x, Tensor? scale, Tensor? shift, Tensor? weight, Tensor? bias, float eps, bool layer, Tensor? "
      "scale_table, "
      "Tensor? shift_table) -> Tensor");
  ops.def("gated_residual(Tensor residual, Tensor x, Tensor? gate, Tensor? gate_table) -> Tensor");
  ops.def(
      "residual_ada_norm(Tensor residual, Tensor x, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, "
      "Tensor? bias, float eps, "
      "bool layer, Tensor? gate_table, Tensor? scale_table, Tensor? shift_table, float weight_offset) -> (Tensor y, "
      "Tensor new_residual)");
  ops.def("pixel_norm_silu(Tensor x, Tensor? scale, Tensor? shift, float eps) -> Tensor");
  ops.def("glu(Tensor x, int activation, bool gate_first) -> Tensor");
  ops.def("activate(Tensor x, Tensor? up, int activation) -> Tensor");
  ops.def("rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, int? rotary_dim) -> Tensor");
  ops.def(
      "qk_norm_rope(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, float eps, bool "
      "across_heads, "
      "bool interleaved, int norm, Tensor? q_bias, Tensor? k_bias, Tensor? k_cos, Tensor? k_sin, int? rotary_dim, "
      "SymInt rope_start, "
      "SymInt? rope_len) -> (Tensor q_out, Tensor k_out)");
  ops.def(
      "q_norm_rope(Tensor q, Tensor? q_weight, Tensor? cos, Tensor? sin, float eps, bool across_heads, bool "
      "interleaved, int norm, "
      "Tensor? q_bias, int? rotary_dim, SymInt rope_start, SymInt? rope_len) -> Tensor");
  ops.def(
      "rope_3d(Tensor q, Tensor k, Tensor table_t, Tensor table_h, Tensor table_w) -> (Tensor q_out, Tensor k_out)");
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
  ops.impl("pixel_norm_silu", TORCH_BOX(&ltx_kernels::pixel_norm_silu<Backend>));
  ops.impl("glu", TORCH_BOX(&ltx_kernels::glu<Backend>));
  ops.impl("activate", TORCH_BOX(&ltx_kernels::activate<Backend>));
  ops.impl("rope", TORCH_BOX(&ltx_kernels::rope<Backend>));
  ops.impl("qk_norm_rope", TORCH_BOX(&ltx_kernels::qk_norm_rope<Backend>));
  ops.impl("q_norm_rope", TORCH_BOX(&ltx_kernels::q_norm_rope<Backend>));
  ops.impl("rope_3d", TORCH_BOX(&ltx_kernels::rope_3d<Backend>));
}
}  // namespace

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) { implement<ltx_kernels::Cpu>(ops); }

#if defined(CUDA_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) { implement<ltx_kernels::Cuda>(ops); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
