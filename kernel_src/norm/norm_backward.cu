// Backward of RMSNorm: with x̂ = x·rstd and g = grad_y·(weight_offset + weight),
//   grad_x = rstd·(g - x̂·mean(g·x̂))        grad_weight = Σ over rows of grad_y·x̂
// One pass over x and grad_y gives both: a fixed number of blocks walk over the rows, the next rows on their way to shared memory while the
// present ones are computed, and keep their part of grad_weight in registers. The parts are then summed in a fixed order: no atomics.
#include <type_traits>

#include "../core/row.cuh"
#include "norm.h"

namespace ltx_kernels {
namespace {

constexpr int kMaxBackwardVectors = 8;

// g = grad_y·(weight_offset + weight) and x̂ for vector i.
template <typename T>
__device__ __forceinline__ void load_gradient(const NormBackwardParams& p, const RowSlice<T>& slice, int i, float rstd,
                                              const Vec<T, kVectorSize<T>>& grad_y, const Vec<T, kVectorSize<T>>& x,
                                              float (&g)[kVectorSize<T>], float (&normed)[kVectorSize<T>]) {
  constexpr int kSize = kVectorSize<T>;
  to_floats(grad_y, g);
  to_floats(x, normed);
  multiply_operand<T>(p.weight_offset, p.weight, nullptr, slice, i, g);
#pragma unroll
  for (int j = 0; j < kSize; ++j) normed[j] *= rstd;
}

// kVecs vectors a thread, with their part of grad_weight in registers; 0: a row of any length, grad_x alone.
// stages: 2 = the next rows are copied during the present ones, 1 = one at a time, 0 = the rows do not fit and are read again.
template <typename T, int kVecs>
__global__ void __launch_bounds__(kMaxThreadsPerRow) norm_backward_kernel(const __grid_constant__ NormBackwardParams p, const int stages) {
  constexpr int kSize = kVectorSize<T>;
  using Vector = Vec<T, kSize>;
  extern __shared__ int4 shared[];
  __shared__ float scratch[2][kMaxWarps];

  const int row_vectors = static_cast<int>(ceil_div(p.rows.hidden, kSize));
  const int64_t rows = p.rows.count();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  const auto slice_at = [&](int64_t row) {
    return RowSlice<T>{RowIndex(row < rows ? row : 0, p.rows), row < rows ? static_cast<int>(p.rows.hidden) : 0};
  };
  // [stage, 2, rows_per_block, row_vectors]
  const auto stage_of = [&](int stage, int operand) {
    return reinterpret_cast<Vector*>(shared) + ((stage * 2 + operand) * blockDim.y + threadIdx.y) * row_vectors;
  };
  const auto stage_rows = [&](int64_t row, int stage) {
    const RowSlice<T> slice = slice_at(row);
    stage_row<T>(p.grad_y, slice, stage_of(stage, 0));
    stage_row<T>(p.x, slice, stage_of(stage, 1));
    copy_async_commit();
  };

  float grad_weight[kVecs > 0 ? kVecs : 1][kSize] = {};
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (stages == 2) stage_rows(row, 0);
  // Every thread of a block makes as many turns: row_sum has a barrier.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y, turn = 0; first < rows; first += step, row += step, ++turn) {
    const int stage = stages == 2 ? static_cast<int>(turn & 1) : 0;
    if (stages == 2) {
      stage_rows(row + step, stage ^ 1);
      copy_async_wait<1>();
    } else if (stages == 1) {
      stage_rows(row, 0);
      copy_async_wait<0>();
    }
    const RowSlice<T> slice = slice_at(row);
    const float rstd = slice.hidden > 0 ? p.rstd[row] : 0.f;
    const auto read = [&](const Operand& operand, int which, int i) -> Vector {
      if (stages > 0) return stage_of(stage, which)[slice.column(i) / kSize];
      return load<T, kSize>(operand, slice.offset(operand, i), slice.count(i));
    };
    // Calls f(i, grad_y, x) for this thread's vectors; i is a constant where partial sums are indexed by it.
    const auto for_each_vector = [&](auto&& f) {
      if constexpr (kVecs > 0) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          if (slice.count(i) > 0) f(i, read(p.grad_y, 0, i), read(p.x, 1, i));
        }
      } else {
        for (int i = 0; slice.count(i) > 0; ++i) f(i, read(p.grad_y, 0, i), read(p.x, 1, i));
      }
    };

    float dot = 0.f;
    for_each_vector([&](int i, const Vector& grad_y, const Vector& x) {
      float g[kSize], normed[kSize];
      load_gradient<T>(p, slice, i, rstd, grad_y, x, g, normed);
#pragma unroll
      for (int j = 0; j < kSize; ++j) dot += g[j] * normed[j];
    });
    // Scratch alternates: the next row's sum may start while a slow warp still reads this one's.
    const float mean = row_sum(dot, scratch[turn & 1]) / static_cast<float>(p.rows.hidden);

    for_each_vector([&](int i, const Vector& grad_y, const Vector& x) {
      float g[kSize], normed[kSize];
      load_gradient<T>(p, slice, i, rstd, grad_y, x, g, normed);
      float grad_x[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) grad_x[j] = rstd * (g[j] - normed[j] * mean);
      if (p.grad_x.data != nullptr) store<T, kSize>(p.grad_x, slice.offset(p.grad_x, i), slice.count(i), grad_x);
      if constexpr (kVecs > 0) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const float seen = p.cast_before_weight ? to_float(from_float<T>(normed[j])) : normed[j];
          grad_weight[i][j] += to_float(grad_y.value[j]) * seen;
        }
      }
    });
  }

  if (kVecs == 0 || p.grad_weight_partials == nullptr) return;
  // The rows of the block add up, one after the other, in the block's row of partial sums.
  const RowSlice<T> slice{RowIndex(0, p.rows), static_cast<int>(p.rows.hidden)};
  float* const partials = p.grad_weight_partials + static_cast<int64_t>(blockIdx.x) * p.rows.hidden;
  for (unsigned turn = 0; turn < blockDim.y; ++turn) {
    if (threadIdx.y == turn) {
#pragma unroll
      for (int i = 0; i < (kVecs > 0 ? kVecs : 1); ++i) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          if (j < slice.count(i)) partials[slice.column(i) + j] = grad_weight[i][j] + (turn > 0 ? partials[slice.column(i) + j] : 0.f);
        }
      }
    }
    __syncthreads();
  }
}

constexpr int kColumnThreads = 32;
constexpr int kColumnRows = 16;

// Sum over threadIdx.y of one value a thread, in a fixed order; valid in threadIdx.y == 0.
__device__ __forceinline__ float column_sum(float value) {
  __shared__ float scratch[kColumnRows][kColumnThreads];
  scratch[threadIdx.y][threadIdx.x] = value;
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.y == 0) {
#pragma unroll
    for (int y = 0; y < kColumnRows; ++y) sum += scratch[y][threadIdx.x];
  }
  return sum;
}

// Partial sums of grad_weight for rows too long for the kernel above: a block takes 32 columns and every gridDim.y-th row.
template <typename T>
__global__ void norm_weight_partials_kernel(const __grid_constant__ NormBackwardParams p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x;
  float sum = 0.f;
  if (column < p.rows.hidden) {
    const int64_t step = static_cast<int64_t>(gridDim.y) * kColumnRows;
    for (int64_t row = static_cast<int64_t>(blockIdx.y) * kColumnRows + threadIdx.y; row < p.rows.count(); row += step) {
      const RowIndex index(row, p.rows);
      const float grad_y = to_float(static_cast<const T*>(p.grad_y.data)[index.offset(p.grad_y) + column]);
      const float normed = to_float(static_cast<const T*>(p.x.data)[index.offset(p.x) + column]) * p.rstd[row];
      sum += grad_y * (p.cast_before_weight ? to_float(from_float<T>(normed)) : normed);
    }
  }
  sum = column_sum(sum);
  if (threadIdx.y == 0 && column < p.rows.hidden) p.grad_weight_partials[static_cast<int64_t>(blockIdx.y) * p.rows.hidden + column] = sum;
}

// grad_weight[column] = Σ partials[:, column], rounded once.
__global__ void sum_partials_kernel(const __grid_constant__ NormBackwardParams p) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x;
  float sum = 0.f;
  if (column < p.rows.hidden) {
    for (int64_t i = threadIdx.y; i < p.partials; i += kColumnRows) sum += p.grad_weight_partials[i * p.rows.hidden + column];
  }
  sum = column_sum(sum);
  if (threadIdx.y == 0 && column < p.rows.hidden) {
    const float value[1] = {sum};
    switch (p.grad_weight.dtype) {
      case Dtype::kFloat16:
        return store_floats_as<__half, 1>(p.grad_weight.data, column, false, 1, value);
      case Dtype::kBFloat16:
        return store_floats_as<__nv_bfloat16, 1>(p.grad_weight.data, column, false, 1, value);
      default:
        return store_floats_as<float, 1>(p.grad_weight.data, column, false, 1, value);
    }
  }
}

template <typename T, int kVecs>
cudaError_t launch_rows(const NormBackwardParams& p, int threads_per_row, int64_t blocks, cudaStream_t stream) {
  const int64_t row_vectors = ceil_div(p.rows.hidden, kVectorSize<T>);
  const int rows_per_block = threads_per_row < 128 ? 128 / threads_per_row : 1;
  const int64_t stage_bytes = 2 * rows_per_block * row_vectors * kVectorBytes;
  int stages = 2;
  if (const cudaError_t error = allow_shared_memory(norm_backward_kernel<T, kVecs>, stage_bytes, &stages); error != cudaSuccess) return error;
  const dim3 threads(threads_per_row, rows_per_block);
  norm_backward_kernel<T, kVecs><<<static_cast<unsigned>(blocks), threads, stages * stage_bytes, stream>>>(p, stages);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch(const NormBackwardParams& p, cudaStream_t stream) {
  const int64_t row_vectors = ceil_div(p.rows.hidden, kVectorSize<T>);
  const bool wants_weight = p.grad_weight_partials != nullptr;
  const int64_t blocks = norm_backward_partials(p.rows);
  cudaError_t error = cudaSuccess;
  // 4 vectors a thread up to 512 threads, 8 beyond.
  if (row_vectors <= 4 * kMaxThreadsPerRow) {
    error = launch_rows<T, 4>(p, row_launch(row_vectors, 4, 128).threads_per_row, blocks, stream);
  } else if (row_vectors <= kMaxBackwardVectors * kMaxThreadsPerRow) {
    error = launch_rows<T, kMaxBackwardVectors>(p, kMaxThreadsPerRow, blocks, stream);
  } else {
    error = launch_rows<T, 0>(p, kMaxThreadsPerRow, blocks, stream);
    if (error == cudaSuccess && wants_weight) {
      const dim3 grid(static_cast<unsigned>(ceil_div(p.rows.hidden, kColumnThreads)), static_cast<unsigned>(p.partials));
      norm_weight_partials_kernel<T><<<grid, dim3(kColumnThreads, kColumnRows), 0, stream>>>(p);
      error = cudaGetLastError();
    }
  }
  if (error != cudaSuccess || !wants_weight) return error;
  sum_partials_kernel<<<static_cast<unsigned>(ceil_div(p.rows.hidden, kColumnThreads)), dim3(kColumnThreads, kColumnRows), 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

int norm_backward_cuda(const NormBackwardParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (p.x.dtype) {
    case Dtype::kFloat16:
      return launch<__half>(p, cuda_stream);
    case Dtype::kBFloat16:
      return launch<__nv_bfloat16>(p, cuda_stream);
    default:
      return launch<float>(p, cuda_stream);
  }
}

}  // namespace ltx_kernels
