// The row-norm core's entry: the dtype of the kernel.
#include "norm_launch.cuh"

namespace ltx_kernels {

extern template cudaError_t launch_norm<float>(const NormParams&, bool, cudaStream_t);
extern template cudaError_t launch_norm<__half>(const NormParams&, bool, cudaStream_t);
extern template cudaError_t launch_norm<__nv_bfloat16>(const NormParams&, bool, cudaStream_t);

int norm_forward_cuda(const NormParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool mixed = p.residual.data != nullptr && p.residual.dtype != p.x.dtype;
  switch (mixed ? Dtype::kFloat32 : p.x.dtype) {
    case Dtype::kFloat16:
      return launch_norm<__half>(p, mixed, cuda_stream);
    case Dtype::kBFloat16:
      return launch_norm<__nv_bfloat16>(p, mixed, cuda_stream);
    default:
      return launch_norm<float>(p, mixed, cuda_stream);
  }
}

}  // namespace ltx_kernels
