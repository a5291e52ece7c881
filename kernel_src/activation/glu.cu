// The launch of the gated activation core (glu.cuh): the dtype and the width of an access.
#include "../core/dispatch.cuh"
#include "glu.cuh"

namespace ltx_kernels {
namespace {

template <typename T, int kSize, bool kGated>
cudaError_t launch(const GluParams& p, cudaStream_t stream) {
  const GluGrid grid(p.rows, kSize, kGluThreads<kGated>, kGluUnits<T, kSize, kGated>);
  const int64_t blocks = grid.slice_blocks * p.rows.sizes[0] * p.rows.sizes[1];
  return launch_kernel(glu_kernel<T, kSize, kGated>, {static_cast<unsigned>(blocks), kGluThreads<kGated>}, stream, p,
                       grid);
}

template <typename T, int kSize>
cudaError_t launch(const GluParams& p, cudaStream_t stream) {
  return p.value.data != nullptr ? launch<T, kSize, true>(p, stream) : launch<T, kSize, false>(p, stream);
}

// The largest power of two, up to a vector, that divides the address of every row.
int64_t alignment(const GluParams& p) {
  uint64_t bits = kVectorBytes;
  for (const Operand* operand : {&p.gate, &p.value, &p.y}) {
    if (operand->data == nullptr) continue;
    bits |= reinterpret_cast<uintptr_t>(operand->data);
    for (int dim = 0; dim < Rows::kDims; ++dim) {
      if (p.rows.sizes[dim] > 1) bits |= static_cast<uint64_t>(operand->strides[dim]) * size_of(operand->dtype);
    }
  }
  return static_cast<int64_t>(bits & (~bits + 1));
}

// 16 bytes, else 4, which every other width of 16-bit halves allows at twice the instructions, else an element.
template <typename T>
cudaError_t launch(const GluParams& p, cudaStream_t stream) {
  const int64_t bytes = alignment(p);
  if (bytes == kVectorBytes && p.rows.hidden >= kVectorSize<T>) return launch<T, kVectorSize<T>>(p, stream);
  if constexpr (sizeof(T) < 4) {
    if (bytes >= 4 && p.rows.hidden >= 2) return launch<T, 2>(p, stream);
  }
  return launch<T, 1>(p, stream);
}

}  // namespace

int glu_cuda(const GluParams& params, void* stream) {
  GluParams p = params;
  join_rows(&p);
  return dispatch(p.y.dtype, [&](auto value) { return launch<decltype(value)>(p, static_cast<cudaStream_t>(stream)); });
}

}  // namespace ltx_kernels
