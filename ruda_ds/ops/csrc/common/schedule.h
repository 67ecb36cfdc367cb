// Which rows of which expert a tile works on. Plain C++: the kernels use it on the card, the tests on the CPU.
//
// Letters: R rows sorted by expert, L experts; expert e has rows offsets[e] .. offsets[e + 1] - 1. A tile never holds
// rows of two experts. offsets lie on the card, so the host knows R and L only: it launches as many tiles as there can
// be at most, and those past the end return.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RUDA_HD __host__ __device__ __forceinline__
#else
#define RUDA_HD inline
#endif

namespace ruda {

// Most row tiles that R rows of L experts can fill: every expert that can be non-empty begins a tile of its own.
RUDA_HD int64_t tile_bound(int64_t rows, int64_t experts, int64_t tile_rows) {
  const int64_t begun = experts < rows ? experts : rows;
  return begun + (rows - begun) / tile_rows;
}

RUDA_HD int32_t tiles_of(int64_t rows, int64_t tile_rows) {
  return rows > 0 ? static_cast<int32_t>((rows + tile_rows - 1) / tile_rows) : 0;
}

// Row tiles before an expert, for all of them: starts [L + 1], starts[L] is their number.
RUDA_HD void fill_starts(const int64_t* offsets, int experts, int64_t tile_rows, int32_t* starts) {
  starts[0] = 0;
  for (int e = 0; e < experts; ++e) starts[e + 1] = starts[e] + tiles_of(offsets[e + 1] - offsets[e], tile_rows);
}

// Rows [begin, end) of one expert; expert is -1 where there is no such tile.
struct RowTile {
  int expert;
  int64_t begin;
  int64_t end;
};

RUDA_HD RowTile locate(const int64_t* offsets, const int32_t* starts, int experts, int64_t tile_rows, int64_t tile) {
  if (experts == 0 || tile >= starts[experts]) return {-1, 0, 0};
  // The last expert whose tiles begin at or before this one; starts[e] == starts[e + 1] for an empty expert.
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] <= tile) low = middle; else high = middle - 1;
  }
  const int64_t begin = offsets[low] + (tile - starts[low]) * tile_rows;
  const int64_t end = begin + tile_rows < offsets[low + 1] ? begin + tile_rows : offsets[low + 1];
  return {low, begin, end};
}

struct Position {
  int64_t row_tile;
  int64_t column_tile;
};

// Order of the tiles: bands of `band` row tiles, all columns of a band before the next one, so that blocks that run
// at the same time share rows and weights in the cache.
RUDA_HD Position place(int64_t index, int64_t row_tiles, int64_t column_tiles, int64_t band) {
  const int64_t full = band * column_tiles;
  const int64_t first = index / full * band;
  const int64_t height = row_tiles - first < band ? row_tiles - first : band;
  const int64_t inside = index % full;
  return {first + inside % height, inside / height};
}

}  // namespace ruda
