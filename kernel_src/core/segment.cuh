// A row shared by the blocks of a cluster (sm_90): each has one segment. A row of 64K would otherwise fill an SM with
// one block, which loads, then computes, then stores, and leaves memory idle in between. Each warp sends its sums to
// every block, into shared memory where an mbarrier counts the bytes: one way over the network between the SMs, where a
// barrier of the cluster and reads of each other's memory are three. A trial of rms_norm, [1024, 65536] bf16: 72 us, 90
// so.
#pragma once

#include <cstdint>

#include "launch.cuh"
#include "reduce.cuh"

namespace ltx_kernels {

constexpr int kMaxSegments = 8;  // the largest cluster that every chip of sm_90 and later takes

// kSums: the most that a call of `add` adds up. A block of a cluster has one row, blockDim.y = 1.
template <bool kSegmented, int kSums>
class Segment {
 public:
  // The number of the block, or of the cluster.
  __device__ __forceinline__ int row() const { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ unsigned rank() const { return 0; }
  __device__ __forceinline__ unsigned count() const { return 1; }
  template <int kCount>
  __device__ __forceinline__ void add(float (&)[kCount], int, int = 0) {}
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <int kSums>
class Segment<true, kSums> {
 public:
  // All threads of the block.
  __device__ __forceinline__ Segment() {
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank_));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count_));
    if (threadIdx.x == 0) {
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&shared().arrived[turn])) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }

  __device__ __forceinline__ int row() const {
    unsigned cluster;
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
    return static_cast<int>(cluster);
  }
  __device__ __forceinline__ unsigned rank() const { return rank_; }
  __device__ __forceinline__ unsigned count() const { return count_; }

  // Replaces each thread's sums by the row's: in every segment those of row_sums, then segment after segment, the same
  // in all blocks. Calls take turns, 0 and 1, and after both change the phase, from 0 to 1 and back: no block is ahead
  // of another by more than a call, so that what it sends meets no sums that are still to be read.
  template <int kCount>
  __device__ __forceinline__ void add(float (&sums)[kCount], int turn, int phase = 0) {
    static_assert(kCount <= kSums);
    __syncwarp();
    if (!met_) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all barriers are there
    met_ = true;
    Shared& own = shared();
    const int warps = blockDim.x / kWarpSize, warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const uint32_t arrived = address(&own.arrived[turn]);
    if (threadIdx.x == 0) {
      const unsigned bytes = count_ * warps * kCount * sizeof(float);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(bytes) : "memory");
    }
    warp_sums(sums);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (lane < static_cast<int>(count_)) send(sums[k], &own.sums[turn][k][rank_][warp], arrived, lane);
    }
    wait(arrived, phase);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float parts[kMaxSegments];
#pragma unroll
      for (int segment = 0; segment < kMaxSegments; ++segment) {
        parts[segment] = segment < static_cast<int>(count_) && lane < warps ? own.sums[turn][k][segment][lane] : 0.f;
      }
      warp_sums(parts);
      sums[k] = parts[0];
#pragma unroll
      for (int segment = 1; segment < kMaxSegments; ++segment) {
        if (segment < static_cast<int>(count_)) sums[k] = __fadd_rn(sums[k], parts[segment]);
      }
    }
  }

 private:
  struct Shared {
    uint64_t arrived[2];  // mbarriers
    float sums[2][kSums][kMaxSegments][kMaxThreadsPerRow / kWarpSize];
  };

  static __device__ __forceinline__ Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
  static __device__ __forceinline__ uint32_t address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  }
  // To the same place in the memory of block `rank`, counted there.
  static __device__ __forceinline__ void send(float value, const float* place, uint32_t arrived, int rank) {
    uint32_t target, barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(target) : "r"(address(place)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(arrived), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(target), "f"(value),
                 "r"(barrier)
                 : "memory");
  }
  // Until all of this phase has come. A block ends once it has everything that others send it.
  static __device__ __forceinline__ void wait(uint32_t arrived, int phase) {
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{.reg .pred done; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2; "
          "selp.u32 %0, 1, 0, done;}"
          : "=r"(done)
          : "r"(arrived), "r"(phase)
          : "memory");
    }
  }

  unsigned rank_, count_;
  bool met_ = false;
};
#endif

}  // namespace ltx_kernels
