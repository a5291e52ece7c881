// Pixel norm where the channels of a pixel are far apart (NCDHW in memory): the row-norm core would read 2 bytes of
// each sector. Here threads that are neighbours take neighbouring pixels; a block stages a tile of pixels with all
// their channels in shared memory, so that x is read once. With channels last a pixel is a row, and norm.cuh does it.
#include "../core/broadcast.cuh"
#include "../core/dispatch.cuh"
#include "../core/kernel.cuh"
#include "../core/launch.cuh"
#include "../core/math.cuh"
#include "../core/reduce.cuh"
#include "../core/stage.cuh"
#include "../core/vec.cuh"
#include "pixel_norm.h"

namespace ltx_kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 5;  // on a multiprocessor: what the shared memory of about 40 KB each allows
constexpr int kWarps = kThreads / kWarpSize;

// A tile is `vectors` 16-byte vectors of pixels wide, a power of two, and all channels deep: about 32 KB, so that
// several blocks share a multiprocessor and one loads while another computes; up to 64 KB where the run of a channel
// would fall below 64 bytes. The channels and the dtype alone decide, so that a pixel's sum has the same order in any
// image and batch.
int tile_vectors(int64_t channels) {
  constexpr int64_t kTile = 32 * 1024 / kVectorBytes;
  int vectors = kThreads;
  while (vectors > 4 && vectors * channels > kTile) vectors /= 2;
  while (vectors > 2 && vectors * channels > 2 * kTile) vectors /= 2;
  return vectors;
}

// Threads of a block: kThreads / vectors groups, of which each takes every so-many-th channel. What the groups of a
// warp have summed is added by shuffles, and the rest, [partial_sums, pixels of the tile], in shared memory.
struct Tile {
  int vectors;
  int partial_sums;
  int64_t tiles;  // an image

  Tile(const PixelNormParams& p, int size) : vectors(tile_vectors(p.channels)) {
    partial_sums = vectors < kWarpSize ? kWarps : kThreads / vectors;
    tiles = ceil_div(p.pixels, vectors * size);
  }
};

__device__ __forceinline__ float load_float(const Operand& operand, int64_t offset) {
  float value[1];
  load_floats<1>({operand.data, {}, operand.dtype, false}, offset, 1, value);
  return value[0];
}

// 1 + scale and shift of a channel.
__device__ __forceinline__ float2 load_modulation(const PixelNormParams& p, int64_t image, int64_t channel) {
  const auto load = [&](const Operand& operand) {
    return operand.data == nullptr
               ? 0.f
               : load_float(operand, image * operand.strides[p.kBatch] + channel * operand.strides[p.kChannel]);
  };
  return {1.f + load(p.scale), load(p.shift)};
}

// kStaged: the tile fits in shared memory; else x is read twice, the second time from the L2.
template <typename T, bool kStaged>
__global__ void __launch_bounds__(kThreads, kBlocks)
    pixel_norm_kernel(const __grid_constant__ PixelNormParams p, const __grid_constant__ Tile tile) {
  wait_for_previous_kernel();
  constexpr int kSize = kVectorSize<T>;
  using Vector = Vec<T, kSize>;
  extern __shared__ int4 shared[];
  const int tile_pixels = tile.vectors * kSize;
  float* const sums = reinterpret_cast<float*>(shared);  // [partial_sums, tile_pixels]
  Vector* const stage = reinterpret_cast<Vector*>(sums + tile.partial_sums * tile_pixels);  // [channels, vectors]
  float2* const modulation =
      reinterpret_cast<float2*>(stage + p.channels * tile.vectors);  // [channels]: 1 + scale, shift

  int64_t number;
  const int64_t image = divide(blockIdx.x, tile.tiles, &number);
  const int64_t first = number * tile_pixels;
  const int64_t left = p.pixels - first;
  const T* const x = static_cast<const T*>(p.x.data) + image * p.x.strides[p.kBatch] + first;
  T* const y = static_cast<T*>(p.y.data) + image * p.y.strides[p.kBatch] + first;

  const int column = threadIdx.x & (tile.vectors - 1);
  const int group = threadIdx.x / tile.vectors;
  const int groups = kThreads / tile.vectors;
  const int pixel = column * kSize;  // this thread's first
  const int count = static_cast<int>(min(static_cast<int64_t>(kSize), max(int64_t{0}, left - pixel)));
  const int channels = count > 0 ? static_cast<int>(p.channels) : 0;

  // Planes that do not start on 16 bytes pass through shared memory an element at a time, neighbouring threads on
  // neighbouring pixels.
  const auto for_each_element = [&](auto&& f) {
    const int shift = __ffs(tile_pixels) - 1;
#pragma unroll 4
    for (int i = threadIdx.x; i < static_cast<int>(p.channels) << shift; i += kThreads) {
      const int n = i & (tile_pixels - 1);
      f(reinterpret_cast<T*>(stage)[i], i >> shift, n, n < left);
    }
  };
  const bool modulated = p.scale.data != nullptr || p.shift.data != nullptr;
  if constexpr (kStaged) {
    if (p.x.vectorized) {
      for (int c = group; c < channels; c += groups)
        copy_async_16(stage + c * tile.vectors + column, x + c * p.x.strides[p.kChannel] + pixel);
    } else {
      for_each_element([&](T& element, int c, int n, bool exists) {
        element = exists ? x[c * p.x.strides[p.kChannel] + n] : from_float<T>(0.f);
      });
    }
    copy_async_commit();
    if (modulated) {
      for (int c = threadIdx.x; c < static_cast<int>(p.channels); c += kThreads)
        modulation[c] = load_modulation(p, image, c);
    }
    copy_async_wait<0>();
    if (!p.x.vectorized) __syncthreads();
  }
  const auto read = [&](int c) -> Vector {
    if constexpr (kStaged) return stage[c * tile.vectors + column];
    const T* source = x + c * p.x.strides[p.kChannel] + pixel;
    return p.x.vectorized ? *reinterpret_cast<const Vec<T, kSize>*>(source) : load_elements<T, kSize>(source, count);
  };

  float sum[kSize] = {};
#pragma unroll 4
  for (int c = group; c < channels; c += groups) {
    float values[kSize];
    to_floats(read(c), values);
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum[j] += values[j] * values[j];
  }
  for (int offset = tile.vectors; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
  }
  const int warp = threadIdx.x / kWarpSize;
  if (tile.vectors >= kWarpSize || threadIdx.x % kWarpSize < tile.vectors) {
    float* const target = sums + (tile.vectors < kWarpSize ? warp : group) * tile_pixels + pixel;
#pragma unroll
    for (int j = 0; j < kSize; j += 4)
      *reinterpret_cast<float4*>(target + j) = {sum[j], sum[j + 1], sum[j + 2], sum[j + 3]};
  }
  __syncthreads();
  for (int n = threadIdx.x; n < tile_pixels; n += kThreads) {
    float total = 0.f;
    for (int k = 0; k < tile.partial_sums; ++k) total += sums[k * tile_pixels + n];
    sums[n] = rsqrtf(total / static_cast<float>(p.channels) + p.eps);
  }
  __syncthreads();

  float rstd[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j) rstd[j] = sums[pixel + j];
  const bool through_stage = kStaged && !p.y.vectorized;
#pragma unroll 1
  for (int c = group; c < channels; c += groups) {
    float values[kSize];
    to_floats(read(c), values);
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] *= rstd[j];
    if (modulated) {
      const float2 factor_term = kStaged ? modulation[c] : load_modulation(p, image, c);
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[j] = values[j] * factor_term.x + factor_term.y;
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = silu<std::is_same_v<T, float>>(values[j]);
    const Vector vector = from_floats<T, kSize>(values);
    T* const target = y + c * p.y.strides[p.kChannel] + pixel;
    if (through_stage) {
      stage[c * tile.vectors + column] = vector;
    } else if (kStaged || p.y.vectorized) {
      *reinterpret_cast<Vector*>(target) = vector;
    } else {
      store_elements(target, vector, count);
    }
  }
  if (through_stage) {
    __syncthreads();
    for_each_element([&](T& element, int c, int n, bool exists) {
      if (exists) y[c * p.y.strides[p.kChannel] + n] = element;
    });
  }
}

template <typename T>
cudaError_t launch(const PixelNormParams& p, cudaStream_t stream) {
  const Tile tile(p, kVectorSize<T>);
  const int64_t sums_bytes = tile.partial_sums * tile.vectors * kVectorSize<T> * static_cast<int64_t>(sizeof(float));
  const int64_t tile_bytes = p.channels * (tile.vectors * kVectorBytes + static_cast<int64_t>(sizeof(float2)));
  const auto blocks = static_cast<unsigned>(p.batch * tile.tiles);
  int stages = 1;
  if (const cudaError_t error = allow_shared_memory(pixel_norm_kernel<T, true>, sums_bytes + tile_bytes, &stages);
      error != cudaSuccess) {
    return error;
  }
  if (stages > 0) {
    return launch_kernel(pixel_norm_kernel<T, true>, {blocks, kThreads, sums_bytes + tile_bytes}, stream, p, tile);
  }
  return launch_kernel(pixel_norm_kernel<T, false>, {blocks, kThreads, sums_bytes}, stream, p, tile);
}

}  // namespace

int pixel_norm_cuda(const PixelNormParams& p, void* stream) {
  return dispatch(p.x.dtype, [&](auto value) { return launch<decltype(value)>(p, static_cast<cudaStream_t>(stream)); });
}

}  // namespace ltx_kernels
