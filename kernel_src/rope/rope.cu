// The RoPE core's entry: the dtype of the kernel.
#include "../core/dispatch.cuh"
#include "rope_launch.cuh"

namespace ltx_kernels {

extern template cudaError_t launch_rope<float>(const RopeParams&, cudaStream_t);
extern template cudaError_t launch_rope<__half>(const RopeParams&, cudaStream_t);
extern template cudaError_t launch_rope<__nv_bfloat16>(const RopeParams&, cudaStream_t);

int rope_cuda(const RopeParams& p, void* stream) {
  const Operand& x = p.sides[0].x.data != nullptr ? p.sides[0].x : p.sides[1].x;
  return dispatch(x.dtype,
                  [&](auto value) { return launch_rope<decltype(value)>(p, static_cast<cudaStream_t>(stream)); });
}

}  // namespace ltx_kernels
