// The pixel norm of the LTX-Video VAE, as plain data: y = silu(x / √(mean(x²) + eps)·(1 + scale) + shift), the mean
// over the channels of a pixel.
#pragma once

#include "../core/operand.h"

namespace ltx_kernels {

// x and y are [batch, channels, pixels] with contiguous pixels, of one dtype; scale and shift are [batch, channels] or
// absent.
struct PixelNormParams {
  // Of the operands' strides, [0] steps through the batch and [1] through the channels.
  static constexpr int kBatch = 0;
  static constexpr int kChannel = 1;
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t pixels = 0;
  Operand x, scale, shift, y;
  float eps = 0.f;
};

int pixel_norm_cuda(const PixelNormParams& params, void* stream);
void pixel_norm_cpu(const PixelNormParams& params);

}  // namespace ltx_kernels
