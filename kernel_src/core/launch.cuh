// How a row is spread over threads and shared memory. A function of the row's length and dtype alone: the same row
// gives the same bits in any batch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernel.cuh"
#include "reduce.cuh"

namespace ltx_kernels {

struct RowLaunch {
  int threads_per_row;  // a power of two up to a warp, or whole warps
  int rows_per_block;
};

constexpr int kMaxThreadsPerRow = 512;
constexpr int kBlockThreads = 128;  // short rows share a block of so many

// For __launch_bounds__. 0 leaves to the compiler how many blocks an SM should hold, and to fit more of them it spills
// in a kernel of many values; with 1 it takes the registers instead.
constexpr int min_blocks(bool would_spill) { return would_spill ? 1 : 0; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Policy apart from algorithm: about `vectors` 16-byte vectors a thread, blocks of at least `block_threads`.
inline RowLaunch row_launch(int64_t row_vectors, int vectors, int block_threads) {
  int64_t threads = ceil_div(row_vectors, vectors);
  if (threads <= kWarpSize) {
    int power = 1;
    while (power < threads) power *= 2;
    threads = power;
  } else {
    threads = ceil_div(threads, kWarpSize) * kWarpSize;
  }
  if (threads > kMaxThreadsPerRow) threads = kMaxThreadsPerRow;
  const int rows = static_cast<int>(threads < block_threads ? block_threads / threads : 1);
  return {static_cast<int>(threads), rows};
}

// Lets `kernel` take *stages times stage_bytes of dynamic shared memory, or fewer stages, down to 0, where the chip has
// less: a block may have 64 KB on sm_75, 163 on sm_80, 227 on sm_90, and over 48 KB a kernel must ask. It asks for all
// there is, always: a limit that followed the call would be too low for the call of another thread.
template <typename Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int64_t stage_bytes, int* stages) {
  constexpr int64_t kStatic = 6 * 1024;  // more than any of our kernels declares
  constexpr int64_t kDefault = 48 * 1024;
  if (*stages * stage_bytes + kStatic <= kDefault) return cudaSuccess;
  int device = 0;
  if (const cudaError_t error = taken(cudaGetDevice(&device)); error != cudaSuccess) return error;
  int limit = 0;
  if (const cudaError_t error = taken(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
      error != cudaSuccess) {
    return error;
  }
  while (*stages > 0 && *stages * stage_bytes + kStatic > limit) --*stages;
  return taken(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit - kStatic)));
}

}  // namespace ltx_kernels
