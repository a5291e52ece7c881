// The ops of the RoPE family: from tensors to RopeParams (kernel_src/rope/rope.h) and to a backend. No maths here.
#pragma once

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../kernel_src/rope/rope.h"
#include "backend.h"
#include "checks.h"

namespace ltx_kernels {

// What the ops have in common. Index 0 is q, or the only x; index 1 is k.
struct RopeInputs {
  OptionalTensor x[2] = {}, weight[2] = {}, bias[2] = {}, cos[2] = {}, sin[2] = {};
  const char* names[2] = {"q", "k"};
  double eps = 0.;
  Statistic statistic = Statistic::kNone;
  bool across_heads = false;
  bool interleaved = true;
  std::optional<int64_t> rotary_dim = std::nullopt;
  int64_t rope_start = 0;
  std::optional<int64_t> rope_len = std::nullopt;
};

// Checks RopeInputs, allocates the outputs and fills RopeParams. It keeps the tensors that the parameters point to.
class RopeProblem {
 public:
  explicit RopeProblem(const RopeInputs& inputs) : in_(inputs) {
    set_shape();
    for (int i = 0; i < RopeParams::kSides; ++i) {
      if (!in_.x[i].has_value()) continue;
      set_x(i);
      set_vector(i, in_.weight[i], "_weight", &params.sides[i].weight);
      set_vector(i, in_.bias[i], "_bias", &params.sides[i].bias);
    }
    set_tables();
    params.statistic = in_.statistic;
    params.eps = static_cast<float>(in_.eps);
    params.across_heads = in_.across_heads;
    params.interleaved = in_.interleaved;
    params.rope_start = in_.rope_start;
  }

  // Tables of a grid take the place of cos and sin; tables[a] is [size, pairs, 2] fp32.
  void set_grid(const Tensor* tables) {
    static constexpr const char* kNames[RopeGrid::kAxes] = {"table_t", "table_h", "table_w"};
    RopeTable& table = params.tables[0];
    table.tokens = 1;
    int64_t pairs = 0;
    for (int axis = 0; axis < RopeGrid::kAxes; ++axis) {
      const Tensor& axis_table = tables[axis];
      if (axis_table.dim() != 3 || axis_table.size(2) != 2 || axis_table.scalar_type() != ScalarType::Float ||
          !axis_table.is_contiguous()) {
        fail(kNames[axis], " has shape ", shape_of(axis_table), " and dtype ", name_of(axis_table.scalar_type()),
             "; a contiguous float32 [size, pairs, 2] is needed");
      }
      check_device(axis_table, kNames[axis], *in_.x[0], "q");
      params.grid.tables[axis] = static_cast<const float*>(axis_table.data_ptr());
      params.grid.sizes[axis] = axis_table.size(0);
      params.grid.pairs[axis] = axis_table.size(1);
      table.tokens *= axis_table.size(0);
      pairs += axis_table.size(1);
    }
    if (2 * pairs != params.head_size)
      fail("axes_dim sums to ", 2 * pairs, "; the head size of q is needed: ", params.head_size);
    for (int i = 0; i < RopeParams::kSides; ++i) {
      if (params.sides[i].tokens != table.tokens) {
        fail("grid is (", params.grid.sizes[0], ", ", params.grid.sizes[1], ", ", params.grid.sizes[2], "), ",
             table.tokens, " tokens; ", in_.names[i], " has ", params.sides[i].tokens);
      }
      params.sides[i].table = 0;
    }
    params.table_count = 1;
    params.rotary_dim = params.head_size;
  }

  template <typename Backend>
  void run() {
    finish();
    bool any = false;
    for (int i = 0; i < RopeParams::kSides; ++i) {
      if (!in_.x[i].has_value()) continue;
      if (in_.x[i]->numel() == 0) {
        params.sides[i] = {};
      } else {
        any = true;
      }
    }
    if (any) Backend::rope(params, *in_.x[0]);
  }

  RopeParams params;
  OptionalTensor outputs[2];

 private:
  std::string name(int side, const char* suffix) const { return std::string(in_.names[side]) + suffix; }

  // Batch, heads and head size. A 3-D x is one head, or as many as a 4-D table has.
  void set_shape() {
    const Tensor& q = *in_.x[0];
    for (int i = 0; i < RopeParams::kSides; ++i) {
      if (!in_.x[i].has_value()) continue;
      const Tensor& x = *in_.x[i];
      dtype_of(x, in_.names[i]);
      if (x.dim() != 3 && x.dim() != 4) {
        fail(in_.names[i], " has shape ", shape_of(x),
             "; [batch, tokens, heads, head size] or [batch, tokens, hidden] is needed");
      }
      for (int64_t d = 0; d < x.dim(); ++d) {
        if (x.size(d) > INT32_MAX)
          fail(in_.names[i], " has shape ", shape_of(x), "; sizes of at most 2147483647 are supported");
      }
    }
    params.batch = q.size(0);
    int64_t heads = q.dim() == 4 ? q.size(2) : 1;
    params.head_size = q.size(q.dim() - 1);
    if (q.dim() == 3 && in_.cos[0].has_value() && in_.cos[0]->dim() == 4 && in_.cos[0]->size(2) > 1) {
      heads = in_.cos[0]->size(2);
      if (q.size(2) % heads != 0) {
        fail("cos has shape ", shape_of(*in_.cos[0]), ", ", heads, " heads; ", in_.names[0], " has a hidden size of ",
             q.size(2), ", which they do not divide");
      }
      params.head_size = q.size(2) / heads;
    }
    params.sides[0].heads = heads;
    params.sides[0].tokens = q.size(1);
    if (!in_.x[1].has_value()) return;
    const Tensor& k = *in_.x[1];
    check_device(k, "k", q, "q");
    if (k.scalar_type() != q.scalar_type()) {
      fail("k has dtype ", name_of(k.scalar_type()), "; the dtype of q is needed: ", name_of(q.scalar_type()));
    }
    const bool divides =
        k.dim() == 4 ? k.size(3) == params.head_size : params.head_size > 0 && k.size(2) % params.head_size == 0;
    if (k.dim() != q.dim() || k.size(0) != params.batch || !divides) {
      fail("k has shape ", shape_of(k), "; the dimensions, batch and head size (", params.head_size,
           ") of q are needed, which has shape ", shape_of(q));
    }
    params.sides[1].heads = k.dim() == 4 ? k.size(2) : k.size(2) / params.head_size;
    params.sides[1].tokens = k.size(1);
  }

  void set_x(int i) {
    RopeSide& side = params.sides[i];
    in_.x[i] = with_contiguous_rows(*in_.x[i]);
    outputs[i] = allocate_like(*in_.x[i]);
    set_operand(*in_.x[i], in_.names[i], &side.x);
    set_operand(*outputs[i], "y", &side.y);
  }

  void set_operand(const Tensor& x, const char* name, Operand* operand) {
    operand->data = x.data_ptr();
    operand->dtype = dtype_of(x, name);
    for (int d = 0; d < 2; ++d) operand->strides[d] = x.size(d) > 1 ? x.stride(d) : 0;
    operand->strides[2] = x.dim() == 4 ? x.stride(2) : params.head_size;
    if (x.dim() == 4 && x.size(2) == 1) operand->strides[2] = params.head_size;
  }

  // weight or bias: [head size], or [heads * head size] across heads.
  void set_vector(int i, const OptionalTensor& given, const char* suffix, Operand* operand) {
    if (!given.has_value()) return;
    const std::string full_name = name(i, suffix);
    const int64_t size = params.head_size * (in_.across_heads ? params.sides[i].heads : 1);
    if (in_.statistic == Statistic::kNone) fail(full_name, " is given and norm is 'none'; 'rms' or 'layer' is needed");
    if (given->dim() != 1 || given->size(0) != size) {
      fail(full_name, " has shape ", shape_of(*given), "; [", size, "], ",
           in_.across_heads ? "the heads times the head size (across_heads)" : "the head size", " of ", in_.names[i],
           ", is needed");
    }
    check_device(*given, full_name.c_str(), *in_.x[0], in_.names[0]);
    const Tensor vector = with_contiguous_rows(*given);
    kept_.push_back(vector);
    operand->data = vector.data_ptr();
    operand->dtype = dtype_of(vector, full_name.c_str());
    if (in_.across_heads) operand->strides[2] = params.head_size;
  }

  void set_tables() {
    params.rotary_dim = in_.rotary_dim.value_or(params.head_size);
    if (in_.rope_start < 0) fail("rope_start is ", in_.rope_start, "; 0 or more is needed");
    if (in_.rope_len.has_value() && *in_.rope_len < 0) fail("rope_len is ", *in_.rope_len, "; 0 or more is needed");
    if (in_.rotary_dim.has_value() && (params.rotary_dim <= 0 || params.rotary_dim > params.head_size)) {
      fail("rotary_dim is ", params.rotary_dim, "; 1 to the head size ", params.head_size, " is needed");
    }
    for (int i = 0; i < RopeParams::kSides; ++i) {
      const bool shares = i == 1 && !in_.cos[1].has_value() && !in_.sin[1].has_value();
      if (shares && in_.x[1].has_value() && params.sides[0].table == 0) {
        check_table(0, 1);
        params.sides[1].table = 0;
      }
      if (shares || (!in_.cos[i].has_value() && !in_.sin[i].has_value())) continue;
      if (!in_.x[i].has_value()) fail("k_cos and k_sin are given; they need k");
      set_table(i);
    }
    if (params.table_count == 0) params.rotary_dim = 0;
  }

  const char* cos_name(int table) const { return table == 0 ? "cos" : "k_cos"; }
  const char* sin_name(int table) const { return table == 0 ? "sin" : "k_sin"; }

  int64_t rotated_tokens(int side) const {
    const int64_t tokens = params.sides[side].tokens - in_.rope_start;
    const int64_t length = in_.rope_len.value_or(tokens);
    if (length < 0 || length > tokens) {
      fail("rope_start is ", in_.rope_start,
           in_.rope_len.has_value() ? " and rope_len " + std::to_string(length) : std::string(), "; ", in_.names[side],
           " has only ", params.sides[side].tokens, " tokens");
    }
    return length;
  }

  // The table with which q's tensors or k's own came, as [batch | 1, tokens, 1 | heads, width].
  void check_table(int table, int side) const {
    const Tensor& cos = *in_.cos[table];
    const int64_t dims = cos.dim();
    const int64_t rows = rotated_tokens(side);
    const int64_t rotary = params.rotary_dim;
    bool fits = dims >= 2 && dims <= 4;
    fits = fits && (cos.size(dims - 1) == rotary || 2 * cos.size(dims - 1) == rotary);
    fits = fits && cos.size(dims == 2 ? 0 : 1) == rows;
    fits = fits && (dims == 2 || cos.size(0) == 1 || cos.size(0) == params.batch);
    fits = fits && (dims < 4 || cos.size(2) == 1 || cos.size(2) == params.sides[side].heads);
    if (!fits || rotary % 2 != 0) {
      fail(cos_name(table), " has shape ", shape_of(cos), "; for ", in_.names[side], " [", rows, ", R], [",
           params.batch, " or 1, ", rows, ", R] or [", params.batch, " or 1, ", rows, ", ", params.sides[side].heads,
           " or 1, R] is needed, R being the ", in_.rotary_dim.has_value() ? "rotary_dim " : "head size ", rotary,
           " (an even number) or half of it");
    }
  }

  void set_table(int i) {
    if (!in_.cos[i].has_value()) fail(cos_name(i), " is missing; it goes with ", sin_name(i));
    if (!in_.sin[i].has_value()) fail(sin_name(i), " is missing; it goes with ", cos_name(i));
    for (const auto& [tensor, tensor_name] :
         {std::pair{&*in_.cos[i], cos_name(i)}, std::pair{&*in_.sin[i], sin_name(i)}}) {
      dtype_of(*tensor, tensor_name);
      check_device(*tensor, tensor_name, *in_.x[0], in_.names[0]);
    }
    check_same_shape(*in_.sin[i], sin_name(i), *in_.cos[i], cos_name(i));
    if (in_.sin[i]->scalar_type() != in_.cos[i]->scalar_type()) {
      fail(sin_name(i), " has dtype ", name_of(in_.sin[i]->scalar_type()), "; the dtype of ", cos_name(i),
           " is needed: ", name_of(in_.cos[i]->scalar_type()));
    }
    check_table(i, i);
    params.sides[i].table = params.table_count;
    RopeTable& table = params.tables[params.table_count++];
    table.dtype = dtype_of(*in_.cos[i], cos_name(i));
    if (!same_strides(*in_.cos[i], *in_.sin[i])) {
      in_.cos[i] = torch::stable::contiguous(*in_.cos[i]);
      in_.sin[i] = torch::stable::contiguous(*in_.sin[i]);
    }
    const Tensor& cos = *in_.cos[i];
    const int64_t dims = cos.dim();
    const auto stride = [&](int64_t d) { return cos.size(d) > 1 ? cos.stride(d) : 0; };
    table.cos = cos.data_ptr();
    table.sin = in_.sin[i]->data_ptr();
    table.strides[0] = dims == 2 ? 0 : stride(0);
    table.strides[1] = stride(dims == 2 ? 0 : 1);
    table.strides[2] = dims == 4 ? stride(2) : 0;
    table.tokens = cos.size(dims == 2 ? 0 : 1);
    table.heads = table.strides[2] == 0 ? 1 : cos.size(2);
    const bool full = cos.size(dims - 1) == params.rotary_dim;
    table.pair_stride = cos.stride(dims - 1) * (full && in_.interleaved ? 2 : 1);
  }

  static bool same_strides(const Tensor& a, const Tensor& b) {
    bool same = true;
    for (int64_t d = 0; d < a.dim(); ++d) same = same && (a.size(d) <= 1 || a.stride(d) == b.stride(d));
    return same;
  }

  static Tensor with_contiguous_rows(const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    return tensor.size(last) > 1 && tensor.stride(last) != 1 ? torch::stable::contiguous(tensor) : tensor;
  }

  // What can be read and written in whole vectors, now that the rotary dim is known.
  void finish() {
    const int64_t half = params.rotary_dim / 2;
    for (RopeSide& side : params.sides) {
      if (side.x.data == nullptr) continue;
      // Vectors start at multiples of their size from a row's start, and, in half rotation, from its half and from the
      // rotary dim; what is not rotated goes two vectors at a time there.
      const int64_t step = kVectorBytes / size_of(side.x.dtype);
      const int64_t unit = params.interleaved ? step : 2 * step;
      const bool regular = params.head_size % unit == 0 && params.rotary_dim % unit == 0;
      for (Operand* operand : {&side.x, &side.y, &side.weight, &side.bias}) {
        const int64_t bytes = std::min<int64_t>(kVectorBytes, step * size_of(operand->dtype));
        operand->vectorized = regular && is_aligned(operand->data, bytes) && has_aligned_strides(*operand, bytes);
      }
    }
    for (int i = 0; i < params.table_count; ++i) {
      RopeTable& table = params.tables[i];
      constexpr int64_t kPairs = 4;
      table.vectorized =
          (table.pair_stride == 1 || table.pair_stride == 2) && table.cos != nullptr && half % kPairs == 0;
      if (!table.vectorized) continue;
      const int64_t bytes = std::min<int64_t>(kVectorBytes, kPairs * table.pair_stride * size_of(table.dtype));
      table.vectorized = is_aligned(table.cos, bytes) && is_aligned(table.sin, bytes);
      for (int64_t stride : table.strides)
        table.vectorized = table.vectorized && stride * size_of(table.dtype) % bytes == 0;
    }
  }

  static bool is_aligned(const void* data, int64_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }
  static bool has_aligned_strides(const Operand& operand, int64_t bytes) {
    bool aligned = true;
    for (int64_t stride : operand.strides) aligned = aligned && stride * size_of(operand.dtype) % bytes == 0;
    return aligned;
  }

  RopeInputs in_;
  std::vector<Tensor> kept_;
};

template <typename Backend>
RopeProblem solve(const RopeInputs& inputs) {
  RopeProblem problem(inputs);
  problem.run<Backend>();
  return problem;
}

template <typename Backend>
Tensor rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, std::optional<int64_t> rotary_dim) {
  const RopeInputs inputs{.x = {x},
                          .cos = {cos},
                          .sin = {sin},
                          .names = {"x", nullptr},
                          .interleaved = interleaved,
                          .rotary_dim = rotary_dim};
  return *solve<Backend>(inputs).outputs[0];
}

// norm: 0 none, 1 rms, 2 layer, as in Statistic.
template <typename Backend>
std::tuple<Tensor, Tensor> qk_norm_rope(Tensor q, Tensor k, OptionalTensor q_weight, OptionalTensor k_weight,
                                        OptionalTensor cos, OptionalTensor sin, double eps, bool across_heads,
                                        bool interleaved, int64_t norm, OptionalTensor q_bias, OptionalTensor k_bias,
                                        OptionalTensor k_cos, OptionalTensor k_sin, std::optional<int64_t> rotary_dim,
                                        int64_t rope_start, std::optional<int64_t> rope_len) {
  const RopeInputs inputs{.x = {q, k},
                          .weight = {q_weight, k_weight},
                          .bias = {q_bias, k_bias},
                          .cos = {cos, k_cos},
                          .sin = {sin, k_sin},
                          .eps = eps,
                          .statistic = static_cast<Statistic>(norm),
                          .across_heads = across_heads,
                          .interleaved = interleaved,
                          .rotary_dim = rotary_dim,
                          .rope_start = rope_start,
                          .rope_len = rope_len};
  const RopeProblem problem = solve<Backend>(inputs);
  return {*problem.outputs[0], *problem.outputs[1]};
}

// qk_norm_rope without k.
template <typename Backend>
Tensor q_norm_rope(Tensor q, OptionalTensor q_weight, OptionalTensor cos, OptionalTensor sin, double eps,
                   bool across_heads, bool interleaved, int64_t norm, OptionalTensor q_bias,
                   std::optional<int64_t> rotary_dim, int64_t rope_start, std::optional<int64_t> rope_len) {
  const RopeInputs inputs{.x = {q},
                          .weight = {q_weight},
                          .bias = {q_bias},
                          .cos = {cos},
                          .sin = {sin},
                          .eps = eps,
                          .statistic = static_cast<Statistic>(norm),
                          .across_heads = across_heads,
                          .interleaved = interleaved,
                          .rotary_dim = rotary_dim,
                          .rope_start = rope_start,
                          .rope_len = rope_len};
  return *solve<Backend>(inputs).outputs[0];
}

// q and k: [batch, t * h * w, heads, head size]; tables: [t | h | w, pairs, 2] fp32, cos and sin.
template <typename Backend>
std::tuple<Tensor, Tensor> rope_3d(Tensor q, Tensor k, Tensor table_t, Tensor table_h, Tensor table_w) {
  RopeProblem problem(RopeInputs{.x = {q, k}});
  const Tensor tables[RopeGrid::kAxes] = {table_t, table_h, table_w};
  problem.set_grid(tables);
  problem.run<Backend>();
  return {*problem.outputs[0], *problem.outputs[1]};
}

}  // namespace ltx_kernels
