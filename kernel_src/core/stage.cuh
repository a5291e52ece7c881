// Staging in shared memory: rows are copied there asynchronously where the chip can (sm_80 on), so that loads are in
// flight without holding registers. Where a thread only reads the vectors it staged itself, no barrier is needed.
#pragma once

#include <cstdint>

#include "vec.cuh"

namespace ltx_kernels {

// kReused: other blocks of the multiprocessor read the same bytes, which stay in its L1.
template <bool kReused = false>
__device__ __forceinline__ void copy_async_16(void* target, const void* source) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  if constexpr (kReused) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(source) : "memory");
  }
#else
  *static_cast<int4*>(target) = *static_cast<const int4*>(source);
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's committed groups are still on their way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace ltx_kernels
