// csrc/common with C names for the tests.
#include "common/layout.h"
#include "common/schedule.h"

extern "C" {

int64_t ruda_tile_bound(int64_t rows, int64_t experts, int64_t tile_rows) {
  return ruda::tile_bound(rows, experts, tile_rows);
}
void ruda_fill_starts(const int64_t* offsets, int experts, int64_t tile_rows, int32_t* starts) {
  ruda::fill_starts(offsets, experts, tile_rows, starts);
}
void ruda_locate(const int64_t* offsets, const int32_t* starts, int experts, int64_t tile_rows, int64_t tile,
                 int64_t* found) {
  const ruda::RowTile at = ruda::locate(offsets, starts, experts, tile_rows, tile);
  found[0] = at.expert, found[1] = at.begin, found[2] = at.end;
}
void ruda_place(int64_t index, int64_t row_tiles, int64_t column_tiles, int64_t band, int64_t* found) {
  const ruda::Position at = ruda::place(index, row_tiles, column_tiles, band);
  found[0] = at.row_tile, found[1] = at.column_tile;
}
int ruda_k_major(int mn, int chunk) { return ruda::k_major(mn, chunk); }
int ruda_mn_major(int k, int chunk, int width) { return ruda::mn_major(k, chunk, width); }
void ruda_pair_column(int j, int width, int* found) {
  const ruda::PairColumn at = ruda::pair_column(j, width);
  found[0] = at.second, found[1] = at.column;
}

}  // extern "C"
