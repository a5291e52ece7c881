// The RoPE core, for rope, qk_norm_rope and rope_3d. A row is what a statistic is taken over: a head of a token, or all
// its heads. Its threads own *units*: what a rotation ties together, so that none of it passes between threads.
// Interleaved, that is one 16-byte vector; else two, half a rotary dim apart. The maths stands here once; two kernels
// read for it, spread a row over the same threads and sum in the same order, so that which one runs cannot be seen in
// the bits.
//   rope_fast_kernel     what models do: aligned vectors, held in registers. A thread has rows that share its part of
//                        the table and the weight (heads of a token, or batches), and reads that part once.
//   rope_general_kernel  everything else, element by element; it reads a row again for each pass.
#pragma once

#include "../core/broadcast.cuh"
#include "../core/divisor.cuh"
#include "../core/kernel.cuh"
#include "../core/launch.cuh"
#include "../core/reduce.cuh"
#include "../core/vec.cuh"
#include "../norm/moments.cuh"
#include "rope.h"

namespace ltx_kernels {

// How heads are cut into units.
struct RopeShape {
  int head_size = 0;
  int half = 0;  // pairs of a head
  Divisor units_per_head;
  int rotary_units = 0;  // of these, half rotation only; the rest are not rotated
};

template <typename T, bool kInterleaved>
struct RopeUnit {
  static constexpr int kSize = kVectorSize<T>;
  static constexpr int kParts = kInterleaved ? 1 : 2;
  static constexpr int kPairs = kParts * kSize / 2;

  const RopeShape& shape;
  int head;  // in the row
  int j;     // in the head

  __device__ __forceinline__ RopeUnit(int index, const RopeShape& rope_shape) : shape(rope_shape) {
    head = shape.units_per_head.divide(index, &j);
  }
  __device__ __forceinline__ int pair() const { return j * kPairs; }
  // How many of its pairs exist: none where it is not rotated.
  __device__ __forceinline__ int pairs() const {
    return kInterleaved || j < shape.rotary_units ? max(0, min(kPairs, shape.half - pair())) : 0;
  }
  // Of vector `part`: the first element in the head. Elements that are not rotated go two vectors at a time as well.
  __device__ __forceinline__ int column(int part) const {
    if (kInterleaved) return j * kSize;
    if (j < shape.rotary_units) return j * kSize + part * shape.half;
    const int rest_units = static_cast<int>(shape.units_per_head.value) - shape.rotary_units;
    return 2 * shape.half + (j - shape.rotary_units + part * rest_units) * kSize;
  }
  // How many of its elements exist.
  __device__ __forceinline__ int count(int part) const {
    const int end = kInterleaved || j >= shape.rotary_units ? shape.head_size : (part + 1) * shape.half;
    return min(kSize, max(0, end - column(part)));
  }
};

template <typename W, int kSize>
__device__ __forceinline__ void scale_by(const Vec<W, kSize>& weight, float (&x)[kSize]) {
  float values[kSize];
  to_floats(weight, values);
#pragma unroll
  for (int j = 0; j < kSize; ++j) x[j] = __fmul_rn(x[j], values[j]);
}

template <typename W, int kSize>
__device__ __forceinline__ void add_to(const Vec<W, kSize>& bias, float (&x)[kSize]) {
  float values[kSize];
  to_floats(bias, values);
#pragma unroll
  for (int j = 0; j < kSize; ++j) x[j] = __fadd_rn(x[j], values[j]);
}

// `pairs` of the unit exist.
template <bool kInterleaved, int kParts, int kSize, int kPairs>
__device__ __forceinline__ void rotate(const float (&cos)[kPairs], const float (&sin)[kPairs], int pairs,
                                       float (&x)[kParts][kSize]) {
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    if (j >= pairs) continue;
    float& a = kInterleaved ? x[0][2 * j] : x[0][j];
    float& b = kInterleaved ? x[0][2 * j + 1] : x[kParts - 1][j];
    const float first = fmaf(a, cos[j], -__fmul_rn(b, sin[j]));
    b = fmaf(b, cos[j], __fmul_rn(a, sin[j]));
    a = first;
  }
}

// A token's place on a grid.
struct GridPosition {
  unsigned t, h, w;

  __device__ __forceinline__ GridPosition(const RopeGrid& grid, int row) {
    const unsigned width = static_cast<unsigned>(grid.sizes[2]), height = static_cast<unsigned>(grid.sizes[1]);
    const unsigned line = static_cast<unsigned>(row) / width;
    w = static_cast<unsigned>(row) - line * width;
    t = line / height;
    h = line - t * height;
  }
  // (cos, sin) of a pair: those of the axis that it belongs to, at the position on it.
  __device__ __forceinline__ float2 value(const RopeGrid& grid, int pair) const {
    const int first = static_cast<int>(grid.pairs[0]), second = first + static_cast<int>(grid.pairs[1]);
    const int axis = pair < first ? 0 : pair < second ? 1 : 2;
    const unsigned position = axis == 0 ? t : axis == 1 ? h : w;
    pair -= axis == 0 ? 0 : axis == 1 ? first : second;
    return reinterpret_cast<const float2*>(grid.tables[axis])[position * grid.pairs[axis] + pair];
  }
};

// The first `pairs` of a unit's.
template <int kPairs>
__device__ __forceinline__ void load_pairs(const RopeGrid& grid, int row, int pair, int pairs, float (&cos)[kPairs],
                                           float (&sin)[kPairs]) {
  const GridPosition position(grid, row);
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const float2 value = j < pairs ? position.value(grid, pair + j) : float2{};
    cos[j] = value.x;
    sin[j] = value.y;
  }
}

// Whole vectors of a table, four pairs at a time: compact ones, or those at every second place.
template <typename S, int kStride, int kPairs>
__device__ __forceinline__ void load_pairs(const S* source, float (&values)[kPairs]) {
  constexpr int kChunk = kPairs < 4 ? kPairs : 4;
#pragma unroll
  for (int first = 0; first < kPairs; first += kChunk) {
    const auto vector = *reinterpret_cast<const Vec<S, kChunk * kStride>*>(source + first * kStride);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) values[first + j] = to_float(vector.value[j * kStride]);
  }
}

// The values of any table one by one; `offset` is that of its first pair.
template <typename Unit, int kPairs>
__device__ __forceinline__ void load_pairs(const RopeTable& table, const void* data, int64_t offset, const Unit& unit,
                                           float (&values)[kPairs]) {
  const Operand operand{const_cast<void*>(data), {}, table.dtype, false};
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    float value[1];
    load_floats<1>(operand, offset + (unit.pair() + j) * table.pair_stride, j < unit.pairs(), value);
    values[j] = value[0];
  }
}

// Sums of kRows rows of T at once over the threads of a row.
template <typename T, Statistic kStatistic, int kRows, typename AddValues, typename AddMoments>
__device__ __forceinline__ void take_moments(float width, float inverse_width, float eps,
                                             float (*scratch)[kMaxWarps * 2 * kRows], AddValues&& add_row_values,
                                             AddMoments&& add_row_moments, Moments (&moments)[kRows]) {
  if constexpr (kStatistic == Statistic::kNone) return;
  if constexpr (kStatistic == Statistic::kLayer) {
    float sums[kRows] = {};
    add_row_values(sums);
    row_sums(sums, scratch[0]);
#pragma unroll
    for (int row = 0; row < kRows; ++row) moments[row].mean = mean_of(sums[row], width, inverse_width);
  }
  // Squares, and for layer norm the centred sums behind them.
  constexpr bool kRest = kHasRest<T, kStatistic>;
  constexpr int kSums = kRest ? 2 : 1;
  float sums[kSums * kRows] = {};
  float* const centred = sums + (kSums - 1) * kRows;
  add_row_moments(centred, sums);
  row_sums(sums, scratch[1]);
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    set_moments(inverse_width, eps, kRest ? centred[row] : 0.f, sums[row], moments[row]);
}

// What the fast kernel reads, as strides that are ready to be added up: to work out an address costs a thread as much
// as a handful of elements. The rows that share a part of the tables are [outer, inner]: [batches, heads] where a row
// is a head, [1, batches] where a row is all heads of a token. A thread takes the rows inner, inner + apart, ..
struct RopeFastOperand {  // [batches, tokens, heads, head_size]
  void* data = nullptr;
  int64_t batch = 0, token = 0, inner = 0;  // strides
  int64_t step = 0;                         // from one row of a thread to the next
  int head = 0;                             // stride of heads within a row
};

struct RopeFastSide {
  RopeFastOperand x, y;
  const void* weight = nullptr;              // [head_size], or [heads, head_size] across heads
  const void* bias = nullptr;                // the same
  const void* cos = nullptr;                 // [batches, tokens, heads, pairs], or each value twice
  const void* sin = nullptr;                 // the same
  int64_t table_batch = 0, table_token = 0;  // strides of cos and sin
  int table_inner = 0, table_head = 0;
  int table_tokens = 0;
  int affine_head = 0;  // stride of weight and bias
  int tokens = 0;
  int inner_rows = 0;
  int units = 0;  // of a row
  // The other way round, weights are loaded ahead of tables and registers wait for them: qk_norm_rope across heads,
  // [2, 2688, 32, 64] bf16, takes 35.6 us for 33.6.
  float inverse_width = 0.f, width = 0.f;
  Divisor places;        // of the rows that share
  Divisor inner_places;  // of these
  int apart = 0;         // from one row of a thread to the next; a power of two
};

struct RopeFast {
  RopeShape shape;
  Divisor tokens;
  Divisor period;    // blocks of q and then of k that follow each other
  int q_blocks = 0;  // of a period
  int groups = 0;    // of rows that share
  int rope_start = 0;
  float eps = 0.f;
  bool compact = true;  // tables hold each value once
  RopeFastSide sides[RopeParams::kSides];
  RopeGrid grid;
};

// For __launch_bounds__: 0 where the compiler finds as many registers as it should, 1 where it would spill, 2 where it
// would take more than 64 (where sm_75 would spill).
constexpr int rope_min_blocks(Statistic statistic, int units, bool interleaved, bool one_dtype) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  constexpr bool kFits64 = false;
#else
  constexpr bool kFits64 = true;
#endif
  if (statistic == Statistic::kLayer) return 1;
  return units == 1 ? 0 : kFits64 && interleaved && one_dtype ? 2 : 1;
}

// W: the dtype of weight and bias. Table: that of the tables, or RopeGrid.
template <typename T, typename W, typename Table, bool kInterleaved, Statistic kStatistic, int kRows, int kUnits>
__global__ void __launch_bounds__(kMaxThreadsPerRow,
                                  rope_min_blocks(kStatistic, kUnits, kInterleaved, std::is_same_v<T, W>))
    rope_fast_kernel(const __grid_constant__ RopeFast p) {
  wait_for_previous_kernel();
  using Unit = RopeUnit<T, kInterleaved>;
  constexpr int kSize = Unit::kSize;
  constexpr int kParts = Unit::kParts;
  constexpr int kPairs = Unit::kPairs;
  constexpr bool kLayer = kStatistic == Statistic::kLayer;
  using Vector = Vec<T, kSize>;
  using Affine = Vec<W, kSize>;
  __shared__ float scratch[2][kMaxWarps * 2 * kRows];

  // q and k in different blocks, so that which one it is, is uniform.
  int block;
  const int period = p.period.divide(blockIdx.x, &block);
  const int number = block >= p.q_blocks;
  const RopeFastSide& side = p.sides[number];
  block = number ? period * (static_cast<int>(p.period.value) - p.q_blocks) + block - p.q_blocks
                 : period * p.q_blocks + block;
  int place, token, inner;
  const int group = side.places.divide(block * blockDim.y + threadIdx.y, &place);
  const int batch = p.tokens.divide(min(group, p.groups - 1), &token) + side.inner_places.divide(place, &inner);
  // What does not exist is another row or unit, computed again and not stored (see norm_fast_kernel).
  const bool group_exists = group < p.groups && token < side.tokens;
  token = min(token, side.tokens - 1);
  // Place q·apart + r has the rows q·apart·kRows + r, + apart, ..: so the rows of a block follow each other. rope,
  // [2, 2688, 32, 128] bf16: 28.1 us, 29.0 with a thread's rows half the heads apart.
  inner += (inner & -side.apart) * (kRows - 1);
  const auto row_exists = [&](int row) { return row == 0 || inner + row * side.apart < side.inner_rows; };
  const auto unit_exists = [&](int u) { return static_cast<int>(threadIdx.x + u * blockDim.x) < side.units; };
  const auto unit_at = [&](int u) {
    return Unit(min(static_cast<int>(threadIdx.x + u * blockDim.x), side.units - 1), p.shape);
  };
  const auto offset = [&](const RopeFastOperand& operand) {
    return static_cast<unsigned>(batch) * operand.batch + static_cast<unsigned>(token) * operand.token +
           static_cast<unsigned>(inner) * operand.inner;
  };

  Vector x[kRows][kUnits][kParts];  // [rows, units, parts]
  const T* const source = static_cast<const T*>(side.x.data) + offset(side.x);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = unit_at(u);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const T* const first = source + unit.head * side.x.head + unit.column(part);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        x[row][u][part] = *reinterpret_cast<const Vector*>(first + (row_exists(row) ? row : 0) * side.x.step);
      }
    }
  }
  // What the rows share is on its way while the sums are taken. No weight is ones: a branch less behind the sums.
  Affine ones;
#pragma unroll
  for (int j = 0; j < kSize; ++j) ones.value[j] = from_float<W>(1.f);
  Affine weight[kUnits][kParts], bias[kLayer ? kUnits : 1][kParts];
  float cos[kUnits][kPairs], sin[kUnits][kPairs];
  const bool has_tables = side.table_tokens > 0;
  int table_row = token - p.rope_start;
  const bool rotated = table_row >= 0 && table_row < side.table_tokens;
  table_row = max(0, min(table_row, side.table_tokens - 1));
  const int64_t table_offset = static_cast<unsigned>(batch) * side.table_batch +
                               static_cast<unsigned>(table_row) * side.table_token + inner * side.table_inner;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = unit_at(u);
    const int pair = unit.pairs() > 0 ? unit.pair() : 0;
    if (has_tables) {
      if constexpr (std::is_same_v<Table, RopeGrid>) {
        load_pairs(p.grid, table_row, pair, kPairs, cos[u], sin[u]);
      } else {
        const int64_t at = table_offset + unit.head * side.table_head;
        const Table* const cosines = static_cast<const Table*>(side.cos) + at;
        const Table* const sines = static_cast<const Table*>(side.sin) + at;
        if (!kInterleaved || p.compact) {
          load_pairs<Table, 1>(cosines + pair, cos[u]);
          load_pairs<Table, 1>(sines + pair, sin[u]);
        } else {
          load_pairs<Table, 2>(cosines + 2 * pair, cos[u]);
          load_pairs<Table, 2>(sines + 2 * pair, sin[u]);
        }
      }
    }
    if constexpr (kStatistic != Statistic::kNone) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int at = unit.head * side.affine_head + unit.column(part);
        const auto load = [&](const void* data) {
          return *reinterpret_cast<const Affine*>(static_cast<const W*>(data) + at);
        };
        weight[u][part] = ones;
        if (side.weight != nullptr) weight[u][part] = load(side.weight);
        if (kLayer && side.bias != nullptr) bias[u * kLayer][part] = load(side.bias);
      }
    }
  }

  Moments moments[kRows];
  float values[kSize];
  const bool all_exist = side.units == static_cast<int>(blockDim.x) * kUnits;
  const auto for_each = [&](auto&& f) {
    const auto for_each_if = [&](auto all) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (!all && !unit_exists(u)) continue;
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            to_floats(x[row][u][part], values);
            f(row);
          }
        }
      }
    };
    all_exist ? for_each_if(std::true_type{}) : for_each_if(std::false_type{});
  };
  take_moments<T, kStatistic>(
      side.width, side.inverse_width, p.eps, scratch,
      [&](float* sums) { for_each([&](int row) { sums[row] = add_values(sums[row], values); }); },
      [&](float* sums, float* squares) {
        for_each(
            [&](int row) { add_moments<T, kStatistic>(moments[row].mean, kSize, values, sums[row], squares[row]); });
      },
      moments);

  T* const target = static_cast<T*>(side.y.data) + offset(side.y);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const Unit unit = unit_at(u);
    T* const first = target + unit.head * side.y.head;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float y[kParts][kSize];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        to_floats(x[row][u][part], y[part]);
        normalize<kStatistic>(moments[row], y[part]);
        if (kStatistic != Statistic::kNone) scale_by(weight[u][part], y[part]);
        if (kLayer && side.bias != nullptr) add_to(bias[u * kLayer][part], y[part]);
      }
      if (rotated && unit.pairs() > 0) rotate<kInterleaved>(cos[u], sin[u], kPairs, y);
      if (!group_exists || !row_exists(row) || !unit_exists(u)) continue;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        store_vector(first + row * side.y.step + unit.column(part), from_floats<T, kSize>(y[part]));
      }
    }
  }
}

// Rows are [batch, tokens, rows of q and of k]; a row is a head, or all heads of a token.
template <typename T, bool kInterleaved, Statistic kStatistic>
__global__ void __launch_bounds__(kMaxThreadsPerRow, 1)
    rope_general_kernel(const __grid_constant__ RopeParams p, const __grid_constant__ RopeShape shape,
                        const bool row_is_token) {
  wait_for_previous_kernel();
  using Unit = RopeUnit<T, kInterleaved>;
  constexpr int kSize = Unit::kSize;
  constexpr int kParts = Unit::kParts;
  constexpr int kPairs = Unit::kPairs;
  __shared__ float scratch[2][kMaxWarps * 2];

  const auto rows_of = [&](const RopeSide& side) { return side.x.data == nullptr ? 0 : row_is_token ? 1 : side.heads; };
  int64_t batch, token, first_head;
  batch = divide(static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y, rows_of(p.sides[0]) + rows_of(p.sides[1]),
                 &first_head);
  batch = divide(batch, max(p.sides[0].tokens, p.sides[1].tokens), &token);
  const int number = first_head >= rows_of(p.sides[0]);
  if (number) first_head -= rows_of(p.sides[0]);
  const RopeSide& side = p.sides[number];
  const int row_heads = row_is_token ? static_cast<int>(side.heads) : 1;
  const int units =
      batch < p.batch && token < side.tokens ? row_heads * static_cast<int>(shape.units_per_head.value) : 0;
  const auto row_offset = [&](const int64_t* strides) {
    return batch * strides[0] + token * strides[1] + first_head * strides[2];
  };
  const int64_t x_row = row_offset(side.x.strides), y_row = row_offset(side.y.strides);

  // `row` is where a row starts, 0 for weight and bias.
  const auto read = [&](const Operand& operand, int64_t row, const Unit& unit, int part, float (&values)[kSize]) {
    load_floats<kSize>(operand, row + unit.head * operand.strides[2] + unit.column(part), unit.count(part), values);
  };
  const auto for_each = [&](auto&& f) {
#pragma unroll 1
    for (int index = threadIdx.x; index < units; index += blockDim.x) f(Unit(index, shape));
  };
  const auto for_each_part = [&](auto&& f) {
    for_each([&](const Unit& unit) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float values[kSize];
        read(side.x, x_row, unit, part, values);
        f(unit.count(part), values);
      }
    });
  };
  const auto width = static_cast<float>(row_heads * p.head_size);
  Moments moments[1];
  take_moments<T, kStatistic>(
      width, 1.f / width, p.eps, scratch,
      [&](float* sum) { for_each_part([&](int, const float (&values)[kSize]) { *sum = add_values(*sum, values); }); },
      [&](float* sum, float* squares) {
        for_each_part([&](int count, const float (&values)[kSize]) {
          add_moments<T, kStatistic>(moments[0].mean, count, values, *sum, *squares);
        });
      },
      moments);

  // The rows of a table begin with token rope_start.
  const int64_t table_row = token - p.rope_start;
  const bool rotated = side.table >= 0 && table_row >= 0 && table_row < p.tables[side.table].tokens;
  for_each([&](const Unit& unit) {
    float y[kParts][kSize];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      read(side.x, x_row, unit, part, y[part]);
      normalize<kStatistic>(moments[0], y[part]);
      Vec<float, kSize> values;
      if (side.weight.data != nullptr) {
        read(side.weight, 0, unit, part, values.value);
        scale_by(values, y[part]);
      }
      if (side.bias.data != nullptr) {
        read(side.bias, 0, unit, part, values.value);
        add_to(values, y[part]);
      }
    }
    if (rotated && unit.pairs() > 0) {
      float cos[kPairs], sin[kPairs];
      const RopeTable& table = p.tables[side.table];
      if (p.grid.exists()) {
        load_pairs(p.grid, static_cast<int>(table_row), unit.pair(), unit.pairs(), cos, sin);
      } else {
        const int64_t at = batch * table.strides[0] + table_row * table.strides[1] +
                           (table.heads == 1 ? 0 : first_head + unit.head) * table.strides[2];
        load_pairs(table, table.cos, at, unit, cos);
        load_pairs(table, table.sin, at, unit, sin);
      }
      rotate<kInterleaved>(cos, sin, unit.pairs(), y);
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store<T, kSize>(side.y, y_row + unit.head * side.y.strides[2] + unit.column(part), unit.count(part), y[part]);
    }
  });
}

}  // namespace ltx_kernels
