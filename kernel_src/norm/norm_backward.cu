// Backward of RMSNorm: with x̂ = x·rstd and g = grad_y·(weight_offset + weight),
//   grad_x = rstd·(g - x̂·mean(g·x̂))        grad_weight = Σ over rows of grad_y·x̂
// One pass over x and grad_y gives both: a fixed number of blocks walk over the rows, the next rows on their way to
// shared memory while the present ones are computed, and keep their part of grad_weight in registers. The parts are
// then summed in a fixed order: no atomics. Of few rows other blocks sum grad_weight, from grad_y and x. Measured on an
// H200 at [65536, 2048] bf16: 207 us, 95 % of a copy's rate; an earlier build took 211, and 269 without the copies
// ahead. The blocks of a cluster share rows that are too long for one (sm_90).
#include <algorithm>
#include <type_traits>

#include "../core/broadcast.cuh"
#include "../core/dispatch.cuh"
#include "../core/kernel.cuh"
#include "../core/launch.cuh"
#include "../core/reduce.cuh"
#include "../core/segment.cuh"
#include "../core/stage.cuh"
#include "../core/vec.cuh"
#include "norm.h"

namespace ltx_kernels {
namespace {

// Elements of a row, and of grad_weight, that a thread holds.
constexpr int kElements = static_cast<int>(kFusedColumns / kMaxThreadsPerRow);
constexpr int kStages = 2;

// Rows at a time, whose sums share a barrier; two fp32 rows would not fit the registers.
template <typename T>
constexpr int kRowsAtATime = sizeof(T) == 2 ? 2 : 1;

// The arithmetic of one vector, in as few instructions as it takes; products are spelled out so that both kernels round
// alike.

// sum + Σ grad_y·factor·x, with factor = weight_offset + weight. Times rstd it is Σ g·x̂.
template <int kSize>
__device__ __forceinline__ float add_products(float sum, const float (&factor)[kSize], const float (&grad_y)[kSize],
                                              const float (&x)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum = fmaf(__fmul_rn(grad_y[j], factor[j]), x[j], sum);
  return sum;
}

// grad_x from grad_y, which it replaces; x becomes x̂.
template <int kSize>
__device__ __forceinline__ void gradient(float rstd, float mean, const float (&factor)[kSize], float (&x)[kSize],
                                         float (&grad_y)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    x[j] = __fmul_rn(x[j], rstd);
    grad_y[j] = __fmul_rn(rstd, fmaf(-x[j], mean, __fmul_rn(grad_y[j], factor[j])));
  }
}

// Adds grad_y times what the weight saw: x̂, rounded where Llama rounds.
template <typename T, int kSize>
__device__ __forceinline__ void add_weight_gradient(const NormBackwardParams& p, const float (&grad_y)[kSize],
                                                    float (&normed)[kSize], float (&sum)[kSize]) {
  if (p.cast_before_weight) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) normed[j] = to_float(from_float<T>(normed[j]));
  }
#pragma unroll
  for (int j = 0; j < kSize; ++j) sum[j] = fmaf(grad_y[j], normed[j], sum[j]);
}

// The sums of a weight's gradient: a block takes as many columns as a warp has threads, each of its warps a part of
// what there is to add up, in a fixed order.
constexpr int kColumns = kWarpSize;
constexpr int kColumnThreads = 1024;  // what such a sum takes is the latency of its loads

__device__ __forceinline__ int thread_of_block() { return threadIdx.y * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int warps_of_block() { return blockDim.x * blockDim.y / kWarpSize; }

// Sum over the warps of the block, kMost at most, of one value a column; valid in the first warp.
template <int kMost>
__device__ __forceinline__ float column_sum(float value) {
  __shared__ float scratch[kMost][kColumns];
  scratch[thread_of_block() / kColumns][thread_of_block() % kColumns] = value;
  __syncthreads();
  float sum = 0.f;
  if (thread_of_block() < kColumns) {
#pragma unroll 8
    for (int warp = 0; warp < warps_of_block(); ++warp) sum += scratch[warp][thread_of_block()];
  }
  return sum;
}

// Rounds the gradient once.
__device__ __forceinline__ void store_weight_gradient(const NormBackwardParams& p, int64_t column, float sum) {
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

// Part `part` of `parts` of the rows, for the columns of block `block`, straight from grad_y and x: to its row of
// partial sums, or, where there are none, as the gradient.
template <typename T, int kMostWarps>
__device__ __forceinline__ void sum_rows(const NormBackwardParams& p, int64_t block, int64_t part, int64_t parts) {
  constexpr int kRows = 8;  // whose loads are on their way together
  const int64_t column = block * kColumns + thread_of_block() % kColumns;
  const int64_t rows = p.rows.count(), step = parts * warps_of_block();
  float sums[kRows] = {};
  // `flat`: rows fold into one dim. Asked for each row, it would part their loads.
  const auto add_rows = [&](auto flat) {
    for (int64_t first = part * warps_of_block() + thread_of_block() / kColumns; first < rows; first += step * kRows) {
      float grad_y[kRows], normed[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool exists = first + i * step < rows;
        const int64_t row = exists ? first + i * step : first;
        const RowIndex index = flat ? RowIndex(row) : RowIndex(row, p.rows);
        const auto value = [&](const Operand& operand) {
          return to_float(static_cast<const T*>(operand.data)[index.offset(operand) + column]);
        };
        const float of_grad_y = value(p.grad_y), of_x = __fmul_rn(value(p.x), p.rstd[row]);
        grad_y[i] = exists ? of_grad_y : 0.f;
        normed[i] = exists ? of_x : 0.f;
      }
      add_weight_gradient<T>(p, grad_y, normed, sums);
    }
  };
  if (column < p.rows.hidden) p.rows.sizes[2] == rows ? add_rows(std::true_type{}) : add_rows(std::false_type{});
  float sum = sums[0];
#pragma unroll
  for (int i = 1; i < kRows; ++i) sum += sums[i];
  sum = column_sum<kMostWarps>(sum);
  if (thread_of_block() >= kColumns || column >= p.rows.hidden) return;
  if (p.partials > 0) {
    p.grad_weight_partials[part * p.rows.hidden + column] = sum;
  } else {
    store_weight_gradient(p, column, sum);
  }
}

// Bytes in which a thread stages the rows of two turns.
template <typename T>
constexpr int kStagedBytes = kStages * kRowsAtATime<T> * 2 * kElements * static_cast<int>(sizeof(T));

// The first row_blocks blocks walk over the rows; those behind them, where there are any, take columns of few rows,
// whose partial sums and the kernel to add them up would take longer than reading the rows again
// (norm_backward_spread). kStaged: all operands are aligned, and weight holds M. Otherwise they may start anywhere and
// weight be of any dtype; the order of the sums is the same. kSegmented (sm_90): a cluster of blocks shares a row.
template <typename T, typename M, bool kStaged, bool kSegmented>
__global__ void __launch_bounds__(kMaxThreadsPerRow)
    norm_backward_kernel(const __grid_constant__ NormBackwardParams p, const unsigned row_blocks) {
  wait_for_previous_kernel();
  if (blockIdx.x >= row_blocks) return sum_rows<T, kMaxThreadsPerRow / kWarpSize>(p, blockIdx.x - row_blocks, 0, 1);
  constexpr int kSize = kVectorSize<T>;
  constexpr int kVecs = kElements / kSize;
  constexpr int kRows = kRowsAtATime<T>;
  using Vector = Vec<T, kSize>;
  extern __shared__ int4 shared[];
  __shared__ float scratch[2][kMaxWarps * kRows];

  Segment<kSegmented, kRows> segment;
  const int64_t rows = p.rows.count();
  const int hidden = static_cast<int>(p.rows.hidden);
  const int row_vectors = (hidden + kSize - 1) / kSize;
  const auto vector = [&](int i) { return static_cast<int>(threadIdx.x + (segment.rank() * kVecs + i) * blockDim.x); };
  const auto count = [&](int v) { return kStaged ? kSize : min(kSize, hidden - v * kSize); };
  // Calls f(row, i, vector) for the vectors of this thread that exist, from the row `first` on.
  const auto for_each = [&](int64_t first, auto&& f) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
        if (first + row < rows && vector(i) < row_vectors) f(row, i, vector(i));
      }
    }
  };
  // A thread reads only what it has staged itself.
  const int threads = blockDim.x * blockDim.y, thread = thread_of_block();
  const auto stage_of = [&](int stage, int row, int operand, int i) {
    return reinterpret_cast<Vector*>(shared) + (((stage * kRows + row) * 2 + operand) * kVecs + i) * threads + thread;
  };
  const auto copy_ahead = [&](int64_t first, int stage) {
    if constexpr (kStaged) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (first + row >= rows) continue;
        const auto row_of = [&](const Operand& operand) {
          return reinterpret_cast<const Vector*>(static_cast<const T*>(operand.data) +
                                                 row_offset(operand, first + row, p.rows));
        };
        const Vector *grad_y = row_of(p.grad_y), *x = row_of(p.x);
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          if (vector(i) >= row_vectors) continue;
          copy_async_16(stage_of(stage, row, 0, i), grad_y + vector(i));
          copy_async_16(stage_of(stage, row, 1, i), x + vector(i));
        }
      }
      copy_async_commit();
    }
  };
  const auto load_rstd = [&](int64_t first, float (&rstd)[kRows]) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) rstd[row] = first + row < rows ? p.rstd[first + row] : 0.f;
  };

  // The rows of this thread, from `first` on, and of the others of the block: all make as many turns.
  const int64_t block = segment.row(), blocks = row_blocks / segment.count();
  const int64_t step = blocks * blockDim.y * kRows;
  int64_t first = (block * blockDim.y + threadIdx.y) * kRows;
  copy_ahead(first, 0);
  float rstd[kRows];
  load_rstd(first, rstd);

  const auto load_factor = [&](int v, float (&factor)[kSize]) {
    if (p.weight.data == nullptr) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) factor[j] = 1.f;
      return;
    }
    if constexpr (kStaged) {
      load_floats_as<M>(p.weight.data, v * kSize, true, kSize, factor);
    } else {
      load_floats(p.weight, v * kSize, count(v), factor);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) factor[j] = __fadd_rn(p.weight_offset, factor[j]);
  };
  // Staged, the factors stay in registers; the addresses of single elements leave no room for them.
  float factors[kStaged ? kVecs : 1][kSize] = {};
  if constexpr (kStaged) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      if (vector(i) < row_vectors) load_factor(vector(i), factors[i]);
    }
  }
  const auto factor_of = [&](int i, int v) -> const float (&)[kSize] {
    if constexpr (kStaged) return factors[i];
    load_factor(v, factors[0]);
    return factors[0];
  };
  float grad_weight[kVecs][kSize] = {};

  // Stage and scratch alternate, so that the next rows may be copied and summed while a slow warp still reads these.
  int turn = 0;
  for (int64_t block_first = block * blockDim.y * kRows; block_first < rows; block_first += step, ++turn) {
    const int stage = turn & 1;
    copy_ahead(first + step, stage ^ 1);
    float next_rstd[kRows];
    load_rstd(first + step, next_rstd);
    copy_async_wait<1>();
    Vector grad_y[kRows][kVecs] = {}, x[kRows][kVecs] = {};
    float mean[kRows] = {};
    for_each(first, [&](int row, int i, int v) {
      if constexpr (kStaged) {
        grad_y[row][i] = *stage_of(stage, row, 0, i);
        x[row][i] = *stage_of(stage, row, 1, i);
      } else {
        const auto load_vector = [&](const Operand& operand) {
          return load<T, kSize>(operand, row_offset(operand, first + row, p.rows) + v * kSize, count(v));
        };
        grad_y[row][i] = load_vector(p.grad_y);
        x[row][i] = load_vector(p.x);
      }
    });
    for_each(first, [&](int row, int i, int v) {
      float g[kSize], normed[kSize];
      to_floats(grad_y[row][i], g);
      to_floats(x[row][i], normed);
      mean[row] = add_products(mean[row], factor_of(i, v), g, normed);
    });
    if constexpr (kSegmented) {
      segment.add(mean, stage, turn >> 1 & 1);
    } else {
      row_sums(mean, scratch[stage]);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) mean[row] *= rstd[row] * p.rows.inverse_hidden;

    for_each(first, [&](int row, int i, int v) {
      float g[kSize], normed[kSize];
      to_floats(grad_y[row][i], g);
      to_floats(x[row][i], normed);
      float grad_x[kSize];
#pragma unroll
      for (int j = 0; j < kSize; ++j) grad_x[j] = g[j];
      gradient(rstd[row], mean[row], factor_of(i, v), normed, grad_x);
      add_weight_gradient<T>(p, g, normed, grad_weight[i]);
      store_floats_as<T>(p.grad_x.data, row_offset(p.grad_x, first + row, p.rows) + v * kSize,
                         kStaged || p.grad_x.vectorized, count(v), grad_x);
    });
    first += step;
#pragma unroll
    for (int row = 0; row < kRows; ++row) rstd[row] = next_rstd[row];
  }

  if (p.partials == 0) return;
  // The rows of the block add up, one after the other, to the block's row of partial sums. They meet in the shared
  // memory of the stages: in global memory, a turn for each row of the block, 32 rows of 64 columns took 26 us.
  float* const partials = p.grad_weight_partials + block * hidden;
  float* const meeting = reinterpret_cast<float*>(shared);  // [rows of the block, hidden]
  const bool one_row = blockDim.y == 1;
  if (!one_row) __syncthreads();  // the stages have been read
#pragma unroll
  for (int i = 0; i < kVecs; ++i) {
    const int column = vector(i) * kSize;
    if (column >= hidden) continue;
    if (one_row) {
      store_floats_as<float>(partials, column, kStaged, hidden - column, grad_weight[i]);
    } else {
      float* const target = meeting + threadIdx.y * hidden + column;
      const Vec<float, kSize> values = from_floats<float>(grad_weight[i]);
      if constexpr (kStaged) {
        *reinterpret_cast<Vec<float, kSize>*>(target) = values;
      } else {
        store_elements(target, values, hidden - column);
      }
    }
  }
  if (one_row) return;
  __syncthreads();
  for (int column = thread; column < hidden; column += threads) {
    float sum = meeting[column];
    for (unsigned row = 1; row < blockDim.y; ++row) sum += meeting[row * hidden + column];
    partials[column] = sum;
  }
}

// grad_x alone, for rows of any length, which are read once for each pass.
template <typename T>
__global__ void __launch_bounds__(kMaxThreadsPerRow, 1)
    norm_backward_long_kernel(const __grid_constant__ NormBackwardParams p) {
  wait_for_previous_kernel();
  constexpr int kSize = kVectorSize<T>;
  __shared__ float scratch[kMaxWarps];
  const int64_t row = blockIdx.x;
  const RowIndex index(row, p.rows);
  const float rstd = p.rstd[row];
  const auto for_each = [&](auto&& f) {
    for (int64_t column = static_cast<int64_t>(threadIdx.x) * kSize; column < p.rows.hidden;
         column += static_cast<int64_t>(blockDim.x) * kSize) {
      const int count = static_cast<int>(min(static_cast<int64_t>(kSize), p.rows.hidden - column));
      float factor[kSize] = {}, grad_y[kSize], x[kSize];
      if (p.weight.data != nullptr) load_floats(p.weight, column, count, factor);
#pragma unroll
      for (int j = 0; j < kSize; ++j)
        factor[j] = p.weight.data != nullptr ? __fadd_rn(p.weight_offset, factor[j]) : 1.f;
      to_floats(load<T, kSize>(p.grad_y, index.offset(p.grad_y) + column, count), grad_y);
      to_floats(load<T, kSize>(p.x, index.offset(p.x) + column, count), x);
      f(column, count, factor, grad_y, x);
    }
  };
  float dot = 0.f;
  for_each([&](int64_t, int, float (&factor)[kSize], float (&grad_y)[kSize], float (&x)[kSize]) {
    dot = add_products(dot, factor, grad_y, x);
  });
  const float mean = row_sum(dot, scratch) * rstd * p.rows.inverse_hidden;
  for_each([&](int64_t column, int count, float (&factor)[kSize], float (&grad_y)[kSize], float (&x)[kSize]) {
    gradient(rstd, mean, factor, x, grad_y);
    store<T, kSize>(p.grad_x, index.offset(p.grad_x) + column, count, grad_y);
  });
}

// grad_weight, or its partial sums, where norm_backward_kernel does not run.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads) norm_weight_kernel(const __grid_constant__ NormBackwardParams p) {
  wait_for_previous_kernel();
  sum_rows<T, kColumnThreads / kWarpSize>(p, blockIdx.x, blockIdx.y, gridDim.y);
}

// grad_weight[column] = Σ partials[:, column].
__global__ void __launch_bounds__(kColumnThreads) sum_partials_kernel(const __grid_constant__ NormBackwardParams p) {
  wait_for_previous_kernel();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x % kColumns;
  float sum = 0.f;
  if (column < p.rows.hidden) {
#pragma unroll 8
    for (int64_t i = threadIdx.x / kColumns; i < p.partials; i += kColumnThreads / kColumns)
      sum += p.grad_weight_partials[i * p.rows.hidden + column];
  }
  sum = column_sum<kColumnThreads / kWarpSize>(sum);
  if (threadIdx.x < kColumns && column < p.rows.hidden) store_weight_gradient(p, column, sum);
}

int64_t column_blocks(const NormBackwardParams& p) { return ceil_div(p.rows.hidden, kColumns); }

// False where the chip has no clusters, or too little shared memory for the stages.
template <typename T, typename M, bool kStaged, bool kSegmented>
bool launch_rows(const NormBackwardParams& p, const BackwardSpread& spread, cudaStream_t stream, cudaError_t* error) {
  const auto kernel = norm_backward_kernel<T, M, kStaged, kSegmented>;
  if (kSegmented && !is_sm_90_code(reinterpret_cast<const void*>(kernel))) return false;
  constexpr int kVecs = kElements / kVectorSize<T>;
  const int64_t row_vectors = ceil_div(p.rows.hidden, kVectorSize<T>);
  // Eight threads a row: a warp then reads whole lines of 128 bytes. [1048576, 64] bf16: 113.9 us, 116.5 with four; six
  // vectors lose, [262144, 48]: 37.5 us, 36.3.
  const auto vectors = static_cast<int>(std::clamp<int64_t>(ceil_div(row_vectors, 8), 1, kVecs));
  RowLaunch config = row_launch(ceil_div(row_vectors, spread.segments), vectors, spread.block_threads);
  if (kSegmented) config.rows_per_block = 1;
  const dim3 threads(config.threads_per_row, config.rows_per_block);
  // Where nothing is staged, what the rows of a block add up in.
  int64_t shared = config.rows_per_block > 1 ? config.rows_per_block * p.rows.hidden * sizeof(float) : 0;
  if constexpr (kStaged) shared = static_cast<int64_t>(kStagedBytes<T>) * threads.x * threads.y;
  int fits = 1;
  *error = allow_shared_memory(kernel, shared, &fits);
  if (*error != cudaSuccess) return true;
  if (!fits) return false;
  const int64_t turns = ceil_div(p.rows.count(), config.rows_per_block * kRowsAtATime<T>);
  const int64_t walkers = p.partials > 0 ? p.partials : std::min<int64_t>(turns, spread.walkers);
  const bool sums_rows = p.partials == 0 && p.grad_weight.data != nullptr;
  const int64_t column_clusters = sums_rows ? ceil_div(column_blocks(p), spread.segments) : 0;
  const auto row_blocks = static_cast<unsigned>(walkers * spread.segments);
  const auto blocks = static_cast<unsigned>((walkers + column_clusters) * spread.segments);
  *error = launch_kernel(kernel, {blocks, threads, shared, spread.segments}, stream, p, row_blocks);
  return true;
}

template <typename T, bool kSegmented>
bool try_rows(const NormBackwardParams& p, const BackwardSpread& spread, cudaStream_t stream, cudaError_t* error) {
  const bool aligned =
      p.x.vectorized && p.grad_y.vectorized && p.grad_x.vectorized && (p.weight.data == nullptr || p.weight.vectorized);
  if (aligned && (p.weight.data == nullptr || p.weight.dtype == kDtype<T>)) {
    if (launch_rows<T, T, true, kSegmented>(p, spread, stream, error)) return true;
  } else if (aligned && p.weight.dtype == Dtype::kFloat32) {
    if (launch_rows<T, float, true, kSegmented>(p, spread, stream, error)) return true;
  }
  return launch_rows<T, T, false, kSegmented>(p, spread, stream, error);
}

template <typename T>
cudaError_t launch(NormBackwardParams p, cudaStream_t stream) {
  const int64_t rows = p.rows.count();
  const BackwardSpread spread = norm_backward_spread(p.rows.hidden);
  const auto columns = static_cast<unsigned>(column_blocks(p));
  cudaError_t error = cudaSuccess;
  bool fused = false;
  if (rows > 0 && spread.segments == 1) fused = try_rows<T, false>(p, spread, stream, &error);
  if (rows > 0 && spread.segments > 1) fused = try_rows<T, true>(p, spread, stream, &error);
  if (!fused) {
    if (rows > 0) {
      error = launch_kernel(norm_backward_long_kernel<T>, {static_cast<unsigned>(rows), kMaxThreadsPerRow}, stream, p);
    }
    // Eight rows a thread and more, where there are as many.
    constexpr int kWarps = kColumnThreads / kWarpSize;
    if (p.partials > 0) p.partials = std::clamp(ceil_div(rows, 8 * kWarps), int64_t{1}, p.partials);
    if (error == cudaSuccess && p.grad_weight.data != nullptr) {
      const dim3 blocks(columns, static_cast<unsigned>(std::max(p.partials, int64_t{1})));
      error = launch_kernel(norm_weight_kernel<T>, {blocks, kColumnThreads}, stream, p);
    }
  }
  if (error != cudaSuccess || p.partials == 0) return error;
  return launch_kernel(sum_partials_kernel, {columns, kColumnThreads}, stream, p);
}

}  // namespace

int norm_backward_cuda(const NormBackwardParams& p, void* stream) {
  return dispatch(p.x.dtype, [&](auto value) { return launch<decltype(value)>(p, static_cast<cudaStream_t>(stream)); });
}

}  // namespace ltx_kernels
