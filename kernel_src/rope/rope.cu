// The launch of the RoPE core (rope.cuh): how rows are spread over threads and blocks, and what fits in shared memory.
#include "rope.cuh"

#include <algorithm>

#include "../core/dispatch.cuh"

namespace ltx_kernels {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kBlockBytes = 16 * 1024;  // of x, so that several blocks share an SM
constexpr int kUnitsPerThread = 4;      // of short rows
constexpr int kBytesPerThread = 128;    // of long ones
constexpr int kSegmentBytes = 64;       // that neighbouring threads read at least

int power_of_two(int64_t at_least) {
  int power = 1;
  while (power < at_least) power *= 2;
  return power;
}

// Short rows go to a part of a warp, long ones to whole warps: what comes with a row costs a thread as much as a unit
// or two.
int threads_per_row(int64_t units, int64_t row_bytes, int vector_bytes) {
  if (units > kUnitsPerThread * kWarpSize) {
    return static_cast<int>(
        std::min<int64_t>(kMaxThreadsPerRow, ceil_div(ceil_div(row_bytes, kBytesPerThread), kWarpSize) * kWarpSize));
  }
  return std::max(power_of_two(ceil_div(units, kUnitsPerThread)),
                  std::min(power_of_two(units), kSegmentBytes / vector_bytes));
}

// Dynamic shared memory: tables, rows, and a place a thread for what is not staged.
template <typename Unit>
int64_t shared_bytes(const RopeParams& p, RopeLaunch* launch) {
  launch->items_per_block = static_cast<int>(launch->tokens_per_block.value) * launch->batches_per_block;
  const int64_t threads = static_cast<int64_t>(launch->threads_per_row) * launch->rows_at_once;
  const int64_t table_floats = 2 * static_cast<int64_t>(p.table_count) * launch->tokens_per_block.value *
                               launch->table_heads * launch->table_pairs;
  const int64_t own_floats = p.table_count > 0 ? 2 * threads * Unit::kPairs : 0;
  const int64_t row_vectors =
      static_cast<int64_t>(launch->items_per_block) * launch->rows_per_token.value * launch->row_stride;
  const int64_t vectors = launch->rows_staged ? row_vectors : threads * Unit::kParts;
  launch->own_tables = static_cast<int>(vectors);
  return vectors * Unit::kBytes +
         (launch->table_staged ? table_floats : own_floats) * static_cast<int64_t>(sizeof(float));
}

template <typename Unit>
RopeLaunch rope_launch(const RopeParams& p) {
  const int64_t half = p.rotary_dim / 2;
  RopeLaunch launch{};
  launch.rotary_units = Unit::kParts == 1 ? 0 : static_cast<int>(ceil_div(half, Unit::kSize));
  const int64_t rest = p.head_size - (Unit::kParts == 1 ? 0 : 2 * half);
  launch.units_per_head = SmallDivisor(launch.rotary_units + ceil_div(rest, Unit::kParts * Unit::kSize));
  int64_t row_heads = 1;
  int64_t rows_per_token = 0;
  for (const RopeSide& side : p.sides) {
    if (side.x.data == nullptr) continue;
    rows_per_token += p.across_heads ? 1 : side.heads;
    if (&side == p.sides) launch.q_rows = static_cast<int>(rows_per_token);
    if (p.across_heads) row_heads = std::max(row_heads, side.heads);
  }
  launch.rows_per_token = SmallDivisor(rows_per_token);
  const int64_t units = launch.units_per_head.value * row_heads;
  launch.row_vectors = static_cast<int>(units * Unit::kParts);
  launch.threads_per_row = threads_per_row(units, launch.row_vectors * Unit::kBytes, Unit::kBytes);
  launch.step_heads = launch.threads_per_row / static_cast<int>(launch.units_per_head.value);
  launch.step_units = launch.threads_per_row % static_cast<int>(launch.units_per_head.value);
  // Where a few threads a row read the same columns of several rows at once, these lie in different banks.
  constexpr int kBanksBytes = 128;
  launch.row_stride = launch.row_vectors;
  if (launch.threads_per_row * Unit::kBytes < kBanksBytes && launch.row_vectors * Unit::kBytes % kBanksBytes == 0) {
    launch.row_stride += launch.threads_per_row;
  }

  bool shares_long_table = p.table_count > 0;
  for (int i = 0; i < p.table_count; ++i) {
    launch.table_heads = std::max(launch.table_heads, static_cast<int>(p.tables[i].heads));
    shares_long_table =
        shares_long_table && p.tables[i].strides[0] == 0 && (p.tables[i].heads > 1 || p.sides[0].heads == 1);
  }
  launch.table_staged = p.table_count > 0;
  launch.rows_staged = true;
  // Two batches in a block where they share a table as long as a row. The L2 would serve the second as well, but its
  // bandwidth is the next limit behind the memory's.
  launch.batches_per_block = shares_long_table && p.batch > 1 ? 2 : 1;

  const int64_t item_rows = rows_per_token * launch.batches_per_block;
  const int64_t tokens = std::max<int64_t>(1, kBlockBytes / (item_rows * launch.row_vectors * Unit::kBytes));
  launch.tokens_per_block = SmallDivisor(tokens);
  // As few threads as finish the rows in the same number of turns, in whole warps.
  const int64_t most_rows = std::max(1, kBlockThreads / launch.threads_per_row);
  const int64_t rows = item_rows * tokens;
  launch.rows_at_once = static_cast<int>(ceil_div(rows, ceil_div(rows, most_rows)));
  while (launch.rows_at_once * launch.threads_per_row % kWarpSize != 0) ++launch.rows_at_once;

  launch.table_pairs = static_cast<int>(ceil_div(half, kTableChunk) * kTableChunk);
  bool heads_follow = half % kTableChunk == 0;
  for (int i = 0; i < p.table_count; ++i) {
    const RopeTable& table = p.tables[i];
    heads_follow = heads_follow && table.vectorized && table.heads == launch.table_heads &&
                   (table.heads == 1 || table.strides[2] == half * table.pair_stride);
  }
  launch.table_runs = SmallDivisor(heads_follow || p.table_count == 0 ? 1 : launch.table_heads);
  const int64_t run_pairs = launch.table_heads * launch.table_pairs / static_cast<int64_t>(launch.table_runs.value);
  launch.run_chunks = SmallDivisor(std::max<int64_t>(1, run_pairs / kTableChunk));
  const int block_threads = launch.threads_per_row * launch.rows_at_once;
  launch.step_runs = block_threads / static_cast<int>(launch.run_chunks.value);
  launch.step_chunks = block_threads % static_cast<int>(launch.run_chunks.value);
  return launch;
}

template <typename T>
bool is_whole(const Operand& operand) {
  return operand.data == nullptr ||
         (operand.vectorized && (operand.dtype == kDtype<T> || operand.dtype == Dtype::kFloat32));
}

// Whether the kernel that counts no elements will do. It takes the same sums in the same order.
template <typename T, typename Unit>
bool is_whole(const RopeParams& p) {
  bool whole = p.head_size % Unit::kSize == 0 && p.rotary_dim % (Unit::kParts * Unit::kSize) == 0;
  if (Unit::kParts > 1) whole = whole && p.head_size % (Unit::kParts * Unit::kSize) == 0;
  for (const RopeSide& side : p.sides) {
    whole = whole && is_whole<T>(side.x) && is_whole<T>(side.y) && is_whole<T>(side.weight) && is_whole<T>(side.bias);
  }
  return whole;
}

template <typename T, bool kInterleaved, bool kWhole>
cudaError_t start(const RopeParams& p, RopeLaunch launch, cudaStream_t stream) {
  using Unit = RopeUnit<T, kInterleaved, kWhole>;
  const auto kernel = rope_kernel<T, kInterleaved, kWhole>;
  // What the chip's shared memory cannot hold is read again from memory: the second batch goes first, then the rows,
  // then the tables.
  int64_t bytes = 0;
  for (;;) {
    bytes = shared_bytes<Unit>(p, &launch);
    int fits = 1;
    if (const cudaError_t error = allow_shared_memory(kernel, bytes, &fits); error != cudaSuccess) return error;
    if (fits) break;
    if (launch.batches_per_block > 1) {
      launch.batches_per_block = 1;
    } else if (kWhole) {
      return start<T, kInterleaved, false>(p, launch, stream);
    } else if (launch.rows_staged) {
      launch.rows_staged = false;
    } else if (launch.table_staged) {
      launch.table_staged = false;
    } else {
      return cudaErrorInvalidConfiguration;
    }
  }
  const int64_t tokens = std::max(p.sides[0].tokens, p.sides[1].tokens);
  const int64_t blocks = ceil_div(tokens, launch.tokens_per_block.value) * ceil_div(p.batch, launch.batches_per_block);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 threads(launch.threads_per_row, launch.rows_at_once);
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(p, launch);
  return cudaGetLastError();
}

template <typename T, bool kInterleaved>
cudaError_t launch_rope(const RopeParams& p, cudaStream_t stream) {
  using Unit = RopeUnit<T, kInterleaved, true>;
  RopeLaunch launch = rope_launch<Unit>(p);
  // A second batch is not worth an SM of one block, in which nothing is loaded while the block computes.
  if (launch.batches_per_block > 1 && shared_bytes<Unit>(p, &launch) > 96 * 1024) launch.batches_per_block = 1;
  if (is_whole<T, Unit>(p)) return start<T, kInterleaved, true>(p, launch, stream);
  return start<T, kInterleaved, false>(p, launch, stream);
}

template <typename T>
cudaError_t launch_rope(const RopeParams& p, cudaStream_t stream) {
  return p.interleaved ? launch_rope<T, true>(p, stream) : launch_rope<T, false>(p, stream);
}

}  // namespace

int rope_cuda(const RopeParams& p, void* stream) {
  const Operand& x = p.sides[0].x.data != nullptr ? p.sides[0].x : p.sides[1].x;
  return dispatch(x.dtype,
                  [&](auto value) { return launch_rope<decltype(value)>(p, static_cast<cudaStream_t>(stream)); });
}

}  // namespace ltx_kernels
