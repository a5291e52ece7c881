// The launch of the row-norm core (norm.cuh): which kernel, and how many vectors and rows a thread has. Each dtype is a source of its own,
// so that they compile in parallel.
#pragma once

#include "norm.cuh"

namespace ltx_kernels {

// Vectors a thread, by the length of the row in vectors: tuning as data. Measured on an H200 in bf16; more threads than vectors ask for are
// waste, fewer leave too little in flight.
struct Tuning {
  int64_t longest_row;
  int vectors;
};
constexpr Tuning kPlain[] = {{384, 2}, {2048, 4}, {4096, 8}, {8192, 16}};
constexpr Tuning kModulated[] = {{256, 1}, {1024, 2}, {2048, 4}};  // scale and shift in registers, for several rows
constexpr Tuning kWithResidual[] = {{1024, 2}, {2048, 4}};         // two rows to hold

// How many rows a thread has at a time where they share scale and shift: 4 with 1 vector, 2 with more.
constexpr int shared_rows(int vectors) { return vectors == 1 ? 4 : 2; }

template <size_t kCount>
int choose_vectors(const Tuning (&table)[kCount], int64_t row_vectors) {
  for (const Tuning& tuning : table) {
    if (row_vectors <= tuning.longest_row) return tuning.vectors;
  }
  return table[kCount - 1].vectors;
}

inline unsigned parts_of(const Has& has, bool* known) {
  // Parts that only come together in the fast kernels.
  *known = has.scale == has.shift && has.scale_table == has.shift_table && (!has.gate || !has.scale || has.gate_table == has.scale_table);
  const bool tables = has.scale_table || has.gate_table;
  return (has.weight ? kWeight : 0u) | (has.bias ? kBias : 0u) | (has.scale ? kModulation : 0u) | (tables ? kTables : 0u) |
         (has.residual ? kResidual : 0u) | (has.gate ? kGate : 0u) | (has.silu ? kSilu : 0u);
}

template <typename T, typename M, Statistic kStatistic, unsigned kParts, int kVecs, int kRows>
cudaError_t launch_fast(const NormParams& p, const RowLaunch& config, cudaStream_t stream) {
  const int64_t chunks = ceil_div(p.rows.sizes[2], static_cast<int64_t>(config.rows_per_block) * kRows);
  const dim3 threads(config.threads_per_row, config.rows_per_block);
  norm_fast_kernel<T, M, kStatistic, kParts, kVecs, kRows>
      <<<static_cast<unsigned>(chunks * p.rows.sizes[1]), threads, 0, stream>>>(p, static_cast<unsigned>(chunks));
  return cudaGetLastError();
}

template <typename T, Statistic kStatistic>
cudaError_t launch_general(const NormParams& p, const RowLaunch& config, cudaStream_t stream) {
  const dim3 threads(config.threads_per_row, config.rows_per_block);
  norm_general_kernel<T, kStatistic><<<static_cast<unsigned>(ceil_div(p.rows.count(), config.rows_per_block)), threads, 0, stream>>>(p);
  return cudaGetLastError();
}

struct Plan {
  RowLaunch config;
  int vectors;
  bool shared_modulation;  // every row of an outer index has the same scale and shift
};

// Launches the fast kernel of these parts; false where there is none for this many vectors.
template <typename T, typename M, Statistic kStatistic, unsigned kParts>
bool try_fast(const NormParams& p, unsigned parts, const Plan& plan, cudaStream_t stream, cudaError_t* error) {
  if (parts != kParts) return false;
  const auto try_vectors = [&](auto vectors) {
    constexpr int kVecs = decltype(vectors)::value;
    if (plan.vectors != kVecs) return false;
    if constexpr (kParts & kModulation && !(kParts & kResidual)) {
      if (plan.shared_modulation) {
        *error = launch_fast<T, M, kStatistic, kParts, kVecs, shared_rows(kVecs)>(p, plan.config, stream);
        return true;
      }
    }
    *error = launch_fast<T, M, kStatistic, kParts, kVecs, 1>(p, plan.config, stream);
    return true;
  };
  const auto try_each = [&](auto... vectors) { return (try_vectors(vectors) || ...); };
  using std::integral_constant;
  if constexpr (kParts & kResidual) {
    return try_each(integral_constant<int, 2>{}, integral_constant<int, 4>{});
  } else if constexpr (kParts & kModulation) {
    return try_each(integral_constant<int, 1>{}, integral_constant<int, 2>{}, integral_constant<int, 4>{});
  } else {
    return try_each(integral_constant<int, 2>{}, integral_constant<int, 4>{}, integral_constant<int, 8>{}, integral_constant<int, 16>{});
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
    return try_each<T, M, kStatistic, 0, kWeight, kModulation, kModulation | kTables, kSilu, kModulation | kSilu, kResidual,
                    kResidual | kWeight, kResidual | kModulation, kResidual | kModulation | kTables, kGated | kModulation,
                    kGated | kModulation | kTables>(p, parts, plan, stream, error);
  } else {
    return try_each<T, M, kStatistic, 0, kWeight, kWeight | kBias, kModulation, kModulation | kTables, kWeight | kBias | kModulation,
                    kResidual, kResidual | kWeight | kBias, kResidual | kModulation, kResidual | kModulation | kTables, kGated | kModulation,
                    kGated | kModulation | kTables>(p, parts, plan, stream, error);
  }
}

template <typename T, Statistic kStatistic>
cudaError_t launch(const NormParams& p, bool mixed, cudaStream_t stream) {
  const Has has = has_of(p);
  const int64_t row_vectors = ceil_div(p.rows.hidden, kVectorSize<T>);
  Plan plan;
  plan.vectors = has.residual ? choose_vectors(kWithResidual, row_vectors)
                              : (has.scale ? choose_vectors(kModulated, row_vectors) : choose_vectors(kPlain, row_vectors));
  plan.config = row_launch(row_vectors, plan.vectors, /*block_threads=*/128);
  plan.shared_modulation = true;

  bool known = false;
  const unsigned parts = parts_of(has, &known);
  bool same_dtype = !mixed, fp32 = !mixed, aligned = true;
  for (const Operand* operand : {&p.x, &p.residual, &p.y, &p.new_residual}) {
    aligned = aligned && (operand->data == nullptr || operand->vectorized);
  }
  for (const Operand* operand : {&p.weight, &p.bias, &p.scale, &p.scale_table, &p.shift, &p.shift_table, &p.gate, &p.gate_table}) {
    if (operand->data == nullptr) continue;
    aligned = aligned && operand->vectorized;
    same_dtype = same_dtype && operand->dtype == kDtype<T>;
    fp32 = fp32 && operand->dtype == Dtype::kFloat32;
    plan.shared_modulation = plan.shared_modulation && operand->strides[2] == 0;
  }
  const bool fits = static_cast<int64_t>(plan.config.threads_per_row) * plan.vectors >= row_vectors;
  if (known && aligned && fits && p.rows.sizes[0] == 1) {
    cudaError_t error = cudaSuccess;
    if (same_dtype && launch_known<T, T, kStatistic>(p, parts, plan, stream, &error)) return error;
    if constexpr (!std::is_same_v<T, float>) {
      if (fp32 && launch_known<T, float, kStatistic>(p, parts, plan, stream, &error)) return error;
    }
  }
  return launch_general<T, kStatistic>(p, plan.config, stream);
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
