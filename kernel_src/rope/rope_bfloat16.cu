#include "rope_launch.cuh"

namespace ltx_kernels {

template cudaError_t launch_rope<__nv_bfloat16>(const RopeParams&, cudaStream_t);

}  // namespace ltx_kernels
