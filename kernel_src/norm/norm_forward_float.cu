#include "norm_launch.cuh"

namespace ltx_kernels {

template cudaError_t launch_norm<float>(const NormParams&, bool, cudaStream_t);

}  // namespace ltx_kernels
