// Sums over the threads of one row. Deterministic: the order depends on the number of threads alone.
#pragma once

namespace ltx_kernels {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;

// Sum over the blockDim.x threads that share threadIdx.y: a power of two up to a warp, or whole warps. Every thread of the block calls
// it, and gets the sum. `scratch` holds one float a warp; two calls that follow each other need different ones.
__device__ __forceinline__ float row_sum(float value, float* scratch) {
  const int width = min(static_cast<int>(blockDim.x), kWarpSize);
  for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (blockDim.x <= kWarpSize) return value;

  const int warps = blockDim.x / kWarpSize;
  float* row_scratch = scratch + threadIdx.y * warps;
  if (threadIdx.x % kWarpSize == 0) row_scratch[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  // One read a lane and a second round of shuffles: five steps for 32 warps, where a loop would take 32.
  const int lane = threadIdx.x % kWarpSize;
  value = lane < warps ? row_scratch[lane] : 0.f;
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

}  // namespace ltx_kernels
