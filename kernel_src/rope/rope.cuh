// The RoPE core: one kernel for rope, qk_norm_rope and rope_3d.
//
// A block takes all heads of q and k of a few tokens: what they share of a table is loaded once. A row is what a
// statistic is taken over: a head of a token, or all its heads. The threads of a row each own *units*: what a rotation
// ties together, so that none of it passes between threads. Interleaved, that is one 16-byte vector; else two vectors
// of four elements, half a rotary dim apart (of eight, a 16-bit kernel would need 94 registers).
//
// Rows wait in shared memory, copied there asynchronously, and each thread reads only what it copied itself. Tables
// wait there as compact fp32, whatever they were, so that the loops below know one kind of table; any thread reads
// them, after the one barrier.
#pragma once

#include "../core/broadcast.cuh"
#include "../core/launch.cuh"
#include "../core/reduce.cuh"
#include "../core/stage.cuh"
#include "../core/vec.cuh"
#include "rope.h"

namespace ltx_kernels {

constexpr int kTableChunk = 4;  // pairs a thread stages at a time

// A divisor of numbers below 2^16, for two instructions in place of twenty.
struct SmallDivisor {
  unsigned value;
  unsigned reciprocal;  // 2^32 / value, rounded up; 0 for 1

  SmallDivisor() = default;
  explicit SmallDivisor(int64_t divisor)
      : value(static_cast<unsigned>(divisor)),
        reciprocal(divisor == 1 ? 0 : static_cast<unsigned>(((int64_t{1} << 32) + divisor - 1) / divisor)) {}

  __device__ __forceinline__ int divide(int number, int* remainder) const {
    const int quotient = reciprocal == 0 ? number : __umulhi(number, reciprocal);
    *remainder = number - quotient * static_cast<int>(value);
    return quotient;
  }
};

// How the problem is spread over threads, blocks and shared memory. The order of a sum depends on threads_per_row and
// the units alone, and these on the head size (across heads, also their number), the rotary dim and the dtype.
struct RopeLaunch {
  SmallDivisor units_per_head;
  int rotary_units;     // of these, half rotation only; the rest are not rotated
  int row_vectors;      // of the longer of q's and k's rows
  int row_stride;       // between staged rows, in vectors
  int threads_per_row;  // threadIdx.x
  int step_heads;       // threads_per_row as heads and units
  int step_units;
  int rows_at_once;             // threadIdx.y
  int q_rows;                   // rows a token
  SmallDivisor rows_per_token;  // q's and k's
  SmallDivisor tokens_per_block;
  int batches_per_block;
  int items_per_block;      // the product of the two
  int table_heads;          // of the staged tables
  int table_pairs;          // of these, padded to whole chunks
  SmallDivisor table_runs;  // pieces in which they are staged, a head each, or all heads where one follows the other
  SmallDivisor run_chunks;
  int step_runs;  // the threads of a block as runs and chunks
  int step_chunks;
  bool table_staged;
  bool rows_staged;
  int own_tables;  // where tables are not staged: how many vectors behind the rows the threads' own places begin
};

// A thread's place in a row. kWhole: all vectors are whole and aligned; else their elements are counted.
template <typename T, bool kInterleaved, bool kWhole>
struct RopeUnit {
  static constexpr int kSize = kInterleaved ? kVectorSize<T> : 4;
  static constexpr int kParts = kInterleaved ? 1 : 2;
  static constexpr int kPairs = kParts * kSize / 2;
  static constexpr int kBytes = kSize * static_cast<int>(sizeof(T));  // of a vector

  const RopeParams& p;
  const RopeLaunch& launch;
  int index;  // in the row
  int head;   // in the row
  int j;      // in the head

  __device__ __forceinline__ RopeUnit(const RopeParams& params, const RopeLaunch& config)
      : p(params), launch(config), index(threadIdx.x) {
    head = launch.units_per_head.divide(index, &j);
  }
  __device__ __forceinline__ void advance() {
    index += blockDim.x;
    head += launch.step_heads;
    j += launch.step_units;
    if (j >= units_per_head()) {
      j -= units_per_head();
      ++head;
    }
  }

  __device__ __forceinline__ int units_per_head() const { return static_cast<int>(launch.units_per_head.value); }
  __device__ __forceinline__ int half() const { return static_cast<int>(p.rotary_dim) / 2; }
  __device__ __forceinline__ bool is_rotated() const {
    return kInterleaved ? j * kPairs < half() : j < launch.rotary_units;
  }
  // The first pair, and how many there are.
  __device__ __forceinline__ int pair() const { return j * kPairs; }
  __device__ __forceinline__ int pairs() const { return kWhole ? kPairs : min(kPairs, half() - pair()); }
  // Of vector `part`: the first element in the head, and how many exist. Elements that are not rotated go two vectors
  // at a time as well.
  __device__ __forceinline__ int column(int part) const {
    if (kInterleaved) return j * kSize;
    if (j < launch.rotary_units) return j * kSize + part * half();
    return 2 * half() + (j - launch.rotary_units + part * (units_per_head() - launch.rotary_units)) * kSize;
  }
  // The same in a row of contiguous heads.
  __device__ __forceinline__ int offset(int part) const {
    if (kInterleaved && kWhole) return index * kSize;
    return head * static_cast<int>(p.head_size) + column(part);
  }
  __device__ __forceinline__ int count(int part) const {
    if (kWhole) return kSize;
    const int end = kInterleaved || j >= launch.rotary_units ? static_cast<int>(p.head_size) : (part + 1) * half();
    return min(kSize, max(0, end - column(part)));
  }
};

// A row of the block's tile.
struct RopeRow {
  int side;
  int token_in_block;
  int batch, token;
  int head;   // the first
  int units;  // 0: the row does not exist, its threads only take part in the reductions

  __device__ __forceinline__ RopeRow(int row, int first_batch, int first_token, const RopeParams& p,
                                     const RopeLaunch& launch) {
    head = row;
    int batch_in_block = 0;
    token_in_block = 0;
    if (launch.items_per_block > 1) {  // uniform, like the next
      token_in_block = launch.rows_per_token.divide(row, &head);
      if (launch.batches_per_block > 1)
        batch_in_block = launch.tokens_per_block.divide(token_in_block, &token_in_block);
    }
    side = head >= launch.q_rows;
    if (side) head -= launch.q_rows;
    batch = first_batch + batch_in_block;
    token = first_token + token_in_block;
    const bool exists = row < launch.items_per_block * static_cast<int>(launch.rows_per_token.value) &&
                        batch < p.batch && token < p.sides[side].tokens;
    units = exists ? static_cast<int>(launch.units_per_head.value) *
                         (p.across_heads ? static_cast<int>(p.sides[side].heads) : 1)
                   : 0;
  }

  __device__ __forceinline__ int64_t offset(const Operand& operand) const {
    // Unsigned: half the instructions.
    return static_cast<unsigned>(batch) * operand.strides[0] + static_cast<unsigned>(token) * operand.strides[1] +
           static_cast<unsigned>(head) * operand.strides[2];
  }
};

// The tables of the block's tokens, as they lie in shared memory: fp32 [table, token, cos or sin, head, pair].
struct StagedTables {
  float* data;

  __device__ __forceinline__ static int size(const RopeParams& p, const RopeLaunch& launch) {
    return launch.table_staged ? p.table_count * static_cast<int>(launch.tokens_per_block.value) * 2 * to_sines(launch)
                               : 0;
  }
  // The cosines of the first head; the sines follow after to_sines.
  __device__ __forceinline__ float* row(int table, int token, const RopeLaunch& launch) const {
    return data + (table * static_cast<int>(launch.tokens_per_block.value) + token) * 2 * to_sines(launch);
  }
  __device__ __forceinline__ static int to_sines(const RopeLaunch& launch) {
    return launch.table_heads * launch.table_pairs;
  }
};

// One value of a grid's tables: that of the axis that the pair belongs to, at the token's position on it.
__device__ __forceinline__ float grid_value(const RopeGrid& grid, int which, int row, int pair) {
  const unsigned width = static_cast<unsigned>(grid.sizes[2]);
  const unsigned height = static_cast<unsigned>(grid.sizes[1]);
  const unsigned line = static_cast<unsigned>(row) / width;
  int64_t position = line / height;
  int axis = 0;
  if (pair >= grid.pairs[0]) {
    pair -= static_cast<int>(grid.pairs[0]);
    axis = 1;
    position = line % height;
    if (pair >= grid.pairs[1]) {
      pair -= static_cast<int>(grid.pairs[1]);
      axis = 2;
      position = static_cast<unsigned>(row) % width;
    }
  }
  return grid.tables[axis][(position * grid.pairs[axis] + pair) * 2 + which];
}

// One value of a table, the slow way; `offset` is that of its first pair.
__device__ __forceinline__ float table_value(const RopeParams& p, const RopeTable& table, int which, int64_t offset,
                                             int row, int pair) {
  if (p.grid.exists()) return grid_value(p.grid, which, row, pair);
  const void* const data = which == 0 ? table.cos : table.sin;
  offset += pair * table.pair_stride;
  if (table.dtype == Dtype::kFloat32) return static_cast<const float*>(data)[offset];
  if (table.dtype == Dtype::kFloat16) return to_float(static_cast<const __half*>(data)[offset]);
  return to_float(static_cast<const __nv_bfloat16*>(data)[offset]);
}

__device__ __forceinline__ int64_t table_offset(const RopeTable& table, int batch, int row, int head) {
  return static_cast<unsigned>(batch) * table.strides[0] + static_cast<unsigned>(row) * table.strides[1] +
         static_cast<unsigned>(head) * table.strides[2];
}

// kTableChunk values of an aligned table to shared memory: compact ones of 16 bits, or those at every second place.
template <typename S>
__device__ __forceinline__ void stage_chunk_as(const S* source, int64_t pair_stride, float* target) {
  float values[kTableChunk];
  if (sizeof(S) < sizeof(float) && pair_stride == 1) {
    const int2 bits = __ldg(reinterpret_cast<const int2*>(source));
    to_floats(*reinterpret_cast<const Vec<S, kTableChunk>*>(&bits), values);
  } else {
    constexpr int kSize = kVectorSize<S>;
#pragma unroll
    for (int first = 0; first < kTableChunk; first += kSize / 2) {
      const int4 bits = __ldg(reinterpret_cast<const int4*>(source + 2 * first));
      const auto& vector = *reinterpret_cast<const Vec<S, kSize>*>(&bits);
#pragma unroll
      for (int j = 0; j < kSize / 2; ++j) values[first + j] = to_float(vector.value[2 * j]);
    }
  }
  *reinterpret_cast<float4*>(target) = make_float4(values[0], values[1], values[2], values[3]);
}

__device__ __forceinline__ void stage_tables(const StagedTables& staged, int batch, int first_token,
                                             const RopeParams& p, const RopeLaunch& launch) {
  const int total = StagedTables::size(p, launch) / (2 * kTableChunk);
  const int tokens = static_cast<int>(launch.tokens_per_block.value);
  const int to_sines = StagedTables::to_sines(launch);
  int i = threadIdx.y * blockDim.x + threadIdx.x;
  int chunk;
  int run = launch.run_chunks.divide(i, &chunk);
#pragma unroll 1
  for (; i < total; i += blockDim.x * blockDim.y) {
    // Item i: a chunk of cosines and one of sines, in the order of the layout.
    int head = 0;
    int item = run;
    if (launch.table_runs.value > 1) item = launch.table_runs.divide(run, &head);
    const int number = item >= tokens;
    const int row = first_token + item - (number ? tokens : 0) - static_cast<int>(p.rope_start);
    const int pair = chunk * kTableChunk;
    run += launch.step_runs;
    chunk += launch.step_chunks;
    if (chunk >= static_cast<int>(launch.run_chunks.value)) {
      chunk -= launch.run_chunks.value;
      ++run;
    }
    const RopeTable& table = p.tables[number];
    if (row < 0 || row >= table.tokens || head >= table.heads) continue;

    float* const target = staged.data + i * kTableChunk + item * to_sines;
    const int64_t offset = table_offset(table, batch, row, head);
    if (!table.vectorized) {
      const int count = min(kTableChunk, static_cast<int>(p.rotary_dim) / 2 - pair);
#pragma unroll 1
      for (int j = 0; j < 2 * count; ++j) {
        target[j / 2 + (j & 1) * to_sines] = table_value(p, table, j & 1, offset, row, pair + j / 2);
      }
      continue;
    }
    const int64_t at = offset + static_cast<unsigned>(pair) * table.pair_stride;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const void* const data = which == 0 ? table.cos : table.sin;
      float* const to = target + which * to_sines;
      if (table.dtype == Dtype::kFloat32 && table.pair_stride == 1) {
        copy_async_16(to, static_cast<const float*>(data) + at);
      } else if (table.dtype == Dtype::kFloat32) {
        stage_chunk_as(static_cast<const float*>(data) + at, 2, to);
      } else if (table.dtype == Dtype::kFloat16) {
        stage_chunk_as(static_cast<const __half*>(data) + at, table.pair_stride, to);
      } else {
        stage_chunk_as(static_cast<const __nv_bfloat16*>(data) + at, table.pair_stride, to);
      }
    }
  }
}

template <int kBytes>
__device__ __forceinline__ void copy_async(void* target, const void* source) {
  static_assert(kBytes == 8 || kBytes == kVectorBytes);
  if constexpr (kBytes == kVectorBytes) {
    copy_async_16(target, source);
  } else {
#if __CUDA_ARCH__ >= 800
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(source) : "memory");
#else
    *static_cast<int2*>(target) = *static_cast<const int2*>(source);
#endif
  }
}

// Both vectors of a unit to their places in shared memory, `part_stride` apart; zeros for elements that do not exist.
template <bool kWhole, typename Unit, typename T, int kSize>
__device__ __forceinline__ void stage_unit(const Operand& x, const T* row, const Unit& unit, Vec<T, kSize>* place,
                                           int part_stride) {
  const bool contiguous = x.strides[2] == unit.p.head_size;  // uniform, and spares a 64-bit product
#pragma unroll
  for (int part = 0; part < Unit::kParts; ++part) {
    const T* const source = row + (contiguous ? unit.offset(part) : unit.head * x.strides[2] + unit.column(part));
    Vec<T, kSize>* const target = place + part * part_stride;
    if (kWhole || (x.vectorized && unit.count(part) > 0)) {
      copy_async<Unit::kBytes>(target, source);
    } else {
#pragma unroll 1
      for (int j = 0; j < kSize; ++j) target->value[j] = j < unit.count(part) ? source[j] : from_float<T>(0.f);
    }
  }
}

// In one load, which the compiler makes two when it sees the elements.
template <typename T, int kSize>
__device__ __forceinline__ void load_whole(const T* source, float (&values)[kSize]) {
  using Bits = std::conditional_t<sizeof(T) * kSize == kVectorBytes, int4, int2>;
  const Bits bits = *reinterpret_cast<const Bits*>(source);
  to_floats(*reinterpret_cast<const Vec<T, kSize>*>(&bits), values);
}

// A part of weight or bias. Whole vectors are of T or fp32: other dtypes go the other way.
template <bool kWhole, typename T, int kSize>
__device__ __forceinline__ void load_affine(const Operand& operand, int offset, int count, float (&values)[kSize]) {
  if constexpr (kWhole) {
    if (std::is_same_v<T, float> || operand.dtype == Dtype::kFloat32) {
      load_floats_as<float>(operand.data, offset, true, kSize, values);
    } else {
      load_whole(static_cast<const T*>(operand.data) + offset, values);
    }
  } else {
    load_floats<kSize>(operand, offset, count, values);
  }
}

__device__ __forceinline__ float row_total(float sum, float* scratch) {
  float sums[1] = {sum};
  row_sums(sums, scratch);
  return sums[0];
}

template <typename T, bool kInterleaved, bool kWhole>
__global__ void __launch_bounds__(kMaxThreadsPerRow, kWhole ? 2 : 1)
    rope_kernel(const __grid_constant__ RopeParams p, const __grid_constant__ RopeLaunch launch) {
  // Products and sums are spelled out below: both kernels, kWhole or not, must give the same bits, whatever the
  // compiler would contract.
  using Unit = RopeUnit<T, kInterleaved, kWhole>;
  constexpr int kSize = Unit::kSize;
  constexpr int kParts = Unit::kParts;
  constexpr int kPairs = Unit::kPairs;
  using Vector = Vec<T, kSize>;
  extern __shared__ int4 shared[];
  __shared__ float scratch[2][kMaxWarps];

  // The batch index is the fastest: where batches share a table, the next finds it in the L2.
  const unsigned batch_groups =
      static_cast<unsigned>(p.batch + launch.batches_per_block - 1) / launch.batches_per_block;
  const unsigned tile = blockIdx.x / batch_groups;
  const int first_token = tile * launch.tokens_per_block.value;
  const int first_batch = (blockIdx.x - tile * batch_groups) * launch.batches_per_block;
  const int rows = launch.items_per_block * static_cast<int>(launch.rows_per_token.value);
  const Unit first_unit(p, launch);

  const bool rows_staged = kWhole || launch.rows_staged;
  const bool table_staged = kWhole || launch.table_staged;
  const StagedTables tables{reinterpret_cast<float*>(shared)};
  Vector* const row_stage = reinterpret_cast<Vector*>(tables.data + StagedTables::size(p, launch));
  const int part_stride = rows_staged ? launch.row_vectors / kParts : blockDim.x * blockDim.y;
  // The place of a row's unit threadIdx.x, from where the others follow; or, for rows that are not staged, the thread's
  // own.
  const auto place_of = [&](int i) {
    return row_stage + threadIdx.x + (rows_staged ? i * launch.row_stride : threadIdx.y * blockDim.x);
  };

  if (rows_staged) {
#pragma unroll 1
    for (int i = threadIdx.y; i < rows; i += blockDim.y) {
      const RopeRow row(i, first_batch, first_token, p, launch);
      const Operand& x = p.sides[row.side].x;
      const T* const source = static_cast<const T*>(x.data) + row.offset(x);
      Vector* place = place_of(i);
#pragma unroll 1
      for (Unit unit = first_unit; row.units > unit.index; unit.advance(), place += blockDim.x) {
        stage_unit<kWhole>(x, source, unit, place, part_stride);
      }
    }
  }
  if (table_staged) stage_tables(tables, first_batch, first_token, p, launch);
  copy_async_commit();
  copy_async_wait<0>();
  if (p.table_count > 0 && table_staged) __syncthreads();

  int turn = 0;  // of the scratch: a slow warp may still read the last sum's when the next one starts
#pragma unroll 1
  for (int first = 0; first < rows; first += blockDim.y) {
    const int i = first + threadIdx.y;
    const RopeRow row(i, first_batch, first_token, p, launch);
    const RopeSide& side = p.sides[row.side];
    // Brings a unit of a row that was not staged.
    const auto fetch = [&](const Unit& unit, Vector* place) {
      if (rows_staged) return;
      stage_unit<kWhole>(side.x, static_cast<const T*>(side.x.data) + row.offset(side.x), unit, place, part_stride);
      copy_async_commit();
      copy_async_wait<0>();
    };
    const int place_step = rows_staged ? blockDim.x : 0;

    const bool layer = p.statistic == Statistic::kLayer;
    float mean = 0.f, rstd = 1.f;
    if (p.statistic != Statistic::kNone) {
      const float width = static_cast<float>(p.across_heads ? side.heads * p.head_size : p.head_size);
      const auto sum_over = [&](auto&& term) {
        float sum = 0.f;
        Vector* place = place_of(i);
#pragma unroll 1
        for (Unit unit = first_unit; row.units > unit.index; unit.advance(), place += place_step) {
          fetch(unit, place);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            float x[kSize];
            load_whole(place[part * part_stride].value, x);
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              if (kWhole || j < unit.count(part)) sum = term(sum, x[j]);
            }
          }
        }
        return sum;
      };
      float squares;
      if (layer) {
        // The variance in a second pass: E[x²] - mean² would lose it where the mean is large.
        mean = row_total(sum_over([](float sum, float x) { return sum + x; }), scratch[turn++ & 1]) / width;
        squares = sum_over([mean](float sum, float x) { return fmaf(x - mean, x - mean, sum); });
      } else {
        squares = sum_over([](float sum, float x) { return fmaf(x, x, sum); });
      }
      rstd = rsqrtf(row_total(squares, scratch[turn++ & 1]) / width + p.eps);
    }

    // The rows of a table begin with token rope_start; other tokens are normed but not rotated.
    const int table_row = row.token - static_cast<int>(p.rope_start);
    const bool rotated = side.table >= 0 && table_row >= 0 && table_row < p.tables[side.table].tokens;
    const bool one_table_head = side.table >= 0 && p.tables[side.table].heads == 1;
    const int first_head = one_table_head ? 0 : row.head;
    const float* const table_stage =
        tables.row(side.table, row.token_in_block, launch) + first_head * launch.table_pairs;
    const bool has_weight = side.weight.data != nullptr;
    const bool has_bias = side.bias.data != nullptr;
    T* const y = static_cast<T*>(side.y.data) + row.offset(side.y);
    Vector* place = place_of(i);
#pragma unroll 1
    for (Unit unit = first_unit; row.units > unit.index; unit.advance(), place += place_step) {
      fetch(unit, place);
      float x[kParts][kSize];
#pragma unroll
      for (int part = 0; part < kParts; ++part) load_whole(place[part * part_stride].value, x[part]);

      if (p.statistic != Statistic::kNone) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int count = unit.count(part);
          if (count == 0) continue;
          if (layer) {
#pragma unroll
            for (int j = 0; j < kSize; ++j) x[part][j] -= mean;
          }
#pragma unroll
          for (int j = 0; j < kSize; ++j) x[part][j] = __fmul_rn(x[part][j], rstd);
          float affine[kSize];
          if (has_weight) {
            load_affine<kWhole, T>(side.weight, unit.offset(part), count, affine);
#pragma unroll
            for (int j = 0; j < kSize; ++j) x[part][j] = __fmul_rn(x[part][j], affine[j]);
          }
          if (has_bias) {
            load_affine<kWhole, T>(side.bias, unit.offset(part), count, affine);
#pragma unroll
            for (int j = 0; j < kSize; ++j) x[part][j] = __fadd_rn(x[part][j], affine[j]);
          }
        }
      }

      if (rotated && unit.is_rotated()) {
        const float* cos = table_stage + (one_table_head ? 0 : unit.head * launch.table_pairs) + unit.pair();
        int to_sines = StagedTables::to_sines(launch);
        if (!table_staged) {
          const RopeTable& table = p.tables[side.table];
          const int64_t offset = table_offset(table, row.batch, table_row, one_table_head ? 0 : row.head + unit.head);
          float* const own = reinterpret_cast<float*>(row_stage + launch.own_tables) +
                             (threadIdx.y * blockDim.x + threadIdx.x) * 2 * kPairs;
#pragma unroll 1
          for (int j = 0; j < 2 * unit.pairs(); ++j) {
            own[(j & 1) * kPairs + j / 2] = table_value(p, table, j & 1, offset, table_row, unit.pair() + j / 2);
          }
          cos = own;
          to_sines = kPairs;
        }
        const Vec<float, kPairs> c = *reinterpret_cast<const Vec<float, kPairs>*>(cos);
        const Vec<float, kPairs> s = *reinterpret_cast<const Vec<float, kPairs>*>(cos + to_sines);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          float& a = kInterleaved ? x[0][2 * j] : x[0][j];
          float& b = kInterleaved ? x[0][2 * j + 1] : x[kParts - 1][j];
          const float first = fmaf(a, c.value[j], -__fmul_rn(b, s.value[j]));
          const float second = fmaf(b, c.value[j], __fmul_rn(a, s.value[j]));
          if (kWhole || j < unit.pairs()) {
            a = first;
            b = second;
          }
        }
      }

#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        T* const target = y + unit.offset(part);
        const Vector rounded = from_floats<T, kSize>(x[part]);
        if (kWhole || (side.y.vectorized && unit.count(part) > 0)) {
          *reinterpret_cast<Vector*>(target) = rounded;
        } else {
          store_elements(target, rounded, unit.count(part));
        }
      }
    }
  }
}

}  // namespace ltx_kernels
