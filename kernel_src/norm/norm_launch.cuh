// The launch of the row-norm core (norm.cuh): which kernel, and how a row is spread over threads and blocks. Each dtype
// is a source of its own, so that they compile in parallel.
#pragma once

#include <algorithm>

#include "norm.cuh"

namespace ltx_kernels {

// How a row is spread: tuning as data, measured on an H200 (benchmarks/results/h200/tuning/norm_waiting_operands.txt,
// spreads_and_hints.txt). More vectors a thread need fewer threads a row, and so fewer barriers and addresses, but
// leave fewer rows in flight.
struct Spread {
  int vectors;     // a thread
  int rows;        // a thread, at a time, where nothing but x and residual differs between them
  int segments;    // blocks a row, a cluster on sm_90
  int pieces = 1;  // blocks a row where nothing is summed
};

inline Spread choose_spread(const Has& has, Statistic statistic, int64_t row_vectors) {
  const bool layer = statistic == Statistic::kLayer;
  // Pieces of kBlockThreads vectors and more. [64, 2048] bf16, 256 vectors, takes 0.98 us in one and 1.09 in two.
  if (statistic == Statistic::kNone)
    return {1, 1, 1, row_vectors <= 256 ? 1 : static_cast<int>(row_vectors / kBlockThreads)};
  if (has.residual) {
    // [5376, 4096] bf16: add_rms_norm takes 49.2 us with two, 50.2 with one; residual_ada_norm 50.8 and 49.8. With four
    // add_rms_norm takes 48.7, but one row 6.3 for 5.2.
    const int64_t for_one = layer ? 0 : has.scale ? 512 : 256;
    return {row_vectors <= for_one ? 1 : row_vectors <= 1024 ? 2 : 4, 1, 1};
  }
  if (has.scale && !layer) return {row_vectors <= 512 ? 2 : 4, 2, 1};
  if (has.scale) return {row_vectors <= 256 ? 2 : 4, 1, 1};
  if (layer) {
    if (row_vectors > 4096) return {4, 1, kMaxSegments};
    return {row_vectors <= 256 ? 2 : row_vectors <= 2048 ? 4 : 8, 1, 1};
  }
  if (row_vectors > 2048)
    return {8, 1, row_vectors <= 4096 ? 4 : kMaxSegments};  // [2048, 32768] bf16: 68.8 us, 76.5 in one
  // [1024, 8192] bf16 takes 9.6 us with four, 9.9 with eight; of 4096 rows and more they are level.
  return {row_vectors <= 512 ? 2 : row_vectors <= 1024 ? 4 : 8, 1, 1};
}

inline unsigned parts_of(const Has& has, bool* known) {
  // Parts that only come together in the fast kernels.
  *known = has.scale == has.shift && has.scale_table == has.shift_table &&
           (!has.gate || !has.scale || has.gate_table == has.scale_table);
  const bool tables = has.scale_table || has.gate_table;
  return (has.weight ? kWeight : 0u) | (has.bias ? kBias : 0u) | (has.scale ? kModulation : 0u) |
         (tables ? kTables : 0u) | (has.residual ? kResidual : 0u) | (has.gate ? kGate : 0u) | (has.silu ? kSilu : 0u);
}

struct Plan {
  RowLaunch config;
  Spread spread;
};

// False where the chip has too little shared memory, or, for a segmented kernel, no clusters.
template <typename T, typename M, Statistic kStatistic, unsigned kParts, int kVecs, int kRows, bool kSegmented>
bool launch_fast(const NormParams& p, const Plan& plan, cudaStream_t stream, cudaError_t* error) {
  const auto kernel = norm_fast_kernel<T, M, kStatistic, kParts, kVecs, kRows, kSegmented>;
  if (kSegmented && !is_sm_90_code(reinterpret_cast<const void*>(kernel))) return false;
  const dim3 threads(plan.config.threads_per_row, plan.config.rows_per_block);
  const int64_t chunks = ceil_div(p.rows.sizes[2], static_cast<int64_t>(plan.config.rows_per_block) * kRows);
  const LaunchConfig config = {
      .blocks = static_cast<unsigned>(chunks * p.rows.sizes[1] * plan.spread.segments * plan.spread.pieces),
      .threads = threads,
      .shared_bytes = static_cast<int64_t>(waiting_bytes<T, M>(has_of(kParts), kVecs)) * threads.x * threads.y,
      .cluster = plan.spread.segments};
  int fits = 1;
  *error = allow_shared_memory(kernel, config.shared_bytes, &fits);
  if (*error != cudaSuccess) return true;
  if (!fits) return false;
  *error = launch_kernel(kernel, config, stream, p, NormGrid{Divisor(chunks), Divisor(plan.spread.pieces)});
  return true;
}

template <typename T, Statistic kStatistic>
cudaError_t launch_general(const NormParams& p, const Plan& plan, cudaStream_t stream) {
  const dim3 threads(plan.config.threads_per_row, plan.config.rows_per_block);
  const int64_t segment_columns =
      static_cast<int64_t>(plan.config.threads_per_row) * plan.spread.vectors * kVectorSize<T>;
  return launch_kernel(norm_general_kernel<T, kStatistic>,
                       {static_cast<unsigned>(ceil_div(p.rows.count(), plan.config.rows_per_block)), threads}, stream,
                       p, plan.spread.segments, segment_columns);
}

// Launches the fast kernel of these parts; false where there is none for this spread.
template <typename T, typename M, Statistic kStatistic, unsigned kParts>
bool try_fast(const NormParams& p, unsigned parts, const Plan& plan, cudaStream_t stream, cudaError_t* error) {
  if (parts != kParts) return false;
  constexpr bool kLayer = kStatistic == Statistic::kLayer;
  if (plan.spread.segments > 1) {
    if constexpr (!(kParts & (kModulation | kResidual))) {
      constexpr int kVecs = kLayer ? 4 : 8;
      if (plan.spread.vectors == kVecs)
        return launch_fast<T, M, kStatistic, kParts, kVecs, 1, true>(p, plan, stream, error);
    }
    return false;
  }
  const auto try_spread = [&](auto vectors, auto rows) {
    constexpr int kVecs = decltype(vectors)::value, kRows = decltype(rows)::value;
    if (plan.spread.vectors != kVecs || plan.spread.rows != kRows) return false;
    return launch_fast<T, M, kStatistic, kParts, kVecs, kRows, false>(p, plan, stream, error);
  };
  constexpr std::integral_constant<int, 1> k1;
  constexpr std::integral_constant<int, 2> k2;
  constexpr std::integral_constant<int, 4> k4;
  constexpr std::integral_constant<int, 8> k8;
  if constexpr (kStatistic == Statistic::kNone) {
    return try_spread(k1, k1);
  } else if constexpr (kParts & kResidual) {
    if constexpr (!kLayer) {
      if (try_spread(k1, k1)) return true;
    }
    return try_spread(k2, k1) || try_spread(k4, k1);
  } else if constexpr (kParts & kModulation) {
    if constexpr (!kLayer) {  // scale and shift are shared by the rows of a thread, or each row has its own
      if (try_spread(k2, k2) || try_spread(k4, k2)) return true;
    }
    return try_spread(k2, k1) || try_spread(k4, k1);
  } else {
    return try_spread(k2, k1) || try_spread(k4, k1) || try_spread(k8, k1);
  }
}

template <typename T, typename M, Statistic kStatistic, unsigned... kParts>
bool try_each(const NormParams& p, unsigned parts, const Plan& plan, cudaStream_t stream, cudaError_t* error) {
  return (try_fast<T, M, kStatistic, kParts>(p, parts, plan, stream, error) || ...);
}

// The sentences that models speak, each a kernel; any other goes to the general kernel.
template <typename T, typename M, Statistic kStatistic>
bool launch_known(const NormParams& p, unsigned parts, const Plan& plan, cudaStream_t stream, cudaError_t* error) {
  constexpr unsigned kGated = kResidual | kGate;
  if constexpr (kStatistic == Statistic::kNone) {
    return try_each<T, M, kStatistic, kResidual, kGated, kGated | kTables>(p, parts, plan, stream, error);
  } else if constexpr (kStatistic == Statistic::kRms) {
    return try_each<T, M, kStatistic, 0, kWeight, kModulation, kModulation | kTables, kSilu, kModulation | kSilu,
                    kResidual, kResidual | kWeight, kResidual | kModulation, kResidual | kModulation | kTables,
                    kGated | kModulation, kGated | kModulation | kTables>(p, parts, plan, stream, error);
  } else {
    return try_each<T, M, kStatistic, 0, kWeight, kWeight | kBias, kModulation, kModulation | kTables,
                    kWeight | kBias | kModulation, kResidual, kResidual | kWeight | kBias, kResidual | kModulation,
                    kResidual | kModulation | kTables, kGated | kModulation, kGated | kModulation | kTables>(
        p, parts, plan, stream, error);
  }
}

template <typename T, Statistic kStatistic>
cudaError_t launch(const NormParams& p, bool mixed, cudaStream_t stream) {
  const Has has = has_of(p);
  const int64_t row_vectors = ceil_div(p.rows.hidden, kVectorSize<T>);
  Plan plan;
  plan.spread = choose_spread(has, kStatistic, row_vectors);
  const auto config_of = [&](int blocks) {
    return row_launch(ceil_div(row_vectors, blocks), plan.spread.vectors, kBlockThreads);
  };
  plan.config = config_of(plan.spread.segments * plan.spread.pieces);
  if (plan.spread.segments > 1) plan.config.rows_per_block = 1;  // a cluster has one row

  bool known = false;
  const unsigned parts = parts_of(has, &known);
  bool same_dtype = !mixed, fp32 = !mixed, aligned = true;
  for (const Operand* operand : {&p.x, &p.residual, &p.y, &p.new_residual}) {
    aligned = aligned && (operand->data == nullptr || operand->vectorized);
  }
  for (const Operand* operand :
       {&p.weight, &p.bias, &p.scale, &p.scale_table, &p.shift, &p.shift_table, &p.gate, &p.gate_table}) {
    if (operand->data == nullptr) continue;
    aligned = aligned && operand->vectorized;
    same_dtype = same_dtype && operand->dtype == kDtype<T>;
    fp32 = fp32 && operand->dtype == Dtype::kFloat32;
    if (operand->strides[2] != 0) plan.spread.rows = 1;
  }
  const int64_t held = static_cast<int64_t>(plan.config.threads_per_row) * plan.spread.vectors * plan.spread.segments *
                       plan.spread.pieces;
  // 31 bits count rows and blocks.
  const bool numbered = p.rows.count() <= INT32_MAX / std::max(kMaxSegments, plan.spread.pieces);
  if (known && aligned && held >= row_vectors && p.rows.sizes[0] == 1 && numbered) {
    cudaError_t error = cudaSuccess;
    if (same_dtype && launch_known<T, T, kStatistic>(p, parts, plan, stream, &error)) return error;
    if constexpr (!std::is_same_v<T, float>) {
      if (fp32 && launch_known<T, float, kStatistic>(p, parts, plan, stream, &error)) return error;
    }
  }
  if (plan.spread.pieces > 1) plan.config = config_of(1);
  return launch_general<T, kStatistic>(p, plan, stream);
}

// mixed: x and the residual differ in dtype; T is float then.
template <typename T>
cudaError_t launch_norm(const NormParams& p, bool mixed, cudaStream_t stream) {
  switch (p.statistic) {
    case Statistic::kNone:
      return launch<T, Statistic::kNone>(p, mixed, stream);
    case Statistic::kRms:
      return launch<T, Statistic::kRms>(p, mixed, stream);
    default:
      return launch<T, Statistic::kLayer>(p, mixed, stream);
  }
}

}  // namespace ltx_kernels
