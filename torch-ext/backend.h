// The two backends behind one interface: each op is a template over it, so that checks, shapes and meaning are the same
// on both.
#pragma once

#include "../kernel_src/activation/glu.h"
#include "../kernel_src/norm/norm.h"
#include "../kernel_src/norm/pixel_norm.h"
#include "../kernel_src/rope/rope.h"
#include "checks.h"

namespace ltx_kernels {

#if defined(CUDA_KERNEL)
struct Cuda {
  static void norm_forward(const NormParams& params, const Tensor& x) {
    on_stream(x, [&](void* s) { return norm_forward_cuda(params, s); });
  }
  static void norm_backward(const NormBackwardParams& params, const Tensor& x) {
    on_stream(x, [&](void* s) { return norm_backward_cuda(params, s); });
  }
  static int64_t partial_sums(const Rows& rows) { return norm_backward_partials(rows); }
  static void pixel_norm(const PixelNormParams& params, const Tensor& x) {
    on_stream(x, [&](void* s) { return pixel_norm_cuda(params, s); });
  }
  static void rope(const RopeParams& params, const Tensor& x) {
    on_stream(x, [&](void* s) { return rope_cuda(params, s); });
  }
  static void glu(const GluParams& params, const Tensor& x) {
    on_stream(x, [&](void* s) { return glu_cuda(params, s); });
  }

 private:
  // Runs a launch on x's device and torch's current stream there.
  template <typename Launch>
  static void on_stream(const Tensor& x, Launch&& launch) {
    const int32_t device = x.get_device_index();
    int32_t current = device;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_device_index(&current));
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    if (current != device) guard.emplace(device);
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    const int error = launch(stream);
    if (error != 0) fail("the CUDA kernel could not be launched: error ", error);
  }
};
#endif

struct Cpu {
  static void norm_forward(const NormParams& params, const Tensor&) { norm_forward_cpu(params); }
  static void norm_backward(const NormBackwardParams& params, const Tensor&) { norm_backward_cpu(params); }
  static int64_t partial_sums(const Rows&) { return 0; }  // it makes its own
  static void pixel_norm(const PixelNormParams& params, const Tensor&) { pixel_norm_cpu(params); }
  static void rope(const RopeParams& params, const Tensor&) { rope_cpu(params); }
  static void glu(const GluParams& params, const Tensor&) { glu_cpu(params); }
};

}  // namespace ltx_kernels
