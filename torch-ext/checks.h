// Argument checks and the step from tensors to plain operands, shared by every op and both backends. An error names the
// argument, what came and what is needed; it is thrown before anything is written.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../kernel_src/core/operand.h"

namespace ltx_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream message;
  message << "ltx_kernels: ";
  (message << ... << args);
  throw std::runtime_error(message.str());
}

inline std::string shape_of(const Tensor& tensor) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << ']';
  return text.str();
}

inline const char* name_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Bool:
      return "bool";
    default:
      return "a dtype that is not floating-point";
  }
}

inline Dtype dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      fail(name, " has dtype ", name_of(tensor.scalar_type()), "; float32, float16 or bfloat16 is needed");
  }
}

inline std::string device_of(const Tensor& tensor) {
  return tensor.is_cuda() ? "cuda:" + std::to_string(tensor.get_device_index())
                          : (tensor.is_cpu() ? "cpu" : "another device");
}

inline void check_device(const Tensor& tensor, const char* name, const Tensor& x, const char* x_name) {
  if (tensor.is_cuda() != x.is_cuda() || tensor.get_device_index() != x.get_device_index()) {
    fail(name, " is on ", device_of(tensor), "; the device of ", x_name, " is needed: ", device_of(x));
  }
}

inline void check_has_hidden(const Tensor& x, const char* name) {
  if (x.dim() < 1) fail(name, " has shape []; at least one dimension is needed, the last of which is normalised");
  if (x.size(x.dim() - 1) > INT32_MAX)
    fail(name, " has a last dimension of ", x.size(x.dim() - 1), "; at most 2147483647 is supported");
}

inline void check_same_shape(const Tensor& tensor, const char* name, const Tensor& x, const char* x_name) {
  bool same = tensor.dim() == x.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = tensor.size(i) == x.size(i);
  if (!same) fail(name, " has shape ", shape_of(tensor), "; the shape of ", x_name, " is needed: ", shape_of(x));
}

// A new contiguous tensor of this shape on x's device. Python turns a failure into torch.OutOfMemoryError
// (functional.py): the stable ABI loses the type of the error.
inline Tensor allocate(const std::vector<int64_t>& sizes, ScalarType type, const Tensor& x) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  int32_t device_type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  const auto error = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                              torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
                                              device_type, x.get_device_index(), &handle);
  if (error != TORCH_SUCCESS)
    fail(x.is_cuda() ? "CUDA out of memory: " : "", "could not allocate ", stride, " elements on ", device_of(x));
  return Tensor(handle);
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

inline Tensor allocate_like(const Tensor& x) { return allocate(sizes_of(x), x.scalar_type(), x); }

inline std::vector<int64_t> strides_of(const Tensor& tensor) {
  const auto strides = tensor.strides();
  return std::vector<int64_t>(strides.begin(), strides.end());
}

// The same memory from `offset` elements on with other sizes and strides; without the dispatcher, which takes a
// microsecond.
inline Tensor view_of(const Tensor& tensor, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                      int64_t offset = 0) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()),
                                                               sizes.data(), strides.data(), offset, &handle));
  return Tensor(handle);
}

inline Tensor contiguous_copy(const Tensor& tensor) {
  Tensor copy = allocate_like(tensor);
  torch::stable::copy_(copy, tensor);
  return copy;
}

// Folds the leading dims of an op's tensors, [*leading, hidden], into the three that the kernels step through.
// Neighbouring dims fold where every operand steps through them evenly; where more than three are left, the operands
// are copied to a layout that folds.
class RowSpace {
 public:
  explicit RowSpace(const Tensor& x) : dims_(x.dim() - 1), hidden_(x.size(x.dim() - 1)) {
    if (dims_ > kMaxDims) fail("x has ", dims_ + 1, " dimensions; at most ", kMaxDims + 1, " are supported");
    for (int64_t i = 0; i < dims_; ++i) sizes_[i] = x.size(i);
  }

  // A tensor that broadcasts to x by torch's rules; absent is fine. `target` gets its place when fold() is called.
  void add(const OptionalTensor& tensor, const char* name, Operand* target) {
    if (!tensor.has_value()) return;
    Entry& entry = entries_[count_++];
    entry.target = target;
    set(entry, *tensor, name);
  }

  // Sets every operand's strides and pointer, and the sizes of the folded rows.
  Rows fold() {
    Rows rows = fold_once();
    if (rows.sizes[0] < 0) {
      for (int k = 0; k < count_; ++k) expand(entries_[k]);
      rows = fold_once();
    }
    rows.hidden = hidden_;
    rows.inverse_hidden = 1.f / static_cast<float>(hidden_);
    int64_t vector_size = kVectorBytes / size_of(Dtype::kFloat32);
    for (int k = 0; k < count_; ++k) {
      if (entries_[k].dtype != Dtype::kFloat32) vector_size = kVectorBytes / size_of(entries_[k].dtype);
    }
    for (int k = 0; k < count_; ++k) {
      Entry& entry = entries_[k];
      Operand& operand = *entry.target;
      operand.data = entry.tensor->data_ptr();
      operand.dtype = entry.dtype;
      const int64_t bytes = size_of(entry.dtype);
      operand.vectorized = hidden_ % vector_size == 0 && reinterpret_cast<uintptr_t>(operand.data) % kVectorBytes == 0;
      for (int64_t stride : operand.strides)
        operand.vectorized = operand.vectorized && stride * bytes % kVectorBytes == 0;
    }
    return rows;
  }

 private:
  static constexpr int64_t kMaxDims = 15;
  static constexpr int kMaxOperands = 12;
  struct Entry {
    OptionalTensor tensor;
    Operand* target;
    Dtype dtype;
    int64_t strides[kMaxDims];  // of the leading dims, 0 where broadcast
  };

  void set(Entry& entry, const Tensor& tensor, const char* name) {
    entry.dtype = dtype_of(tensor, name);
    const int64_t dims = tensor.dim();
    bool broadcasts = dims >= 1 && dims <= dims_ + 1 && tensor.size(dims - 1) == hidden_;
    for (int64_t i = 0; broadcasts && i < dims - 1; ++i) {
      broadcasts = tensor.size(i) == 1 || tensor.size(i) == sizes_[dims_ + 1 - dims + i];
    }
    if (!broadcasts) {
      std::ostringstream needed;
      for (int64_t i = 0; i < dims_; ++i) needed << sizes_[i] << ", ";
      fail(name, " has shape ", shape_of(tensor), "; a shape that broadcasts to [", needed.str(), hidden_,
           "], with a last dimension of ", hidden_, ", is needed");
    }
    entry.tensor = hidden_ > 1 && tensor.stride(dims - 1) != 1 ? contiguous_copy(tensor) : tensor;
    for (int64_t i = 0; i < dims_; ++i) entry.strides[i] = 0;
    for (int64_t i = 0; i < dims - 1; ++i) {
      if (tensor.size(i) > 1) entry.strides[dims_ + 1 - dims + i] = entry.tensor->stride(i);
    }
  }

  // Copies an operand to x's full shape, unless it has that layout already: an output must stay where it is.
  void expand(Entry& entry) {
    bool contiguous = true;
    int64_t stride = hidden_;
    for (int64_t dim = dims_ - 1; dim >= 0; stride *= sizes_[dim--])
      contiguous = contiguous && (sizes_[dim] == 1 || entry.strides[dim] == stride);
    if (contiguous) return;
    std::vector<int64_t> sizes(sizes_, sizes_ + dims_);
    sizes.push_back(hidden_);
    Tensor full = allocate(sizes, entry.tensor->scalar_type(), *entry.tensor);
    torch::stable::copy_(full, *entry.tensor);
    set(entry, full, "");
  }

  Rows fold_once() {
    Rows rows;
    int group = Rows::kDims;
    for (int64_t dim = dims_ - 1; dim >= 0; --dim) {
      if (sizes_[dim] == 1) continue;
      bool folds = group < Rows::kDims;
      for (int k = 0; folds && k < count_; ++k) {
        folds = entries_[k].strides[dim] == entries_[k].target->strides[group] * rows.sizes[group];
      }
      if (folds) {
        rows.sizes[group] *= sizes_[dim];
        continue;
      }
      if (--group < 0) {
        rows.sizes[0] = -1;
        return rows;
      }
      rows.sizes[group] = sizes_[dim];
      for (int k = 0; k < count_; ++k) entries_[k].target->strides[group] = entries_[k].strides[dim];
    }
    for (int g = 0; g < group; ++g) {
      for (int k = 0; k < count_; ++k) entries_[k].target->strides[g] = 0;
    }
    return rows;
  }

  int64_t dims_;
  int64_t hidden_;
  int64_t sizes_[kMaxDims];
  Entry entries_[kMaxOperands];
  int count_ = 0;
};

}  // namespace ltx_kernels
