// The row-norm core: every norm-like op is the sentence of norm.h with parts left out. The maths stands here once
// (update_residual, affine, finish); two kernels read for it.
//   norm_fast_kernel     what models do: aligned 16-byte vectors, the row in registers, the parts of the sentence
//                        compiled in. Measured on an H200: with the parts as run-time switches the same loop takes
//                        twice as long, because their branches and addresses cost more instructions than memory leaves
//                        time for (28 a bf16 element).
//   norm_general_kernel  everything else: any alignment, dtype, row length and combination of parts, in one short loop
//                        that reads a row again for each pass.
// Both spread a row over the same threads and sum in the same order, so that which one runs cannot be seen in the bits.
#pragma once

#include <type_traits>

#include "../core/broadcast.cuh"
#include "../core/divisor.cuh"
#include "../core/kernel.cuh"
#include "../core/launch.cuh"
#include "../core/math.cuh"
#include "../core/reduce.cuh"
#include "../core/segment.cuh"
#include "../core/stage.cuh"
#include "../core/vec.cuh"
#include "moments.cuh"
#include "norm.h"

namespace ltx_kernels {

// The parts that a fast kernel has compiled in; what is not among them is absent.
enum Part : unsigned {
  kWeight = 1,
  kBias = 2,
  kModulation = 4,  // scale and shift
  kTables = 8,      // the tables of scale and shift, and of the gate where there is one
  kResidual = 16,
  kGate = 32,
  kSilu = 64,
};

struct Has {
  bool weight, bias, scale, scale_table, shift, shift_table, residual, gate, gate_table, silu;
};

__host__ __device__ constexpr Has has_of(unsigned parts) {
  const bool modulation = parts & kModulation, tables = parts & kTables, gate = parts & kGate;
  return {(parts & kWeight) != 0, (parts & kBias) != 0,     modulation, modulation && tables, modulation,
          modulation && tables,   (parts & kResidual) != 0, gate,       gate && tables,       (parts & kSilu) != 0};
}

__host__ __device__ inline Has has_of(const NormParams& p) {
  return {p.weight.data != nullptr,     p.bias.data != nullptr,
          p.scale.data != nullptr,      p.scale_table.data != nullptr,
          p.shift.data != nullptr,      p.shift_table.data != nullptr,
          p.residual.data != nullptr,   p.gate.data != nullptr,
          p.gate_table.data != nullptr, p.silu};
}

// The sentence, for one vector. `read` is called as read(operand, values) and gives the operand's elements at the
// vector's columns. Fused multiply-adds are spelled out: left to the compiler, they would differ between the kernels.

// gate + gate_table, where there is a gate.
template <int kSize, typename Read>
__device__ __forceinline__ void read_gate(const NormParams& p, const Has& has, Read&& read, float (&gate)[kSize]) {
  if (!has.gate) return;
  read(p.gate, gate);
  if (!has.gate_table) return;
  float table[kSize];
  read(p.gate_table, table);
#pragma unroll
  for (int j = 0; j < kSize; ++j) gate[j] = __fadd_rn(gate[j], table[j]);
}

// h = residual + gate·x, in fp32. x is replaced by h.
template <int kSize>
__device__ __forceinline__ void update_residual(const Has& has, const float (&gate)[kSize],
                                                const float (&residual)[kSize], float (&x)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) x[j] = has.gate ? fmaf(gate[j], x[j], residual[j]) : __fadd_rn(residual[j], x[j]);
}

// factor and term such that y = norm(h)·factor + term.
template <int kSize, typename Read>
__device__ __forceinline__ void affine(const NormParams& p, const Has& has, Read&& read, float (&factor)[kSize],
                                       float (&term)[kSize]) {
  float values[kSize];
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    factor[j] = 1.f;
    term[j] = 0.f;
  }
  if (has.weight) {
    read(p.weight, values);
#pragma unroll
    for (int j = 0; j < kSize; ++j) factor[j] = __fadd_rn(p.weight_offset, values[j]);
  }
  if (has.bias) read(p.bias, term);
  if (has.scale) {
    float scale[kSize];
    read(p.scale, scale);
#pragma unroll
    for (int j = 0; j < kSize; ++j) scale[j] = __fadd_rn(1.f, scale[j]);
    if (has.scale_table) {
      read(p.scale_table, values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) scale[j] = __fadd_rn(scale[j], values[j]);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      factor[j] = has.weight ? __fmul_rn(factor[j], scale[j]) : scale[j];
      if (has.bias) term[j] = __fmul_rn(term[j], scale[j]);
    }
  }
  if (has.shift) {
    read(p.shift, values);
#pragma unroll
    for (int j = 0; j < kSize; ++j) term[j] = has.bias ? __fadd_rn(term[j], values[j]) : values[j];
    if (has.shift_table) {
      read(p.shift_table, values);
#pragma unroll
      for (int j = 0; j < kSize; ++j) term[j] = __fadd_rn(term[j], values[j]);
    }
  }
}

// y from h: normed, rounded to y's dtype where Llama rounds (kCast), factor and term, activation. h is replaced by y.
template <typename T, Statistic kStatistic, bool kCast, int kSize>
__device__ __forceinline__ void finish(const NormParams& p, const Has& has, const Moments& moments,
                                       const float (&factor)[kSize], const float (&term)[kSize], float (&h)[kSize]) {
  normalize<kStatistic>(moments, h);
  if constexpr (kCast) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) h[j] = round_if_mixed<T>(p.y.dtype, h[j]);
  }
  const bool has_factor = has.weight || has.scale, has_term = has.bias || has.shift;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    if (has_term) {
      h[j] = fmaf(h[j], factor[j], term[j]);
    } else if (has_factor) {
      h[j] = __fmul_rn(h[j], factor[j]);
    }
    if (has.silu) h[j] = silu<std::is_same_v<T, float>>(h[j]);
  }
}

// Calls f(std::bool_constant): whether norm(h) is rounded before the weight. The fast kernel asks around its loop over
// vectors: within, the branch would part the loads of one vector from the arithmetic of the other.
template <Statistic kStatistic, typename F>
__device__ __forceinline__ void with_cast(const NormParams& p, const Has& has, F&& f) {
  if (kStatistic == Statistic::kRms && has.weight && p.cast_before_weight) return f(std::true_type{});
  f(std::false_type{});
}

// What the rows of a thread share and `affine` reads, in its order. Calls f(operand).
template <typename F>
__host__ __device__ __forceinline__ constexpr void for_each_shared(const NormParams& p, const Has& has, F&& f) {
  if (has.weight) f(p.weight);
  if (has.bias) f(p.bias);
  if (has.scale) f(p.scale);
  if (has.scale_table) f(p.scale_table);
  if (has.shift) f(p.shift);
  if (has.shift_table) f(p.shift_table);
}

// Bytes of shared memory in which a thread with `vectors` vectors of T keeps that while the sums are taken: copied
// there asynchronously it holds no registers, and a thread reads only what it has copied itself. A trial of layer_norm,
// [2, 2688, 4096] bf16: 25.8 us, 27.0 where it waits in registers.
template <typename T, typename M>
constexpr int waiting_bytes(const Has& has, int vectors) {
  int shared = 0;
  for_each_shared({}, has, [&](const Operand&) { ++shared; });
  return shared * vectors * kVectorSize<T> * static_cast<int>(sizeof(M));
}

// How blocks are numbered: [outer, chunks, pieces]. A chunk is as many rows as a block has; without a statistic nothing
// is summed, and a row may be in pieces. gated_residual, [2, 2688, 4096] bf16: 37.5 us, 38.1 with a block for each row.
struct NormGrid {
  Divisor chunks, pieces;
};

// T: the dtype of x, residual, h and y. M: of every other operand. kVecs vectors a thread hold a row; a thread has
// kRows rows at a time, which share scale and shift, so that these are read and converted once. Rows are [outer,
// inner]; a block stays within one outer index. kSegmented (sm_90): a cluster of blocks shares a row, each has a
// segment of it, and they add their sums up.
//
// A row or a vector that does not exist is another one, computed again and not stored: only stores and sums have a
// condition, and nothing keeps the compiler from issuing all loads at once. layer_norm [2, 2688, 2048] bf16: 14.0 us,
// 15.4 with conditions.
template <typename T, typename M, Statistic kStatistic, unsigned kParts, int kVecs, int kRows, bool kSegmented>
__global__ void __launch_bounds__(kMaxThreadsPerRow,
                                  min_blocks(kStatistic == Statistic::kLayer && sizeof(T) == 4 && kVecs == 8))
    norm_fast_kernel(const __grid_constant__ NormParams p, const NormGrid grid) {
  wait_for_previous_kernel();
  constexpr int kSize = kVectorSize<T>;
  constexpr Has kHas = has_of(kParts);
  using Vector = Vec<T, kSize>;
  constexpr bool kRest = kHasRest<T, kStatistic>;
  constexpr int kSums = kRest ? 2 : 1;
  __shared__ float scratch[2][kMaxWarps * 2 * kRows];
  extern __shared__ int4 waiting[];  // [shared operands, vectors, words, threads]

  Segment<kSegmented, kSums> segment;
  int chunk, piece = 0;
  const int number = kStatistic == Statistic::kNone ? grid.pieces.divide(segment.row(), &piece) : segment.row();
  const int outer = grid.chunks.divide(number, &chunk);
  const int first = (chunk * static_cast<int>(blockDim.y) + static_cast<int>(threadIdx.y)) * kRows;
  const int inner = static_cast<int>(p.rows.sizes[2]);
  const int last = inner - 1;
  const int row_vectors = static_cast<int>(p.rows.hidden) / kSize;
  const auto vector = [&](int i) {
    return static_cast<int>(threadIdx.x + ((segment.rank() + piece) * kVecs + i) * blockDim.x);
  };
  const auto exists = [&](int i) { return vector(i) < row_vectors; };
  const auto column = [&](int i) { return min(vector(i), row_vectors - 1) * kSize; };
  // This thread's first row of an operand. Opaque: the compiler would work it out anew for each vector.
  const auto first_row = [&](const Operand& operand, auto* data) {
    data += static_cast<unsigned>(outer) * operand.strides[1] +
            static_cast<unsigned>(min(first, last)) * operand.strides[2];
    asm("" : "+l"(data));
    __builtin_assume(__isGlobal(data));
    return data;
  };
  const auto rows_of = [&](const Operand& operand) { return first_row(operand, static_cast<T*>(operand.data)); };
  const auto vector_at = [&](const Operand& operand, T* rows, int row, int i) {
    return rows + (first + row <= last ? row * operand.strides[2] : 0) + column(i);
  };
  // Calls f(row, i) for the vectors of this thread.
  const auto for_each = [&](auto&& f) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kVecs; ++i) f(row, i);
    }
  };
  const auto load_rows = [&](const Operand& operand, Vector(&vectors)[kRows][kVecs]) {
    T* const from = rows_of(operand);
    for_each(
        [&](int row, int i) { vectors[row][i] = *reinterpret_cast<const Vector*>(vector_at(operand, from, row, i)); });
  };
  const auto store_if_exists = [&](const Operand& operand, T* rows, int row, int i, const Vector& values) {
    if (first + row <= last && exists(i)) store_vector(vector_at(operand, rows, row, i), values);
  };

  Vector h[kRows][kVecs];  // [rows, vectors]
  load_rows(p.x, h);
  // Where a shared vector of this thread waits, as kWords of 16 bytes.
  constexpr int kWords = kSize * static_cast<int>(sizeof(M)) / kVectorBytes;
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const auto waiting_at = [&](int operand, int i, int word) {
    return waiting + ((operand * kVecs + i) * kWords + word) * threads + thread;
  };
  if constexpr (kStatistic != Statistic::kNone) {
    int operands = 0;
    for_each_shared(p, kHas, [&](const Operand& operand) {
      const M* const from = first_row(operand, static_cast<const M*>(operand.data));
#pragma unroll
      for (int i = 0; i < kVecs; ++i) {
#pragma unroll
        for (int word = 0; word < kWords; ++word)
          copy_async_16<true>(waiting_at(operands, i, word), from + column(i) + word * kVectorSize<M>);
      }
      ++operands;
    });
    copy_async_commit();
  }
  if constexpr (kHas.residual) {
    Vector residual[kRows][kVecs];
    load_rows(p.residual, residual);
    T* const new_residual = rows_of(p.new_residual);
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float gate[kSize];
      const auto read = [&](const Operand& operand, float (&read_values)[kSize]) {
        const M* const from = first_row(operand, static_cast<const M*>(operand.data));
        load_floats_as<M>(from + column(i), 0, true, kSize, read_values);
      };
      read_gate(p, kHas, read, gate);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        float x[kSize], r[kSize];
        to_floats(h[row][i], x);
        to_floats(residual[row][i], r);
        update_residual(kHas, gate, r, x);
        h[row][i] = from_floats<T, kSize>(x);
        store_if_exists(p.new_residual, new_residual, row, i, h[row][i]);
      }
    }
  }
  if constexpr (kStatistic == Statistic::kNone) return;

  // Calls f(row) with the `values` of each vector that exists. Where all do, as with most rows, no branch parts them.
  float values[kSize];
  const bool all_exist = row_vectors == static_cast<int>(blockDim.x * segment.count()) * kVecs;
  const auto for_each_value = [&](auto&& f) {
    const auto for_each_if = [&](auto all) {
      for_each([&](int row, int i) {
        if (!all && !exists(i)) return;
        to_floats(h[row][i], values);
        f(row);
      });
    };
    all_exist ? for_each_if(std::true_type{}) : for_each_if(std::false_type{});
  };
  const auto add_up = [&](auto& sums, int turn) {
    if constexpr (kSegmented) {
      segment.add(sums, turn);
    } else {
      row_sums(sums, scratch[turn]);
    }
  };
  Moments moments[kRows];
  if constexpr (kStatistic == Statistic::kLayer) {
    float sums[kRows] = {};
    for_each_value([&](int row) { sums[row] = add_values(sums[row], values); });
    add_up(sums, 0);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      moments[row].mean = mean_of(sums[row], row_vectors * kSize, p.rows.inverse_hidden);
  }
  // Squares, and for layer norm the centred sums behind them.
  float sums[kSums * kRows] = {};
  for_each_value([&](int row) {
    add_moments<T, kStatistic>(moments[row].mean, kSize, values, sums[(kSums - 1) * kRows + row], sums[row]);
  });
  add_up(sums, 1);
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    set_moments(p.rows.inverse_hidden, p.eps, kRest ? sums[(kSums - 1) * kRows + row] : 0.f, sums[row], moments[row]);

  if (p.rstd != nullptr && threadIdx.x == 0 && segment.rank() == 0) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (first + row <= last) p.rstd[static_cast<int64_t>(outer) * inner + first + row] = moments[row].rstd;
    }
  }
  T* const y = rows_of(p.y);
  copy_async_wait<0>();
  with_cast<kStatistic>(p, kHas, [&](auto cast) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      float factor[kSize], term[kSize];
      int operands = 0;
      const auto read = [&](const Operand&, float (&read_values)[kSize]) {
        Vec<M, kSize> vector;
#pragma unroll
        for (int word = 0; word < kWords; ++word)
          reinterpret_cast<int4*>(&vector)[word] = *waiting_at(operands, i, word);
        to_floats(vector, read_values);
        ++operands;
      };
      affine(p, kHas, read, factor, term);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        to_floats(h[row][i], values);
        finish<T, kStatistic, decltype(cast)::value>(p, kHas, moments[row], factor, term, values);
        store_if_exists(p.y, y, row, i, from_floats<T, kSize>(values));
      }
    }
  });
}

// T: the dtype of x and h; float where x and the residual differ, which then holds any of the three. A row's sums are
// taken over `segments` of `segment_columns` columns, one after the other, as the blocks of a cluster take them side by
// side.
template <typename T, Statistic kStatistic>
__global__ void __launch_bounds__(kMaxThreadsPerRow, 1)
    norm_general_kernel(const __grid_constant__ NormParams p, const int segments, const int64_t segment_columns) {
  wait_for_previous_kernel();
  constexpr int kSize = kVectorSize<T>;
  __shared__ float scratch[2][kMaxWarps * 2];

  const int64_t number = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = number < p.rows.count();
  const RowIndex row(exists ? number : 0, p.rows);
  const int64_t hidden = exists ? p.rows.hidden : 0;
  const Has has = has_of(p);
  // Calls f(column, count) for this thread's vectors in [begin, end); `count` elements of each exist.
  const auto for_each_in = [&](int64_t begin, int64_t end, auto&& f) {
#pragma unroll 1
    for (int64_t column = begin + threadIdx.x * kSize; column < min(end, hidden);
         column += static_cast<int64_t>(blockDim.x) * kSize) {
      f(column, static_cast<int>(min(static_cast<int64_t>(kSize), hidden - column)));
    }
  };
  const auto for_each = [&](auto&& f) { for_each_in(0, hidden, f); };
  // Adds f's sums over the row to `sums`, segment by segment. Scratch alternates between calls of row_sums.
  int turn = 0;
  const auto sum_segments = [&](auto& sums, auto&& f) {
    for (int segment = 0; segment < segments; ++segment) {
      std::remove_reference_t<decltype(sums)> part = {};
      for_each_in(segment * segment_columns, segment + 1 < segments ? (segment + 1) * segment_columns : hidden,
                  [&](int64_t column, int count) { f(column, count, part); });
      row_sums(part, scratch[turn++ & 1]);
      for (int k = 0; k < static_cast<int>(sizeof(part) / sizeof(float)); ++k)
        sums[k] = segment > 0 ? __fadd_rn(sums[k], part[k]) : part[k];
    }
  };
  const auto reader = [&](int64_t column, int count) {
    return [&, column, count](const Operand& operand, float (&values)[kSize]) {
      load_floats(operand, row.offset(operand) + column, count, values);
    };
  };

  if (has.residual) {
    for_each([&](int64_t column, int count) {
      float x[kSize], residual[kSize], gate[kSize];
      const auto read = reader(column, count);
      read(p.x, x);
      read(p.residual, residual);
      read_gate(p, has, read, gate);
      update_residual(has, gate, residual, x);
      store<T, kSize>(p.new_residual, row.offset(p.new_residual) + column, count, x);
    });
  }
  if constexpr (kStatistic == Statistic::kNone) return;

  // Each thread reads what it has written itself: h as rounded to the residual's dtype.
  const Operand& h = has.residual ? p.new_residual : p.x;
  float values[kSize];
  Moments moments;
  if constexpr (kStatistic == Statistic::kLayer) {
    float sum[1] = {};
    sum_segments(sum, [&](int64_t column, int count, float (&part)[1]) {
      reader(column, count)(h, values);
      part[0] = add_values(part[0], values);
    });
    moments.mean = mean_of(sum[0], static_cast<float>(p.rows.hidden), p.rows.inverse_hidden);
  }
  constexpr bool kRest = kHasRest<T, kStatistic>;
  constexpr int kSums = kRest ? 2 : 1;
  float sums[kSums] = {};
  sum_segments(sums, [&](int64_t column, int count, float (&part)[kSums]) {
    reader(column, count)(h, values);
    add_moments<T, kStatistic>(moments.mean, count, values, part[kSums - 1], part[0]);
  });
  set_moments(p.rows.inverse_hidden, p.eps, kRest ? sums[kSums - 1] : 0.f, sums[0], moments);

  if (p.rstd != nullptr && exists && threadIdx.x == 0) p.rstd[number] = moments.rstd;
  for_each([&](int64_t column, int count) {
    const auto read = reader(column, count);
    float factor[kSize], term[kSize];
    affine(p, has, read, factor, term);
    read(h, values);
    with_cast<kStatistic>(p, has, [&](auto cast) {
      finish<T, kStatistic, decltype(cast)::value>(p, has, moments, factor, term, values);
    });
    store<T, kSize>(p.y, row.offset(p.y) + column, count, values);
  });
}

}  // namespace ltx_kernels
