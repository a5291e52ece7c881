// RoPE, and the norm of q and k that goes before it, as plain data:
//   y = rotate(norm(x)·weight + bias)
// where rotate turns the pair (a, b) into (a·cos - b·sin, b·cos + a·sin). A pair is (2i, 2i+1) when interleaved, (i, i
// + rotary_dim/2) when not; elements from rotary_dim on are not rotated.
#pragma once

#include "../norm/norm.h"

namespace ltx_kernels {

// cos and sin of each pair, [batch, tokens, heads, pairs] with strides in elements (0 where broadcast), read in place.
struct RopeTable {
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t strides[3] = {0, 0, 0};
  int64_t pair_stride = 1;  // 2: a full interleaved table, which holds each value twice, or one half of a complex one
  int64_t tokens = 0;       // row i is that of token rope_start + i
  int64_t heads = 1;        // 1: one for all heads
  Dtype dtype = Dtype::kFloat32;
  bool vectorized = false;  // any four pairs from a multiple of four on are whole, aligned vectors
};

// Tables of a grid of tokens, t outermost: axis a takes its pairs from row `position` of tables[a], [sizes[a],
// pairs[a], 2] (cos, sin).
struct RopeGrid {
  static constexpr int kAxes = 3;
  const float* tables[kAxes] = {};
  int64_t sizes[kAxes] = {};
  int64_t pairs[kAxes] = {};

  constexpr bool exists() const { return sizes[0] > 0; }
};

// q or k. Operands are [batch, tokens, heads, head_size]; without data it is absent.
struct RopeSide {
  Operand x, y;
  Operand weight, bias;  // [head_size], or [heads, head_size] across heads
  int64_t tokens = 0;
  int64_t heads = 0;
  int table = -1;  // the index of its table; -1: not rotated
};

struct RopeParams {
  static constexpr int kSides = 2;
  RopeSide sides[kSides];
  RopeTable tables[kSides];
  int table_count = 0;
  RopeGrid grid;  // where it exists, it takes the place of the only table's cos and sin
  int64_t batch = 0;
  int64_t head_size = 0;
  int64_t rotary_dim = 0;  // even; 0 without a table
  int64_t rope_start = 0;
  Statistic statistic = Statistic::kNone;
  bool across_heads = false;  // one statistic for all heads of a token
  bool interleaved = true;
  float eps = 0.f;
};

// Returns a cudaError_t; the stream is a cudaStream_t.
int rope_cuda(const RopeParams& params, void* stream);

void rope_cpu(const RopeParams& params);

}  // namespace ltx_kernels
