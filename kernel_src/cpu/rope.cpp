// The RoPE core on the CPU: the sentence of rope.h, a token's heads at a time through fp32 buffers that stay in the
// L1/L2 cache.
#include "../rope/rope.h"

#include <algorithm>
#include <vector>

#include "rows.h"

namespace ltx_kernels {
namespace {

// `pairs` values of one row of a table.
inline void load_pairs(const void* data, Dtype dtype, int64_t offset, int64_t stride, int64_t pairs, float* values) {
  if (stride == 1) return load_row({const_cast<void*>(data), {}, dtype, false}, offset, pairs, values);
  if (dtype == Dtype::kFloat32) {
    const float* source = static_cast<const float*>(data) + offset;
    for (int64_t i = 0; i < pairs; ++i) values[i] = source[i * stride];
  } else if (dtype == Dtype::kFloat16) {
    const uint16_t* source = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < pairs; ++i) values[i] = float16_to_float(source[i * stride]);
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < pairs; ++i) values[i] = bfloat16_to_float(source[i * stride]);
  }
}

// The cosines and sines of token `row` on a grid: a piece from each axis.
inline void load_grid(const RopeGrid& grid, int64_t row, float* cos, float* sin) {
  const int64_t positions[RopeGrid::kAxes] = {row / (grid.sizes[1] * grid.sizes[2]),
                                              row / grid.sizes[2] % grid.sizes[1], row % grid.sizes[2]};
  for (int axis = 0; axis < RopeGrid::kAxes; ++axis) {
    const float* source = grid.tables[axis] + positions[axis] * grid.pairs[axis] * 2;
    for (int64_t i = 0; i < grid.pairs[axis]; ++i) {
      *cos++ = source[2 * i];
      *sin++ = source[2 * i + 1];
    }
  }
}

inline void rotate(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cos[i] - b * sin[i];
      x[i + half] = b * cos[i] + a * sin[i];
    }
  }
}

struct Vectors {  // weight and bias of q or k as fp32, no data: absent
  const float* weight;
  const float* bias;
};

// A row of `width` elements: normed, with its part of weight and bias.
inline void norm_row(const RopeParams& p, const Vectors& vectors, int64_t width, float* x) {
  const RowMoments moments(p.statistic, p.eps, width, x);
  for (int64_t i = 0; i < width; ++i) x[i] = moments.of(x[i]);
  if (vectors.weight != nullptr) {
    for (int64_t i = 0; i < width; ++i) x[i] *= vectors.weight[i];
  }
  if (vectors.bias != nullptr) {
    for (int64_t i = 0; i < width; ++i) x[i] += vectors.bias[i];
  }
}

LTX_KERNELS_MULTIVERSION void rope_items(const RopeParams& p, const Vectors* vectors, int64_t begin, int64_t end) {
  const int64_t d = p.head_size;
  const int64_t half = p.rotary_dim / 2;
  const int64_t tokens = std::max(p.sides[0].tokens, p.sides[1].tokens);
  FloatBuffer buffer(std::max(p.sides[0].heads, p.sides[1].heads) * d + 2 * half);
  float* const cos = buffer.data();
  float* const sin = cos + half;
  float* const x = sin + half;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t batch = item / tokens;
    const int64_t token = item % tokens;
    int loaded = -1;  // the table whose values for all heads of this token are in cos and sin
    for (int i = 0; i < RopeParams::kSides; ++i) {
      const RopeSide& side = p.sides[i];
      if (side.x.data == nullptr || token >= side.tokens) continue;
      const auto offset_of = [&](const Operand& operand, int64_t head) {
        return batch * operand.strides[0] + token * operand.strides[1] + head * operand.strides[2];
      };
      // Neighbouring heads are one row where they lie so.
      if (side.x.strides[2] == d) {
        load_row(side.x, offset_of(side.x, 0), side.heads * d, x);
      } else {
        for (int64_t head = 0; head < side.heads; ++head) load_row(side.x, offset_of(side.x, head), d, x + head * d);
      }
      if (p.statistic != Statistic::kNone) {
        if (p.across_heads) {
          norm_row(p, vectors[i], side.heads * d, x);
        } else {
          for (int64_t head = 0; head < side.heads; ++head) norm_row(p, vectors[i], d, x + head * d);
        }
      }
      const int64_t row = token - p.rope_start;
      if (side.table >= 0 && row >= 0 && row < p.tables[side.table].tokens) {
        const RopeTable& table = p.tables[side.table];
        const int64_t table_offset = batch * table.strides[0] + row * table.strides[1];
        for (int64_t head = 0; head < side.heads; ++head) {
          if (loaded != side.table) {
            if (p.grid.exists()) {
              load_grid(p.grid, row, cos, sin);
            } else {
              load_pairs(table.cos, table.dtype, table_offset + head * table.strides[2], table.pair_stride, half, cos);
              load_pairs(table.sin, table.dtype, table_offset + head * table.strides[2], table.pair_stride, half, sin);
            }
            loaded = table.heads == 1 ? side.table : -1;
          }
          rotate(x + head * d, cos, sin, half, p.interleaved);
        }
      }
      store_row(side.y, offset_of(side.y, 0), side.heads * d, x);
    }
  }
}

}  // namespace

void rope_cpu(const RopeParams& p) {
  std::vector<float> buffers[RopeParams::kSides][2];
  Vectors vectors[RopeParams::kSides] = {};
  int64_t elements = 1;
  for (int i = 0; i < RopeParams::kSides; ++i) {
    const RopeSide& side = p.sides[i];
    if (side.x.data == nullptr) continue;
    const int64_t width = p.head_size * (p.across_heads ? side.heads : 1);
    elements = std::max(elements, side.heads * p.head_size);
    for (int which = 0; which < 2; ++which) {
      const Operand& operand = which == 0 ? side.weight : side.bias;
      if (operand.data == nullptr) continue;
      std::vector<float>& buffer = buffers[i][which];
      buffer.resize(width);
      load_row(operand, 0, width, buffer.data());
      (which == 0 ? vectors[i].weight : vectors[i].bias) = buffer.data();
    }
  }
  const int64_t items = p.batch * std::max(p.sides[0].tokens, p.sides[1].tokens);
  torch::stable::parallel_for(0, items, row_grain(elements),
                              [&](int64_t begin, int64_t end) { rope_items(p, vectors, begin, end); });
}

}  // namespace ltx_kernels
