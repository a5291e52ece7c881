// The row-norm core's entry: the dtype of the kernel.
#include "../core/dispatch.cuh"
#include "norm_launch.cuh"

namespace ltx_kernels {

extern template cudaError_t launch_norm<float>(const NormParams&, bool, cudaStream_t);
extern template cudaError_t launch_norm<__half>(const NormParams&, bool, cudaStream_t);
extern template cudaError_t launch_norm<__nv_bfloat16>(const NormParams&, bool, cudaStream_t);

int norm_forward_cuda(const NormParams& p, void* stream) {
  const bool mixed = p.residual.data != nullptr && p.residual.dtype != p.x.dtype;
  return dispatch(mixed ? Dtype::kFloat32 : p.x.dtype, [&](auto value) {
    return launch_norm<decltype(value)>(p, mixed, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace ltx_kernels
