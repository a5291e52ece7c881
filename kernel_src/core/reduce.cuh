// Sums over the threads of one row. Deterministic: the order depends on the number of threads alone.
#pragma once

namespace ltx_kernels {

constexpr int kWarpSize = 32;
constexpr int kMaxWarps = 32;

// kRows sums at once over the lanes of a warp, or over each `width` of them.
template <int kRows>
__device__ __forceinline__ void warp_sums(float (&sums)[kRows], int width = kWarpSize) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) sums[row] += __shfl_xor_sync(0xffffffffu, sums[row], offset);
  }
}

// kRows sums at once over the blockDim.x threads that share threadIdx.y: a power of two up to a warp, or whole warps.
// Every thread of the block calls it, and gets the sums. `scratch` holds kRows floats a warp; two calls that follow
// each other need different ones.
template <int kRows>
__device__ __forceinline__ void row_sums(float (&sums)[kRows], float* scratch) {
  if (blockDim.x < kWarpSize) return warp_sums(sums, blockDim.x);
  warp_sums(sums);
  if (blockDim.x == kWarpSize) return;

  const int warps = blockDim.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  float* row_scratch = scratch + threadIdx.y * warps * kRows;
  if (lane == 0) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) row_scratch[threadIdx.x / kWarpSize * kRows + row] = sums[row];
  }
  __syncthreads();
  // One read a lane and a second round of shuffles: five steps for 16 warps, where a loop would take 16.
#pragma unroll
  for (int row = 0; row < kRows; ++row) sums[row] = lane < warps ? row_scratch[lane * kRows + row] : 0.f;
  warp_sums(sums);
}

__device__ __forceinline__ float row_sum(float value, float* scratch) {
  float sums[1] = {value};
  row_sums(sums, scratch);
  return sums[0];
}

}  // namespace ltx_kernels
