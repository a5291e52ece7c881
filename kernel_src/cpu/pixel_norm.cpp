// Pixel norm on the CPU where the channels of a pixel are far apart: runs of pixels, channel by channel, through fp32
// buffers.
#include "../norm/pixel_norm.h"

#include <algorithm>
#include <cmath>

#include "math.h"
#include "rows.h"

namespace ltx_kernels {
namespace {

constexpr int64_t kRun = 1024;
constexpr int64_t kBlock = 32;  // channels summed apart: one running sum over all of them loses accuracy

inline float channel_value(const Operand& operand, int64_t image, int64_t channel) {
  float value = 0.f;
  if (operand.data != nullptr) {
    load_row(operand,
             image * operand.strides[PixelNormParams::kBatch] + channel * operand.strides[PixelNormParams::kChannel], 1,
             &value);
  }
  return value;
}

LTX_KERNELS_MULTIVERSION void norm_runs(const PixelNormParams& p, int64_t image_runs, int64_t begin, int64_t end) {
  alignas(kCacheLine) float x[kRun];
  alignas(kCacheLine) float sum[kRun];
  alignas(kCacheLine) float rstd[kRun];
  for (int64_t number = begin; number < end; ++number) {
    const int64_t image = number / image_runs;
    const int64_t first = number % image_runs * kRun;
    const int64_t count = std::min(kRun, p.pixels - first);
    const auto offset = [&](const Operand& operand, int64_t channel) {
      return image * operand.strides[p.kBatch] + channel * operand.strides[p.kChannel] + first;
    };
    std::fill(rstd, rstd + count, 0.f);
    for (int64_t block = 0; block < p.channels; block += kBlock) {
      std::fill(sum, sum + count, 0.f);
      for (int64_t c = block; c < std::min(block + kBlock, p.channels); ++c) {
        load_row(p.x, offset(p.x, c), count, x);
        for (int64_t i = 0; i < count; ++i) sum[i] += x[i] * x[i];
      }
      for (int64_t i = 0; i < count; ++i) rstd[i] += sum[i];
    }
    for (int64_t i = 0; i < count; ++i) rstd[i] = 1.f / std::sqrt(rstd[i] / static_cast<float>(p.channels) + p.eps);
    for (int64_t c = 0; c < p.channels; ++c) {
      const float factor = 1.f + channel_value(p.scale, image, c);
      const float term = channel_value(p.shift, image, c);
      load_row(p.x, offset(p.x, c), count, x);
      for (int64_t i = 0; i < count; ++i) x[i] = silu(x[i] * rstd[i] * factor + term);
      store_row(p.y, offset(p.y, c), count, x);
    }
  }
}

}  // namespace

void pixel_norm_cpu(const PixelNormParams& p) {
  const int64_t image_runs = (p.pixels + kRun - 1) / kRun;
  torch::stable::parallel_for(0, p.batch * image_runs, row_grain(p.channels * std::min(kRun, p.pixels)),
                              [&](int64_t begin, int64_t end) { norm_runs(p, image_runs, begin, end); });
}

}  // namespace ltx_kernels
