// The launch of the RoPE core (rope.cuh): which kernel, and how rows are spread over threads and blocks. Each dtype is
// a source of its own, so that they compile in parallel.
#pragma once

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "rope.cuh"

namespace ltx_kernels {

template <typename Unit>
RopeShape rope_shape(const RopeParams& p) {
  RopeShape shape;
  shape.head_size = static_cast<int>(p.head_size);
  shape.half = static_cast<int>(p.rotary_dim / 2);
  shape.rotary_units = Unit::kParts == 1 ? 0 : static_cast<int>(ceil_div(shape.half, Unit::kSize));
  const int64_t rest = p.head_size - (Unit::kParts == 1 ? 0 : 2 * shape.half);
  shape.units_per_head = Divisor(shape.rotary_units + ceil_div(rest, Unit::kParts * Unit::kSize));
  return shape;
}

// Rows a thread, tuning as data, measured on an H200: of heads that share the tables, [8, 2048, 40, 128] half takes 92
// us with two, 94 with four; [2, 2688, 64, 64] interleaved with a norm 26.8 and 23.9, without one 12.4 and 12.6.
// Tables of a grid cost more: four share them. Batches: [2, 2688, 2, 2048] takes 37.8 us with one unit a thread, 33.3
// with two.
constexpr int head_rows(bool interleaved, Statistic statistic, bool grid) {
  return interleaved && (statistic != Statistic::kNone || grid) ? 4 : 2;
}
constexpr int kBatchRows = 2;
constexpr int64_t kUnitsForOneEach = 128;

struct RopePlan {
  RopeShape shape;
  bool row_is_token = false;  // a row is all heads of a token, not one
  int64_t row_units = 0;      // of the longer of q's and k's rows
  int thread_units = 1;
  int thread_rows = 1;
  bool batches_share = false;  // the tables
  RowLaunch config{};
};

template <typename T, bool kInterleaved>
RopePlan rope_plan(const RopeParams& p) {
  RopePlan plan;
  plan.shape = rope_shape<RopeUnit<T, kInterleaved>>(p);
  bool heads_share = true;
  plan.batches_share = true;
  for (int i = 0; i < p.table_count; ++i) {
    plan.batches_share = plan.batches_share && p.tables[i].strides[0] == 0;
    heads_share = heads_share && p.tables[i].heads == 1;
  }
  plan.row_is_token = p.across_heads || (!heads_share && p.statistic == Statistic::kNone);
  const int64_t heads = std::max(p.sides[0].heads, p.sides[1].heads);
  plan.row_units = plan.shape.units_per_head.value * (plan.row_is_token ? heads : 1);
  plan.thread_units = plan.row_units <= kUnitsForOneEach || p.statistic == Statistic::kLayer ? 1 : 2;
  plan.config = row_launch(plan.row_units, plan.thread_units, kBlockThreads);
  if (plan.row_is_token) {
    plan.thread_rows = plan.batches_share && p.batch > 1 ? kBatchRows : 1;
  } else if (heads_share && heads > 1) {
    plan.thread_rows = head_rows(kInterleaved, p.statistic, p.grid.exists());
  }
  return plan;
}

// The dtype that weights and biases share; T where there are none.
template <typename T>
Dtype affine_dtype(const RopeParams& p, bool* shared) {
  Dtype dtype = kDtype<T>;
  bool any = false;
  for (const RopeSide& side : p.sides) {
    for (const Operand* operand : {&side.weight, &side.bias}) {
      if (operand->data == nullptr) continue;
      *shared = *shared && (!any || operand->dtype == dtype);
      dtype = operand->dtype;
      any = true;
    }
  }
  return dtype;
}

// Whether all that the fast kernel reads is whole, aligned vectors, and offsets of heads fit 32 bits.
inline bool is_regular(const RopeParams& p) {
  bool regular = true;
  const int64_t heads = std::max(p.sides[0].heads, p.sides[1].heads);
  const int64_t longest = INT32_MAX / std::max(heads, int64_t{1});
  const auto is_short = [&](int64_t stride) { return -longest <= stride && stride <= longest; };
  for (const RopeSide& side : p.sides) {
    if (side.x.data == nullptr) continue;
    for (const Operand* operand : {&side.x, &side.y, &side.weight, &side.bias})
      regular = regular && (operand->data == nullptr || operand->vectorized);
    regular = regular && is_short(side.x.strides[2]) && is_short(side.y.strides[2]);
    regular = regular && (side.bias.data == nullptr || p.statistic == Statistic::kLayer);
  }
  for (int i = 0; i < p.table_count; ++i) {
    const RopeTable& table = p.tables[i];
    regular = regular && (p.grid.exists() || table.vectorized) && is_short(table.strides[2]);
    regular = regular && (p.interleaved || table.pair_stride == 1);
    regular = regular && table.dtype == p.tables[0].dtype && table.pair_stride == p.tables[0].pair_stride;
  }
  return regular;
}

inline RopeFastOperand fast_operand(const Operand& operand, const RopePlan& plan, int apart) {
  RopeFastOperand fast;
  fast.data = operand.data;
  fast.batch = operand.strides[0];
  fast.token = operand.strides[1];
  fast.inner = plan.row_is_token ? operand.strides[0] : operand.strides[2];
  fast.step = fast.inner * apart;
  fast.head = plan.row_is_token ? static_cast<int>(operand.strides[2]) : 0;
  return fast;
}

// The number of blocks goes to *blocks.
inline RopeFast rope_fast(const RopeParams& p, const RopePlan& plan, int64_t* blocks) {
  RopeFast fast;
  fast.shape = plan.shape;
  const int64_t tokens = std::max(p.sides[0].tokens, p.sides[1].tokens);
  const int64_t groups = tokens * (plan.batches_share ? 1 : p.batch);
  fast.tokens = Divisor(tokens);
  fast.groups = static_cast<int>(std::min<int64_t>(groups, INT32_MAX));
  fast.rope_start = static_cast<int>(p.rope_start);
  fast.eps = p.eps;
  fast.grid = p.grid;
  int64_t side_blocks[RopeParams::kSides] = {};
  for (int i = 0; i < RopeParams::kSides; ++i) {
    const RopeSide& side = p.sides[i];
    if (side.x.data == nullptr) continue;
    RopeFastSide& to = fast.sides[i];
    const int64_t batches = plan.batches_share ? p.batch : 1;
    to.inner_rows = static_cast<int>(plan.row_is_token ? batches : side.heads);
    const int64_t inner_places = ceil_div(to.inner_rows, plan.thread_rows);
    to.inner_places = Divisor(inner_places);
    const int64_t places = inner_places * (plan.row_is_token ? 1 : batches);
    to.places = Divisor(places);
    // A block has a power of two of rows, so this is one; it divides the places, so that no row is left out.
    to.apart = static_cast<int>(std::gcd<int64_t>(plan.config.rows_per_block, inner_places));
    to.x = fast_operand(side.x, plan, to.apart);
    to.y = fast_operand(side.y, plan, to.apart);
    to.weight = side.weight.data;
    to.bias = side.bias.data;
    to.affine_head = p.across_heads ? static_cast<int>(p.head_size) : 0;
    to.tokens = static_cast<int>(side.tokens);
    const int64_t row_heads = plan.row_is_token ? side.heads : 1;
    to.units = static_cast<int>(row_heads * plan.shape.units_per_head.value);
    to.width = static_cast<float>(row_heads * p.head_size);
    to.inverse_width = 1.f / to.width;
    // Where batches share, a group is a token, and q and k have blocks for their own.
    side_blocks[i] = ceil_div((plan.batches_share ? side.tokens : groups) * places, plan.config.rows_per_block);
    if (side.table < 0) continue;
    const RopeTable& table = p.tables[side.table];
    to.cos = table.cos;
    to.sin = table.sin;
    to.table_batch = table.strides[0];
    to.table_token = table.strides[1];
    (plan.row_is_token ? to.table_head : to.table_inner) = static_cast<int>(table.heads > 1 ? table.strides[2] : 0);
    to.table_tokens = static_cast<int>(table.tokens);
    fast.compact = table.pair_stride == 1;
  }
  const int64_t q = side_blocks[0], k = side_blocks[1];
  fast.q_blocks = static_cast<int>(q == 0 ? 0 : k == 0 ? 1 : std::max<int64_t>(1, ceil_div(q, k)));
  const int64_t k_blocks = k == 0 ? 0 : q == 0 ? 1 : std::max<int64_t>(1, ceil_div(k, q));
  fast.period = Divisor(fast.q_blocks + k_blocks);
  const int64_t periods = std::max(q == 0 ? 0 : ceil_div(q, fast.q_blocks), k == 0 ? 0 : ceil_div(k, k_blocks));
  *blocks = periods * fast.period.value;
  return fast;
}

template <typename T, typename W, typename Table, bool kInterleaved, Statistic kStatistic>
bool try_spreads(const RopeFast& fast, const RopePlan& plan, unsigned blocks, cudaStream_t stream, cudaError_t* error) {
  const auto try_spread = [&](auto rows, auto units) {
    constexpr int kRows = decltype(rows)::value, kUnits = decltype(units)::value;
    if (plan.thread_rows != kRows || plan.thread_units != kUnits) return false;
    const dim3 threads(plan.config.threads_per_row, plan.config.rows_per_block);
    const auto kernel = rope_fast_kernel<T, W, Table, kInterleaved, kStatistic, kRows, kUnits>;
    *error = launch_kernel(kernel, {blocks, threads}, stream, fast);
    return true;
  };
  constexpr std::integral_constant<int, 1> k1;
  constexpr std::integral_constant<int, 2> k2;
  constexpr bool kGrid = std::is_same_v<Table, RopeGrid>;
  constexpr std::integral_constant<int, head_rows(kInterleaved, kStatistic, kGrid)> of_heads;
  constexpr std::integral_constant<int, kBatchRows> of_batches;
  if (try_spread(k1, k1) || try_spread(of_heads, k1)) return true;
  // No model that is injected has a layer norm, or a grid, over rows of all heads.
  if constexpr (kStatistic != Statistic::kLayer && !kGrid)
    return try_spread(of_batches, k1) || try_spread(k1, k2) || try_spread(of_batches, k2);
  return false;
}

// Launches the fast kernel; false where there is none for this problem.
template <typename T, bool kInterleaved, Statistic kStatistic>
bool try_fast(const RopeParams& p, const RopePlan& plan, cudaStream_t stream, cudaError_t* error) {
  bool shared = true;
  const Dtype affine = affine_dtype<T>(p, &shared);
  const int64_t held = static_cast<int64_t>(plan.config.threads_per_row) * plan.thread_units;
  if (!shared || !is_regular(p) || held < plan.row_units) return false;
  int64_t blocks = 0;
  const RopeFast fast = rope_fast(p, plan, &blocks);
  if (blocks * plan.config.rows_per_block > INT32_MAX) return false;
  const auto try_table = [&](auto table) {
    using Table = decltype(table);
    const auto number = static_cast<unsigned>(blocks);
    if (affine == kDtype<T>)
      return try_spreads<T, T, Table, kInterleaved, kStatistic>(fast, plan, number, stream, error);
    if constexpr (kStatistic != Statistic::kNone && !std::is_same_v<T, float>) {
      if (affine == Dtype::kFloat32)
        return try_spreads<T, float, Table, kInterleaved, kStatistic>(fast, plan, number, stream, error);
    }
    return false;
  };
  if (p.grid.exists()) {
    if constexpr (kInterleaved && kStatistic == Statistic::kNone) return try_table(RopeGrid{});
  } else if (p.table_count == 0 || p.tables[0].dtype == Dtype::kFloat32) {
    return try_table(float{});
  } else if (p.tables[0].dtype == kDtype<T>) {
    if constexpr (!std::is_same_v<T, float>) return try_table(T{});
  }
  return false;
}

template <typename T, bool kInterleaved, Statistic kStatistic>
cudaError_t launch_rope(const RopeParams& p, cudaStream_t stream) {
  const RopePlan plan = rope_plan<T, kInterleaved>(p);
  cudaError_t error = cudaSuccess;
  if (try_fast<T, kInterleaved, kStatistic>(p, plan, stream, &error)) return error;

  int64_t rows = 0;
  for (const RopeSide& side : p.sides) rows += side.x.data == nullptr ? 0 : plan.row_is_token ? 1 : side.heads;
  rows *= p.batch * std::max(p.sides[0].tokens, p.sides[1].tokens);
  const int64_t blocks = ceil_div(rows, plan.config.rows_per_block);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 threads(plan.config.threads_per_row, plan.config.rows_per_block);
  return launch_kernel(rope_general_kernel<T, kInterleaved, kStatistic>, {static_cast<unsigned>(blocks), threads},
                       stream, p, plan.shape, plan.row_is_token);
}

template <typename T, bool kInterleaved>
cudaError_t launch_rope(const RopeParams& p, cudaStream_t stream) {
  switch (p.statistic) {
    case Statistic::kNone:
      return launch_rope<T, kInterleaved, Statistic::kNone>(p, stream);
    case Statistic::kRms:
      return launch_rope<T, kInterleaved, Statistic::kRms>(p, stream);
    default:
      return launch_rope<T, kInterleaved, Statistic::kLayer>(p, stream);
  }
}

template <typename T>
cudaError_t launch_rope(const RopeParams& p, cudaStream_t stream) {
  return p.interleaved ? launch_rope<T, true>(p, stream) : launch_rope<T, false>(p, stream);
}

}  // namespace ltx_kernels
