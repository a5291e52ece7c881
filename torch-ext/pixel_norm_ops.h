// Pixel norm: from tensors to PixelNormParams (kernel_src/norm/pixel_norm.h), or, with channels last, to the row-norm
// core. No maths here.
#pragma once

#include "../kernel_src/norm/norm.h"
#include "../kernel_src/norm/pixel_norm.h"
#include "backend.h"
#include "checks.h"

namespace ltx_kernels {

// The second dim moved to the end.
inline std::vector<int64_t> channels_to_end(std::vector<int64_t> dims) {
  const int64_t channels = dims[1];
  dims.erase(dims.begin() + 1);
  dims.push_back(channels);
  return dims;
}

// [B|1, C, 1, 1(, 1)]
inline void check_pixel_modulation(const OptionalTensor& tensor, const char* name, const Tensor& x) {
  if (!tensor.has_value()) return;
  check_device(*tensor, name, x, "x");
  dtype_of(*tensor, name);
  bool fits = tensor->dim() == x.dim() && (tensor->size(0) == 1 || tensor->size(0) == x.size(0)) &&
              tensor->size(1) == x.size(1);
  for (int64_t i = 2; fits && i < x.dim(); ++i) fits = tensor->size(i) == 1;
  if (!fits) {
    const char* ones = x.dim() == 5 ? ", 1, 1, 1]" : ", 1, 1]";
    fail(name, " has shape ", shape_of(*tensor), "; [", x.size(0), " or 1, ", x.size(1), ones, " is needed");
  }
}

// A pixel's channels are neighbours: a row.
template <typename Backend>
Tensor pixel_norm_rows(const Tensor& x, const OptionalTensor& scale, const OptionalTensor& shift, double eps) {
  const auto rows_of = [](const Tensor& tensor) {
    return view_of(tensor, channels_to_end(sizes_of(tensor)), channels_to_end(strides_of(tensor)));
  };
  NormParams params;
  params.statistic = Statistic::kRms;
  params.eps = static_cast<float>(eps);
  params.silu = true;
  const Tensor rows = rows_of(x);
  RowSpace space(rows);
  space.add(rows, "x", &params.x);
  if (scale.has_value()) space.add(rows_of(*scale), "scale", &params.scale);
  if (shift.has_value()) space.add(rows_of(*shift), "shift", &params.shift);
  const Tensor y = allocate_like(rows);
  space.add(y, "output", &params.y);
  params.rows = space.fold();
  if (params.rows.count() > 0 && params.rows.hidden > 0) Backend::norm_forward(params, x);
  std::vector<int64_t> strides = strides_of(y);
  strides.insert(strides.begin() + 1, strides.back());
  strides.pop_back();
  return view_of(y, sizes_of(x), strides);
}

inline bool has_contiguous_pixels(const Tensor& x) {
  int64_t stride = 1;
  for (int64_t i = x.dim() - 1; i >= 2; --i) {
    if (x.size(i) != 1 && x.stride(i) != stride) return false;
    stride *= x.size(i);
  }
  return true;
}

// Strides and pointer of a tensor [B|1, C, ...] for PixelNormParams.
inline Operand pixel_operand(const Tensor& tensor, const char* name, int64_t pixels) {
  Operand operand;
  operand.data = tensor.data_ptr();
  operand.dtype = dtype_of(tensor, name);
  if (tensor.size(0) > 1) operand.strides[PixelNormParams::kBatch] = tensor.stride(0);
  if (tensor.size(1) > 1) operand.strides[PixelNormParams::kChannel] = tensor.stride(1);
  const int64_t bytes = size_of(operand.dtype);
  operand.vectorized =
      pixels * bytes % kVectorBytes == 0 && reinterpret_cast<uintptr_t>(operand.data) % kVectorBytes == 0;
  for (int64_t stride : operand.strides) operand.vectorized = operand.vectorized && stride * bytes % kVectorBytes == 0;
  return operand;
}

// The output has x's memory format: channels last where x is and is not contiguous, else contiguous.
template <typename Backend>
Tensor pixel_norm_silu(Tensor x, OptionalTensor scale, OptionalTensor shift, double eps) {
  if (x.dim() != 4 && x.dim() != 5) fail("x has shape ", shape_of(x), "; [B, C, H, W] or [B, C, D, H, W] is needed");
  dtype_of(x, "x");
  check_pixel_modulation(scale, "scale", x);
  check_pixel_modulation(shift, "shift", x);
  if (!x.is_contiguous() && x.stride(1) == 1) {
    if (x.size(1) > INT32_MAX) fail("x has ", x.size(1), " channels; at most 2147483647 are supported");
    return pixel_norm_rows<Backend>(x, scale, shift, eps);
  }
  Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  if (!has_contiguous_pixels(x)) x = contiguous_copy(x);
  PixelNormParams params;
  params.eps = static_cast<float>(eps);
  params.batch = x.size(0);
  params.channels = x.size(1);
  params.pixels = x.numel() / (x.size(0) * x.size(1));
  params.x = pixel_operand(x, "x", params.pixels);
  params.y = pixel_operand(y, "output", params.pixels);
  if (scale.has_value()) params.scale = pixel_operand(*scale, "scale", 1);
  if (shift.has_value()) params.shift = pixel_operand(*shift, "shift", 1);
  Backend::pixel_norm(params, x);
  return y;
}

}  // namespace ltx_kernels
