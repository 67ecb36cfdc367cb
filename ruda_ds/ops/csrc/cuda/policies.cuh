// The five grouped products: where a tile's operands come from, and what becomes of its sums.
//
// Letters: R rows, L experts, H hidden width, F expert width; rows [R, H], gate and up [L, F, H], down [L, H, F],
// preactivation [R, 2 F] (gate first), all contiguous. A policy gives a kernel:
//   a(mn, k), b(mn, k)  the 16 bytes that begin at this element of an operand's tile, along the operand's contiguous
//                       dimension, and how many of its elements exist (the others count as zero);
//   depth()             length of the sum;
//   put(...)            takes finished sums of neighbouring columns.
#pragma once

#include "cuda/swiglu.cuh"

namespace ruda {

template <class T>
struct Chunk {
  const T* from;
  int count;
};

template <class T>
RUDA_DEVICE Chunk<T> chunk_of(const T* from, bool exists, int64_t left) {
  constexpr int kMost = 16 / sizeof(T);
  return {from, !exists || left <= 0 ? 0 : left < kMost ? static_cast<int>(left) : kMost};
}

// Stores N neighbouring values, those below `left`; N values of 16 bits in one word where the address allows it.
template <int N, class T>
RUDA_DEVICE void store(T* to, const float* values, int64_t left) {
  struct alignas(N * sizeof(T)) Word {
    T part[N];
  };
  if (left >= N && reinterpret_cast<uintptr_t>(to) % sizeof(Word) == 0) {
    Word word;
#pragma unroll
    for (int i = 0; i < N; ++i) from_float(word.part[i], values[i]);
    *reinterpret_cast<Word*>(to) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i < left) from_float(to[i], values[i]);
}

// Loads N neighbouring values, zeros from `left` on.
template <int N, class T>
RUDA_DEVICE void load(float (&to)[N], const T* from, int64_t left) {
  struct alignas(N * sizeof(T)) Word {
    T part[N];
  };
  if (left >= N && reinterpret_cast<uintptr_t>(from) % sizeof(Word) == 0) {
    const Word word = *reinterpret_cast<const Word*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(word.part[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = i < left ? to_float(from[i]) : 0.0f;
}

// What the products over row tiles share. `rows` counts the tile's rows that exist, `column` is its first column.
template <class T>
struct RowProduct {
  const int64_t* offsets;
  const int32_t* starts;
  int experts;
  int64_t hidden;
  int64_t inner;
  int64_t begin = 0;
  int64_t rows = 0;
  int64_t column = 0;
  int64_t expert = 0;

  RUDA_DEVICE void enter(const RowTile& tile, int64_t first_column) {
    begin = tile.begin;
    rows = tile.end - tile.begin;
    expert = tile.expert;
    column = first_column;
  }
};

// preactivation = rows (gate, up)^T; hidden = swiglu(preactivation). B's rows are gate and up columns in turn.
template <class T>
struct GateUp : RowProduct<T> {
  static constexpr bool kDual = true, kBKMajor = true;
  const T* input;
  const T* gate;
  const T* up;
  T* preactivation;
  T* product;
  int pair_width;

  RUDA_HD int64_t columns() const { return this->inner; }
  RUDA_DEVICE int64_t depth() const { return this->hidden; }
  RUDA_DEVICE Chunk<T> a(int mn, int64_t k) const {
    return chunk_of(input + (this->begin + mn) * this->hidden + k, mn < this->rows, this->hidden - k);
  }
  RUDA_DEVICE Chunk<T> b(int mn, int64_t k) const {
    const PairColumn pair = pair_column(mn, pair_width);
    const int64_t column = this->column + pair.column;
    const T* from = (pair.second ? up : gate) + (this->expert * this->inner + column) * this->hidden + k;
    return chunk_of(from, column < this->inner, this->hidden - k);
  }
  template <int N>
  RUDA_DEVICE void put_pair(int row, int64_t column, const float* gates, const float* ups) const {
    const int64_t left = this->inner - column;
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = swiglu(gates[i], ups[i]);
    T* to = preactivation + (this->begin + row) * 2 * this->inner + column;
    store<N>(to, gates, left);
    store<N>(to + this->inner, ups, left);
    store<N>(product + (this->begin + row) * this->inner + column, values, left);
  }
};

// output = hidden down^T.
template <class T>
struct Down : RowProduct<T> {
  static constexpr bool kDual = false, kBKMajor = true;
  const T* product;
  const T* down;
  T* output;

  RUDA_HD int64_t columns() const { return this->hidden; }
  RUDA_DEVICE int64_t depth() const { return this->inner; }
  RUDA_DEVICE Chunk<T> a(int mn, int64_t k) const {
    return chunk_of(product + (this->begin + mn) * this->inner + k, mn < this->rows, this->inner - k);
  }
  RUDA_DEVICE Chunk<T> b(int mn, int64_t k) const {
    const int64_t column = this->column + mn;
    const T* from = down + (this->expert * this->hidden + column) * this->inner + k;
    return chunk_of(from, column < this->hidden, this->inner - k);
  }
  template <int N>
  RUDA_DEVICE void put(int row, int64_t column, const float* sums) const {
    store<N>(output + (this->begin + row) * this->hidden + column, sums, this->hidden - column);
  }
};

// Gradient of hidden = gradient down; from it and the preactivation its gradient, and hidden again.
template <class T>
struct HiddenGradient : RowProduct<T> {
  static constexpr bool kDual = false, kBKMajor = false;
  const T* gradient;
  const T* down;
  const T* preactivation;
  T* preactivation_gradient;
  T* product;

  RUDA_HD int64_t columns() const { return this->inner; }
  RUDA_DEVICE int64_t depth() const { return this->hidden; }
  RUDA_DEVICE Chunk<T> a(int mn, int64_t k) const {
    return chunk_of(gradient + (this->begin + mn) * this->hidden + k, mn < this->rows, this->hidden - k);
  }
  RUDA_DEVICE Chunk<T> b(int mn, int64_t k) const {
    const int64_t column = this->column + mn;
    return chunk_of(down + (this->expert * this->hidden + k) * this->inner + column, k < this->hidden,
                    this->inner - column);
  }
  template <int N>
  RUDA_DEVICE void put(int row, int64_t column, const float* sums) const {
    const int64_t left = this->inner - column, at = (this->begin + row) * 2 * this->inner + column;
    float gates[N], ups[N], values[N];
    load(gates, preactivation + at, left);
    load(ups, preactivation + at + this->inner, left);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const SwigluGradient found = swiglu_backward(sums[i], gates[i], ups[i]);
      gates[i] = found.gate, ups[i] = found.up, values[i] = found.hidden;
    }
    store<N>(preactivation_gradient + at, gates, left);
    store<N>(preactivation_gradient + at + this->inner, ups, left);
    store<N>(product + (this->begin + row) * this->inner + column, values, left);
  }
};

// Gradient of rows = gradient of preactivation (gate; up): one sum over both halves.
template <class T>
struct RowsGradient : RowProduct<T> {
  static constexpr bool kDual = false, kBKMajor = false;
  const T* preactivation_gradient;
  const T* gate;
  const T* up;
  T* rows_gradient;

  RUDA_HD int64_t columns() const { return this->hidden; }
  RUDA_DEVICE int64_t depth() const { return 2 * this->inner; }
  RUDA_DEVICE Chunk<T> a(int mn, int64_t k) const {
    return chunk_of(preactivation_gradient + (this->begin + mn) * 2 * this->inner + k, mn < this->rows,
                    2 * this->inner - k);
  }
  RUDA_DEVICE Chunk<T> b(int mn, int64_t k) const {
    const int64_t column = this->column + mn;
    const bool first = k < this->inner;
    const int64_t row = this->expert * this->inner + (first ? k : k - this->inner);
    return chunk_of((first ? gate : up) + row * this->hidden + column, k < 2 * this->inner, this->hidden - column);
  }
  template <int N>
  RUDA_DEVICE void put(int row, int64_t column, const float* sums) const {
    store<N>(rows_gradient + (this->begin + row) * this->hidden + column, sums, this->hidden - column);
  }
};

// Where a weight's gradient goes: added to a float32 buffer, or, rounded once, into a fresh cube of the weight's type.
template <class T>
struct Target {
  float* buffer;
  T* made;

  template <int N>
  RUDA_DEVICE void put(int64_t at, const float* sums, int64_t left) const {
    if (!buffer) {
      store<N>(made + at, sums, left);
      return;
    }
    float values[N];
    load(values, buffer + at, left);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += sums[i];
    store<N>(buffer + at, values, left);
  }
};

// Weight gradients of one expert: left^T right summed over its rows, [height, width]. Rows of the result from `split`
// on belong to a second cube (up beside gate), so that both come of one pass over the rows.
template <class T>
struct WeightGradient {
  const int64_t* offsets;
  int experts;
  const T* left;
  int64_t left_stride;
  const T* right;
  int64_t right_stride;
  int64_t height;
  int64_t width;
  int64_t split;
  Target<T> first;
  Target<T> second;
  int64_t begin = 0;
  int64_t count = 0;
  int64_t expert = 0;
  int64_t row = 0;
  int64_t column = 0;

  RUDA_DEVICE void enter(int64_t which, int64_t first_row, int64_t first_column) {
    expert = which;
    begin = offsets[which];
    count = offsets[which + 1] - begin;
    row = first_row;
    column = first_column;
  }
  RUDA_DEVICE int64_t depth() const { return count; }
  RUDA_DEVICE Chunk<T> a(int mn, int64_t k) const {
    return chunk_of(left + (begin + k) * left_stride + row + mn, k < count, height - row - mn);
  }
  RUDA_DEVICE Chunk<T> b(int mn, int64_t k) const {
    return chunk_of(right + (begin + k) * right_stride + column + mn, k < count, width - column - mn);
  }
  template <int N>
  RUDA_DEVICE void put(int tile_row, int64_t at_column, const float* sums) const {
    const int64_t at_row = row + tile_row, left_over = width - at_column;
    if (at_row >= height) return;
    const bool low = at_row < split;
    const int64_t tall = low ? split : height - split, within = low ? at_row : at_row - split;
    // Member by member: a reference to one of two structs would put the whole policy into local memory.
    const Target<T> to{low ? first.buffer : second.buffer, low ? first.made : second.made};
    to.template put<N>((expert * tall + within) * width + at_column, sums, left_over);
  }
};

}  // namespace ruda
