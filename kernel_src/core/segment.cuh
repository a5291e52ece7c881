// A row shared by the blocks of a cluster (sm_90): each has one segment, and their sums meet in distributed shared
// memory. A row of 64K would otherwise fill an SM with one block, which loads, then computes, then stores, and leaves
// memory idle in between.
#pragma once

#include <cooperative_groups.h>

#include "reduce.cuh"

namespace ltx_kernels {

constexpr int kMaxSegments = 8;  // the largest cluster that every chip of sm_90 and later takes

template <bool kSegmented>
class Segment {
 public:
  __device__ __forceinline__ unsigned rank() const { return 0; }
  __device__ __forceinline__ unsigned count() const { return 1; }
  template <int kSums>
  __device__ __forceinline__ void add(float (&)[kSums], int, bool) const {}
  __device__ __forceinline__ void finish() const {}
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <>
class Segment<true> {
 public:
  __device__ __forceinline__ unsigned rank() const { return cooperative_groups::this_cluster().block_rank(); }
  __device__ __forceinline__ unsigned count() const { return cooperative_groups::this_cluster().num_blocks(); }

  // Replaces the block's sums, which every thread has, by the row's: segment after segment, the same in all blocks. Two
  // calls that follow each other need different slots. `last`: no call follows, and a block may end once the others
  // have read its sums.
  template <int kSums>
  __device__ __forceinline__ void add(float (&sums)[kSums], int slot, bool last) const {
    __shared__ float shared[2][kSums];
    auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) shared[slot][k] = sums[k];
    }
    cluster.sync();
    // A lane reads one block's sums, all lanes at once: one after the other, the latencies of distant reads add up.
    const int lane = threadIdx.x % kWarpSize;
    const int blocks = static_cast<int>(cluster.num_blocks());
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
      const float part = lane < blocks ? *cluster.map_shared_rank(&shared[slot][k], lane) : 0.f;
      float sum = __shfl_sync(0xffffffffu, part, 0);
      for (int other = 1; other < blocks; ++other) sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, part, other));
      sums[k] = sum;
    }
    if (last) cluster.barrier_arrive();
  }

  __device__ __forceinline__ void finish() const { cooperative_groups::this_cluster().barrier_wait(); }
};
#endif

}  // namespace ltx_kernels
