#include "norm_launch.cuh"

namespace ltx_kernels {

template cudaError_t launch_norm<__half>(const NormParams&, bool, cudaStream_t);

}  // namespace ltx_kernels
