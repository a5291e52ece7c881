// Pixel norm where the channels of a pixel are far apart (NCDHW in memory): the row-norm core would read 2 bytes of
// each sector. Here threads that are neighbours take neighbouring pixels, and a block has a tile of pixels with all
// their channels, so that x is read once. With channels last a pixel is a row, and norm.cuh does it. Two kernels:
//   pixel_norm_held_kernel  aligned planes of up to 1024 channels, held in registers
//   pixel_norm_kernel       any other: in shared memory, or, where they do not fit, read twice
// Both spread a pixel over the same threads and sum in the same order: which one runs cannot be seen in the bits.
#include <algorithm>
#include <type_traits>

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

constexpr int kMaxThreads = 512;  // a block

// How the channels of a tile are spread over a block: tuning as data, measured on an H200
// (benchmarks/results/h200/tuning/pixel_norm_held.txt). The channels alone decide, so that a pixel's sum has the same
// order in any image and batch.
struct Spread {
  int vectors;  // the width of a tile, in vectors of pixels; a power of two
  int threads;  // a block
  int held;     // vectors a thread in registers; 0: they are too many
};

inline Spread choose_spread(int64_t channels) {
  if (channels > 1024) return {2, 256, 0};
  if (channels > 512) return {4, 256, 16};
  if (channels > 256) return {8, 512, 8};
  if (channels > 128) return {16, 512, 8};
  int vectors = 256;
  while (vectors * channels > 256 * 8) vectors /= 2;
  return {vectors, 256, 8};
}

// Threads of a block are groups of `vectors`, of which each takes every so-many-th channel. What the groups of a warp
// have summed is added by shuffles, and the rest, [partial_sums, pixels of the tile], in shared memory.
struct Tile {
  int vectors;
  int groups;
  int partial_sums;

  explicit Tile(const Spread& spread) : vectors(spread.vectors), groups(spread.threads / spread.vectors) {
    partial_sums = vectors < kWarpSize ? spread.threads / kWarpSize : groups;
  }
};

// A thread's place in the problem.
template <typename T>
struct Place {
  static constexpr int kSize = kVectorSize<T>;
  int64_t image, left;  // pixels of the image from the tile's first on
  const T* x;           // the first channel of the tile's first pixel
  T* y;
  int column, group;
  int pixel;  // this thread's first, in the tile

  __device__ __forceinline__ Place(const PixelNormParams& p, const Tile& tile) {
    image = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (tile.vectors * kSize);
    left = p.pixels - first;
    x = static_cast<const T*>(p.x.data) + image * p.x.strides[p.kBatch] + first;
    y = static_cast<T*>(p.y.data) + image * p.y.strides[p.kBatch] + first;
    column = threadIdx.x & (tile.vectors - 1);
    group = threadIdx.x / tile.vectors;
    pixel = column * kSize;
  }
};

__host__ __device__ inline bool is_modulated(const PixelNormParams& p) {
  return p.scale.data != nullptr || p.shift.data != nullptr;
}

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

// Those of all channels, to shared memory; seen by the block after a barrier.
__device__ __forceinline__ void stage_modulation(const PixelNormParams& p, int64_t image, float2* modulation) {
  for (int c = threadIdx.x; c < static_cast<int>(p.channels); c += blockDim.x)
    modulation[c] = load_modulation(p, image, c);
}

template <int kSize>
__device__ __forceinline__ void add_squares(const float (&values)[kSize], float (&sum)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum[j] = fmaf(values[j], values[j], sum[j]);
}

// From the sums over each thread's channels to the rstd of its pixels, which replaces them. Two barriers of the block.
template <int kSize>
__device__ __forceinline__ void take_rstd(const PixelNormParams& p, const Tile& tile, int pixel, float* sums,
                                          float (&sum)[kSize]) {
  for (int offset = tile.vectors; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], offset);
  }
  const int tile_pixels = tile.vectors * kSize;
  const bool narrow = tile.vectors < kWarpSize;
  if (!narrow || threadIdx.x % kWarpSize < tile.vectors) {
    float* const target = sums + threadIdx.x / (narrow ? kWarpSize : tile.vectors) * tile_pixels + pixel;
#pragma unroll
    for (int j = 0; j < kSize; j += 4)
      *reinterpret_cast<float4*>(target + j) = {sum[j], sum[j + 1], sum[j + 2], sum[j + 3]};
  }
  __syncthreads();
  for (int n = threadIdx.x; n < tile_pixels; n += blockDim.x) {
    float total = 0.f;
#pragma unroll 8
    for (int k = 0; k < tile.partial_sums; ++k) total += sums[k * tile_pixels + n];
    sums[n] = rsqrtf(total / static_cast<float>(p.channels) + p.eps);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum[j] = sums[pixel + j];
}

// y of one vector, from x.
template <typename T, int kSize>
__device__ __forceinline__ void finish(const float (&rstd)[kSize], bool modulated, const float2& modulation,
                                       float (&values)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) values[j] *= rstd[j];
  if (modulated) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[j] = values[j] * modulation.x + modulation.y;
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) values[j] = silu<std::is_same_v<T, float>>(values[j]);
}

// As many blocks an SM as leave 64 registers to a thread with 8 vectors, 128 to one with 16. kModulated: there is a
// scale or a shift. Channels and pixels that do not exist are others, computed again and not
// stored (see norm_fast_kernel).
template <typename T, int kThreads, int kHeld, bool kModulated>
__global__ void __launch_bounds__(kThreads, 8192 / (kThreads * kHeld))
    pixel_norm_held_kernel(const __grid_constant__ PixelNormParams p, const __grid_constant__ Tile tile) {
  wait_for_previous_kernel();
  constexpr int kSize = kVectorSize<T>;
  using Vector = Vec<T, kSize>;
  extern __shared__ int4 shared[];
  float* const sums = reinterpret_cast<float*>(shared);  // [partial_sums, tile pixels]
  float2* const modulation = reinterpret_cast<float2*>(sums + tile.partial_sums * tile.vectors * kSize);  // [channels]

  const Place<T> place(p, tile);
  if (place.image >= p.batch) return;
  const int channels = static_cast<int>(p.channels);
  const bool pixel_exists = place.pixel < place.left;
  const int pixel = pixel_exists ? place.pixel : 0;
  const auto channel = [&](int i) { return place.group + i * tile.groups; };
  Vector held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i)
    held[i] =
        *reinterpret_cast<const Vector*>(place.x + min(channel(i), channels - 1) * p.x.strides[p.kChannel] + pixel);
  if constexpr (kModulated) stage_modulation(p, place.image, modulation);

  float sum[kSize] = {}, values[kSize];
  // No branch parts the vectors where all exist.
  const auto add_all = [&](auto all) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      to_floats(held[i], values);
      if (all || channel(i) < channels) add_squares(values, sum);
    }
  };
  const bool all_exist = tile.groups * kHeld == channels;
  all_exist ? add_all(std::true_type{}) : add_all(std::false_type{});
  take_rstd(p, tile, place.pixel, sums, sum);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    keep_packed(held[i]);
    to_floats(held[i], values);
    const int c = min(channel(i), channels - 1);
    finish<T>(sum, kModulated, kModulated ? modulation[c] : float2{}, values);
    if (pixel_exists && channel(i) < channels)
      store_vector(place.y + c * p.y.strides[p.kChannel] + pixel, from_floats<T, kSize>(values));
  }
}

// kStaged: the tile fits in shared memory; else x is read twice, the second time from the L2.
template <typename T, bool kStaged>
__global__ void __launch_bounds__(kMaxThreads)
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

  const Place<T> place(p, tile);
  if (place.image >= p.batch) return;
  const int column = place.column, pixel = place.pixel;
  const auto count = static_cast<int>(min(static_cast<int64_t>(kSize), max(int64_t{0}, place.left - pixel)));
  const int channels = count > 0 ? static_cast<int>(p.channels) : 0;

  // Planes that do not start on 16 bytes pass through shared memory an element at a time, neighbouring threads on
  // neighbouring pixels.
  const auto for_each_element = [&](auto&& f) {
    const int shift = __ffs(tile_pixels) - 1;
#pragma unroll 4
    for (int i = threadIdx.x; i < static_cast<int>(p.channels) << shift; i += blockDim.x) {
      const int n = i & (tile_pixels - 1);
      f(reinterpret_cast<T*>(stage)[i], i >> shift, n, n < place.left);
    }
  };
  const bool modulated = is_modulated(p);
  if constexpr (kStaged) {
    if (p.x.vectorized) {
      for (int c = place.group; c < channels; c += tile.groups)
        copy_async_16(stage + c * tile.vectors + column, place.x + c * p.x.strides[p.kChannel] + pixel);
    } else {
      for_each_element([&](T& element, int c, int n, bool exists) {
        element = exists ? place.x[c * p.x.strides[p.kChannel] + n] : from_float<T>(0.f);
      });
    }
    copy_async_commit();
    if (modulated) stage_modulation(p, place.image, modulation);
    copy_async_wait<0>();
    if (!p.x.vectorized) __syncthreads();
  }
  const auto read = [&](int c) -> Vector {
    if constexpr (kStaged) return stage[c * tile.vectors + column];
    const T* source = place.x + c * p.x.strides[p.kChannel] + pixel;
    return p.x.vectorized ? *reinterpret_cast<const Vec<T, kSize>*>(source) : load_elements<T, kSize>(source, count);
  };

  float sum[kSize] = {}, values[kSize];
#pragma unroll 4
  for (int c = place.group; c < channels; c += tile.groups) {
    to_floats(read(c), values);
    add_squares(values, sum);
  }
  take_rstd(p, tile, pixel, sums, sum);
  const bool through_stage = kStaged && !p.y.vectorized;
#pragma unroll 1
  for (int c = place.group; c < channels; c += tile.groups) {
    to_floats(read(c), values);
    finish<T>(sum, modulated,
              !modulated ? float2{}
              : kStaged  ? modulation[c]
                         : load_modulation(p, place.image, c),
              values);
    const Vector vector = from_floats<T, kSize>(values);
    T* const target = place.y + c * p.y.strides[p.kChannel] + pixel;
    if (through_stage) {
      stage[c * tile.vectors + column] = vector;
    } else if (kStaged || p.y.vectorized) {
      store_vector(target, vector);
    } else {
      store_elements(target, vector, count);
    }
  }
  if (through_stage) {
    __syncthreads();
    for_each_element([&](T& element, int c, int n, bool exists) {
      if (exists) place.y[c * p.y.strides[p.kChannel] + n] = element;
    });
  }
}

template <typename T, int kThreads, int kHeld>
bool try_held(const PixelNormParams& p, const Spread& spread, const Tile& tile, const LaunchConfig& config,
              cudaStream_t stream, cudaError_t* error) {
  if (spread.threads != kThreads || spread.held != kHeld) return false;
  const auto kernel = is_modulated(p) ? pixel_norm_held_kernel<T, kThreads, kHeld, true>
                                      : pixel_norm_held_kernel<T, kThreads, kHeld, false>;
  *error = launch_kernel(kernel, config, stream, p, tile);
  return true;
}

template <typename T>
cudaError_t launch(const PixelNormParams& p, cudaStream_t stream) {
  const Spread spread = choose_spread(p.channels);
  const Tile tile(spread);
  // [tiles, images], these in two dims. A division of the block's number would keep addresses out of uniform registers.
  constexpr int64_t kGridY = 65535;
  const dim3 blocks(static_cast<unsigned>(ceil_div(p.pixels, tile.vectors * kVectorSize<T>)),
                    static_cast<unsigned>(std::min(p.batch, kGridY)), static_cast<unsigned>(ceil_div(p.batch, kGridY)));
  const auto threads = static_cast<unsigned>(spread.threads);
  const int64_t sums_bytes = tile.partial_sums * tile.vectors * kVectorSize<T> * static_cast<int64_t>(sizeof(float));
  const int64_t modulation_bytes = p.channels * static_cast<int64_t>(sizeof(float2));
  cudaError_t error = cudaSuccess;
  if (p.x.vectorized && p.y.vectorized) {
    const LaunchConfig config = {blocks, threads, sums_bytes + modulation_bytes};
    if (try_held<T, 256, 8>(p, spread, tile, config, stream, &error) ||
        try_held<T, 512, 8>(p, spread, tile, config, stream, &error) ||
        try_held<T, 256, 16>(p, spread, tile, config, stream, &error)) {
      return error;
    }
  }
  const int64_t shared = sums_bytes + p.channels * tile.vectors * kVectorBytes + modulation_bytes;
  int stages = 1;
  error = allow_shared_memory(pixel_norm_kernel<T, true>, shared, &stages);
  if (error != cudaSuccess) return error;
  if (stages > 0) return launch_kernel(pixel_norm_kernel<T, true>, {blocks, threads, shared}, stream, p, tile);
  return launch_kernel(pixel_norm_kernel<T, false>, {blocks, threads, sums_bytes}, stream, p, tile);
}

}  // namespace

int pixel_norm_cuda(const PixelNormParams& p, void* stream) {
  return dispatch(p.x.dtype, [&](auto value) { return launch<decltype(value)>(p, static_cast<cudaStream_t>(stream)); });
}

}  // namespace ltx_kernels
