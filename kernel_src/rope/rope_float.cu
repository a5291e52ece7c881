#include "rope_launch.cuh"

namespace ltx_kernels {

template cudaError_t launch_rope<float>(const RopeParams&, cudaStream_t);

}  // namespace ltx_kernels
