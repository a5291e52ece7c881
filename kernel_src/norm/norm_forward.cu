// The launch of the row-norm core (norm.cuh): the dtype, the statistic, threads and shared memory a row.
#include "norm.cuh"

namespace ltx_kernels {
namespace {

template <typename T, Statistic kStatistic>
cudaError_t launch(const NormParams& p, cudaStream_t stream) {
  const int64_t row_vectors = ceil_div(p.rows.hidden, kVectorSize<T>);
  const RowLaunch config = row_launch(row_vectors, /*vectors=*/8, /*block_threads=*/128);
  const int64_t row_bytes = row_vectors * kVectorBytes * (p.residual.data != nullptr ? 2 : 1);
  const int64_t stage_bytes = config.rows_per_block * row_bytes;
  int stages = 1;
  if (const cudaError_t error = allow_shared_memory(norm_forward_kernel<T, kStatistic>, stage_bytes, &stages); error != cudaSuccess) {
    return error;
  }
  const int64_t blocks = ceil_div(p.rows.count(), config.rows_per_block);
  const dim3 threads(config.threads_per_row, config.rows_per_block);
  norm_forward_kernel<T, kStatistic><<<static_cast<unsigned>(blocks), threads, stages * stage_bytes, stream>>>(p, stages > 0);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch(const NormParams& p, cudaStream_t stream) {
  switch (p.statistic) {
    case Statistic::kNone:
      return launch<T, Statistic::kNone>(p, stream);
    case Statistic::kRms:
      return launch<T, Statistic::kRms>(p, stream);
    default:
      return launch<T, Statistic::kLayer>(p, stream);
  }
}

}  // namespace

int norm_forward_cuda(const NormParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool mixed = p.residual.data != nullptr && p.residual.dtype != p.x.dtype;
  switch (mixed ? Dtype::kFloat32 : p.x.dtype) {
    case Dtype::kFloat16:
      return launch<__half>(p, cuda_stream);
    case Dtype::kBFloat16:
      return launch<__nv_bfloat16>(p, cuda_stream);
    default:
      return launch<float>(p, cuda_stream);
  }
}

}  // namespace ltx_kernels
