// Grouped products of float32 operands: plain fused multiply-adds, no TF32, so that float32 stays float32.
//
// A block of 256 threads computes 128 x 128 sums, a thread 8 x 8 of them: rows 4 t .. 4 t + 3 of each half of the
// tile, and columns alike. Sums are kept in two levels (a part of kFlush terms, then the total): the rounding error of
// one long float32 sum grows with the root of its length and would pass 1e-6 at a few thousand terms.
#pragma once

#include "cuda/policies.cuh"

namespace ruda {

constexpr int kFmaTile = 128;
constexpr int kFmaDepth = 8;
constexpr int kFmaPitch = kFmaTile + 4;
constexpr int kFlush = 128;
constexpr int kFmaPairWidth = 64;

constexpr int fma_shared_bytes() { return 2 * 2 * kFmaDepth * kFmaPitch * 4; }

// One thread's chunk of an operand's tile: four floats on their way from memory to shared memory.
template <bool KMajor, bool Vector>
struct FmaFetch {
  float values[4];

  RUDA_DEVICE static int mn() { return KMajor ? thread_index() / 2 : thread_index() % 32 * 4; }
  RUDA_DEVICE static int k() { return KMajor ? thread_index() % 2 * 4 : thread_index() / 32; }

  template <class Operand>
  RUDA_DEVICE void load(const Operand& operand, int64_t depth_begin) {
    const Chunk<float> chunk = operand(mn(), depth_begin + k());
    struct alignas(16) Four {
      float part[4];
    };
    if (Vector && chunk.count == 4) {
      const Four four = *reinterpret_cast<const Four*>(chunk.from);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = four.part[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = i < chunk.count ? chunk.from[i] : 0.0f;
  }

  RUDA_DEVICE void put(float* tile) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[(k() + (KMajor ? i : 0)) * kFmaPitch + mn() + (KMajor ? 0 : i)] = values[i];
  }
};

RUDA_DEVICE void fma_tile(const float* a_tile, const float* b_tile, float (&part)[8][8]) {
  const int row = thread_index() / 16 * 4, column = thread_index() % 16 * 4;
#pragma unroll
  for (int k = 0; k < kFmaDepth; ++k) {
    float a[8], b[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] = a_tile[k * kFmaPitch + i / 4 * 64 + row + i % 4];
      b[i] = b_tile[k * kFmaPitch + i / 4 * 64 + column + i % 4];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) part[i][j] += a[i] * b[j];
  }
}

RUDA_DEVICE void flush(float (&part)[8][8], float (&sums)[8][8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sums[i][j] += part[i][j];
      part[i][j] = 0.0f;
    }
}

template <bool AKMajor, bool BKMajor, bool Vector, class Policy>
RUDA_DEVICE void fma_products(const Policy& policy, float (&sums)[8][8]) {
  float* memory = reinterpret_cast<float*>(shared_memory());
  constexpr int kTile = kFmaDepth * kFmaPitch;
  const auto a = [&](int mn, int64_t k) { return policy.a(mn, k); };
  const auto b = [&](int mn, int64_t k) { return policy.b(mn, k); };
  const int64_t steps = (policy.depth() + kFmaDepth - 1) / kFmaDepth;
  FmaFetch<AKMajor, Vector> next_a;
  FmaFetch<BKMajor, Vector> next_b;
  float part[8][8] = {};
  if (steps > 0) next_a.load(a, 0), next_b.load(b, 0);
  for (int64_t step = 0; step < steps; ++step) {
    float* tile = memory + step % 2 * 2 * kTile;
    next_a.put(tile);
    next_b.put(tile + kTile);
    sync_threads();  // two tiles in turn: the other one is free once all have passed here
    if (step + 1 < steps) next_a.load(a, (step + 1) * kFmaDepth), next_b.load(b, (step + 1) * kFmaDepth);
    fma_tile(tile, tile + kTile, part);
    if ((step + 1) % (kFlush / kFmaDepth) == 0) flush(part, sums);
  }
  flush(part, sums);
}

template <bool Dual, class Policy>
RUDA_DEVICE void fma_hand_over(const Policy& policy, int64_t rows, int64_t first_column, const float (&sums)[8][8]) {
  const int64_t column = first_column + thread_index() % 16 * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i / 4 * 64 + thread_index() / 16 * 4 + i % 4;
    if (row >= rows) continue;
    if constexpr (Dual) {
      policy.template put_pair<4>(row, column, &sums[i][0], &sums[i][4]);
    } else {
      policy.template put<4>(row, column, &sums[i][0]);
      policy.template put<4>(row, column + 64, &sums[i][4]);
    }
  }
}

template <bool Vector, class Policy>
RUDA_KERNEL(kThreads) fma_row_product(Policy policy) {
  constexpr int kWide = Policy::kDual ? kFmaTile / 2 : kFmaTile;
  const int64_t column_tiles = (policy.columns() + kWide - 1) / kWide;
  const int64_t row_tiles = policy.starts[policy.experts];
  if (block_index() >= row_tiles * column_tiles) return;
  const Position position = place(block_index(), row_tiles, column_tiles, 8);
  policy.enter(locate(policy.offsets, policy.starts, policy.experts, kFmaTile, position.row_tile),
               position.column_tile * kWide);
  float sums[8][8] = {};
  fma_products<true, Policy::kBKMajor, Vector>(policy, sums);
  fma_hand_over<Policy::kDual>(policy, policy.rows, policy.column, sums);
}

template <bool Vector>
RUDA_KERNEL(kThreads) fma_weight_product(WeightGradient<float> policy) {
  const int64_t column_tiles = (policy.width + kFmaTile - 1) / kFmaTile;
  const int64_t row_tiles = (policy.height + kFmaTile - 1) / kFmaTile;
  const int64_t tile = block_index() % (row_tiles * column_tiles);
  const Position position = place(tile, row_tiles, column_tiles, 8);
  policy.enter(block_index() / (row_tiles * column_tiles), position.row_tile * kFmaTile,
               position.column_tile * kFmaTile);
  float sums[8][8] = {};
  fma_products<false, false, Vector>(policy, sums);
  fma_hand_over<false>(policy, policy.height - policy.row, policy.column, sums);
}

}  // namespace ruda
