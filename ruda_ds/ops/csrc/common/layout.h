// Where the elements of a tile lie in shared memory, and which of them each lane of a warp asks ldmatrix for.
// Plain C++. A chunk is 16 bytes, 8 elements of 16 bits: the unit of cp.async and of a row of ldmatrix.
//
// Two layouts, both free of bank conflicts for the eight addresses of an ldmatrix phase:
//   K-major:  [mn][kDepth], for an operand whose K is contiguous in memory;
//   MN-major: [k][width], for one whose rows or columns are contiguous; ldmatrix transposes it.
#pragma once

#include "common/schedule.h"

namespace ruda {

constexpr int kDepth = 32;        // K of a tile
constexpr int kChunk = 8;         // elements of 16 bits in 16 bytes
constexpr int kColumns = 128;     // columns of a tile
constexpr int kStages = 4;        // tiles in flight
constexpr int kThreads = 256;     // eight warps: two by rows, four by columns
constexpr int kWarpRows = 2;
constexpr int kWarpColumns = 4;
constexpr int kPairWidth = 16;    // gate and up columns alternate in groups of this many, so that a lane has both

// Element offset of chunk `chunk` of row `mn` in a K-major tile: two rows of 64 bytes fill one line of the banks.
RUDA_HD int k_major(int mn, int chunk) { return mn * kDepth + (chunk ^ ((mn >> 1) & 3)) * kChunk; }

// The same in an MN-major tile of `width` (128 elements: rows of 256 bytes).
RUDA_HD int mn_major(int k, int chunk, int width) { return k * width + (chunk ^ (k & 7)) * kChunk; }

struct Address {
  int mn;
  int k;
};

// First element that a lane addresses in an ldmatrix.x4, relative to the fragment: A is 16 x 16 (m, k), the pair of B
// fragments 16 x 16 (n, k). The four 8 x 8 matrices come in the order in which mma.m16n8k16 takes their registers.
RUDA_HD Address lane_a_k_major(int lane) { return {lane & 15, (lane >> 4) * 8}; }
RUDA_HD Address lane_a_mn_major(int lane) { return {((lane >> 3) & 1) * 8, (lane & 7) + (lane >> 4) * 8}; }
RUDA_HD Address lane_b_k_major(int lane) { return {(lane & 7) + (lane >> 4) * 8, ((lane >> 3) & 1) * 8}; }
RUDA_HD Address lane_b_mn_major(int lane) { return {(lane >> 4) * 8, lane & 15}; }

// Column and operand of row `j` of a tile that holds gate and up columns in turn, `width` of each.
struct PairColumn {
  bool second;
  int column;
};

RUDA_HD PairColumn pair_column(int j, int width) {
  return {(j / width) % 2 == 1, j / (2 * width) * width + j % width};
}

}  // namespace ruda
