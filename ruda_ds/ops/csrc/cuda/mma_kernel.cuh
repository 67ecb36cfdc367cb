// Grouped products of 16-bit operands by tensor cores: mma.m16n8k16 with float32 sums, four tiles in flight.
//
// A block computes Rows x 128 sums. Eight warps: two by rows, four by columns; a warp holds Rows / 2 x 32 of them.
#pragma once

#include "cuda/policies.cuh"

namespace ruda {

template <int Rows>
constexpr int shared_bytes() {
  return kStages * (Rows + kColumns) * kDepth * 2;
}

// One operand's tile of a stage: starts the copies of all its chunks. KMajor: [Width][kDepth], else [kDepth][Width].
template <class T, int Width, bool KMajor, bool Vector, class Operand>
RUDA_DEVICE void fetch(const Operand& operand, int64_t depth_begin, T* tile) {
  constexpr int kAcross = KMajor ? kDepth / kChunk : Width / kChunk;
  constexpr int kTotal = Width * kDepth / kChunk;
#pragma unroll
  for (int first = 0; first < kTotal; first += kThreads) {
    const int index = first + thread_index();
    if (kTotal % kThreads != 0 && index >= kTotal) break;
    const int line = index / kAcross, across = index % kAcross;
    const int mn = KMajor ? line : across * kChunk;
    const int k = KMajor ? across * kChunk : line;
    const Chunk<T> chunk = operand(mn, depth_begin + k);
    T* to = tile + (KMajor ? k_major(line, across) : mn_major(line, across, Width));
    if (Vector) {
      copy_async(to, chunk.from, chunk.count * static_cast<int>(sizeof(T)));
      continue;
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i < chunk.count) to[i] = chunk.from[i];
      else from_float(to[i], 0.0f);
    }
  }
}

// Fragments of A for 16 rows from `mn` on, at depth `k` of the tile.
template <class T, int Width, bool KMajor>
RUDA_DEVICE void fragment_a(uint32_t (&to)[4], const T* tile, int mn, int k) {
  const int lane = thread_index() % 32;
  const Address at = KMajor ? lane_a_k_major(lane) : lane_a_mn_major(lane);
  if (KMajor) load_matrices(to, tile + k_major(mn + at.mn, (k + at.k) / kChunk));
  else load_matrices_transposed(to, tile + mn_major(k + at.k, (mn + at.mn) / kChunk, Width));
}

// Fragments of B for two times 8 columns from `mn` on: to[0], to[1] of the first eight, to[2], to[3] of the others.
template <class T, bool KMajor>
RUDA_DEVICE void fragment_b(uint32_t (&to)[4], const T* tile, int mn, int k) {
  const int lane = thread_index() % 32;
  const Address at = KMajor ? lane_b_k_major(lane) : lane_b_mn_major(lane);
  if (KMajor) load_matrices(to, tile + k_major(mn + at.mn, (k + at.k) / kChunk));
  else load_matrices_transposed(to, tile + mn_major(k + at.k, (mn + at.mn) / kChunk, kColumns));
}

// The products of one stage.
template <class T, int Rows, bool AKMajor, bool BKMajor>
RUDA_DEVICE void multiply_tile(const T* a_tile, const T* b_tile, float (&sums)[Rows / 32][4][4]) {
  const int warp = thread_index() / 32;
  const int row = warp / kWarpColumns * (Rows / kWarpRows), column = warp % kWarpColumns * (kColumns / kWarpColumns);
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t b[2][4];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) fragment_b<T, BKMajor>(b[pair], b_tile, column + pair * 16, k);
#pragma unroll
    for (int block = 0; block < Rows / 32; ++block) {
      uint32_t a[4];
      fragment_a<T, Rows, AKMajor>(a, a_tile, row + block * 16, k);
#pragma unroll
      for (int part = 0; part < 4; ++part)
        multiply(sums[block][part], a, b[part / 2][part % 2 * 2], b[part / 2][part % 2 * 2 + 1], T{});
    }
  }
}

// All products of a block's tile.
template <class T, int Rows, bool AKMajor, bool BKMajor, bool Vector, class Policy>
RUDA_DEVICE void sum_products(const Policy& policy, float (&sums)[Rows / 32][4][4]) {
  T* memory = reinterpret_cast<T*>(shared_memory());
  constexpr int kStage = (Rows + kColumns) * kDepth;
  const auto a = [&](int mn, int64_t k) { return policy.a(mn, k); };
  const auto b = [&](int mn, int64_t k) { return policy.b(mn, k); };
  const int64_t steps = (policy.depth() + kDepth - 1) / kDepth;
  const auto start = [&](int64_t step) {
    if (step < steps) {
      T* stage = memory + step % kStages * kStage;
      fetch<T, Rows, AKMajor, Vector>(a, step * kDepth, stage);
      fetch<T, kColumns, BKMajor, Vector>(b, step * kDepth, stage + Rows * kDepth);
    }
    commit_copies();  // an empty group where there is no step, so that counting groups counts steps
  };
  for (int step = 0; step < kStages - 1; ++step) start(step);
  for (int64_t step = 0; step < steps; ++step) {
    await_copies<kStages - 2>();
    sync_threads();  // this step's tile has come for all, and all are done with the one that is now overwritten
    start(step + kStages - 1);
    const T* stage = memory + step % kStages * kStage;
    multiply_tile<T, Rows, AKMajor, BKMajor>(stage, stage + Rows * kDepth, sums);
  }
}

// Hands the sums over: a lane has two neighbouring columns of rows g and g + 8 of each 16 x 8 block, g = lane / 4.
template <int Rows, bool Dual, class Policy>
RUDA_DEVICE void hand_over(const Policy& policy, int64_t rows, int64_t first_column, float (&sums)[Rows / 32][4][4]) {
  const int lane = thread_index() % 32, warp = thread_index() / 32;
  const int warp_row = warp / kWarpColumns * (Rows / kWarpRows) + lane / 4;
  constexpr int kWide = kColumns / kWarpColumns / (Dual ? 2 : 1);
  const int64_t column = first_column + warp % kWarpColumns * kWide + lane % 4 * 2;
#pragma unroll
  for (int block = 0; block < Rows / 32; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + block * 16 + half * 8;
      if (row >= rows) continue;
#pragma unroll
      for (int part = 0; part < (Dual ? 2 : 4); ++part) {
        const float values[2] = {sums[block][part][half * 2], sums[block][part][half * 2 + 1]};
        if constexpr (Dual) {
          const float others[2] = {sums[block][part + 2][half * 2], sums[block][part + 2][half * 2 + 1]};
          policy.template put_pair<2>(row, column + part * 8, values, others);
        } else {
          policy.template put<2>(row, column + part * 8, values);
        }
      }
    }
  }
}

// A product over row tiles. Launched with as many blocks as there can be tiles; those too many return.
template <class T, int Rows, bool Vector, class Policy>
RUDA_KERNEL(kThreads) row_product(Policy policy) {
  constexpr int kWide = Policy::kDual ? kColumns / 2 : kColumns;
  const int64_t column_tiles = (policy.columns() + kWide - 1) / kWide;
  const int64_t row_tiles = policy.starts[policy.experts];
  if (block_index() >= row_tiles * column_tiles) return;
  const Position position = place(block_index(), row_tiles, column_tiles, 8);
  policy.enter(locate(policy.offsets, policy.starts, policy.experts, Rows, position.row_tile),
               position.column_tile * kWide);
  float sums[Rows / 32][4][4] = {};
  sum_products<T, Rows, true, Policy::kBKMajor, Vector>(policy, sums);
  hand_over<Rows, Policy::kDual>(policy, policy.rows, policy.column, sums);
}

// Weight gradients: a block for each 128 x 128 of each expert's; an empty expert's is written as zeros.
template <class T, bool Vector>
RUDA_KERNEL(kThreads) weight_product(WeightGradient<T> policy) {
  const int64_t column_tiles = (policy.width + kColumns - 1) / kColumns;
  const int64_t row_tiles = (policy.height + 127) / 128;
  const int64_t tile = block_index() % (row_tiles * column_tiles);
  const Position position = place(tile, row_tiles, column_tiles, 8);
  policy.enter(block_index() / (row_tiles * column_tiles), position.row_tile * 128, position.column_tile * kColumns);
  float sums[4][4][4] = {};
  sum_products<T, 128, false, false, Vector>(policy, sums);
  hand_over<128, false>(policy, policy.height - policy.row, policy.column, sums);
}

}  // namespace ruda
