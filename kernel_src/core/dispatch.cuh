// From a run-time dtype to a kernel's type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "operand.h"

namespace ltx_kernels {

// Calls f with a value of the dtype's type: dispatch(dtype, [&](auto value) { return launch<decltype(value)>(...); }).
template <typename F>
auto dispatch(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat16:
      return f(__half{});
    case Dtype::kBFloat16:
      return f(__nv_bfloat16{});
    default:
      return f(float{});
  }
}

}  // namespace ltx_kernels
