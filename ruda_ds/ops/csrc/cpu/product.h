// Products of packed operands, tile by tile. Included inside an instruction set's own namespace.
#pragma once

// This thread's memory, as scratch_bytes() counts it.
struct Scratch {
  Word* panel;
  Word* block;
  float* sums;
  Word* padded;

  explicit Scratch(char* memory)
      : panel(reinterpret_cast<Word*>(memory)),
        block(panel + kPackedSteps * kPanel),
        sums(reinterpret_cast<float*>(block + kBlockWords)),
        padded(reinterpret_cast<Word*>(sums + kTileRows * kPanel)) {}
  // Sums of products that are too long for one panel; they lie behind all else.
  float* kept(long padded_words) const { return reinterpret_cast<float*>(padded + (padded_words + 15) / 16 * 16); }
};

// Rows of a matrix whose k may be odd: then words would cross into the next row, and a copy is read instead.
template <class T>
struct LeftRows {
  const T* rows;
  long stride, k;

  INLINE const char* words(long row, long count, long begin, long steps, Word* padded, InRows& at) const {
    const T* from = rows + row * stride + begin;
    at.stride = stride * static_cast<long>(sizeof(T));
    if (begin + steps * kStep<T> <= k) return reinterpret_cast<const char*>(from);
    at.stride = steps * static_cast<long>(sizeof(Word));
    for (long i = 0; i < count; ++i) {
      padded[(i + 1) * steps - 1] = 0;
      __builtin_memcpy(padded + i * steps, from + i * stride, (k - begin) * sizeof(T));
    }
    return reinterpret_cast<const char*>(padded);
  }
};

// For every tile of ``rows`` rows times a panel that pack(begin, steps, panel) makes: prepare(row, count), the product,
// and finish(row, count, sums [count][64]).
template <class T, class Pack, class Prepare, class Finish>
void product(const LeftRows<T>& left, long rows, const Scratch& scratch, Upcoming upcoming, Pack pack,
             Prepare prepare, Finish finish) {
  const long all = steps_of(left.k, kStep<T>);
  const bool once = all <= kPackedSteps;
  const long kept_rows = once ? rows : kKeptRows;
  float* const kept = scratch.kept(kTileRows * least(all, kPackedSteps));
  for (long first = 0; first < rows; first += kept_rows) {
    const long last = least(first + kept_rows, rows);
    for (long done = 0; done == 0 || done < all; done += kPackedSteps) {
      const long steps = least(kPackedSteps, all - done);
      pack(done * kStep<T>, steps, scratch.panel);
      for (long row = first; row < last; row += kTileRows) {
        const long count = least(kTileRows, last - row);
        float* const sums = once ? scratch.sums : kept + (row - first) * kPanel;
        InRows at;
        const char* words = left.words(row, count, done * kStep<T>, steps, scratch.padded, at);
        const bool due = upcoming.due((rows - row + kTileRows - 1) / kTileRows, steps);
        Ahead none{};
        if (done + kPackedSteps >= all) prepare(row, count);
        tile<T>(count, at, words, scratch.panel, steps, sums, done > 0, due ? upcoming.part() : none);
        if (done + kPackedSteps >= all) finish(row, count, sums);
      }
    }
  }
}

// finish(column of left, count, column of right, lanes, sums) for left^T x right, both with one k in a row.
template <class T, class Left, class Right, class Finish>
void outer_product(Left left, long columns, Right right, long width, long k, const Scratch& scratch, Upcoming after,
                   Finish finish) {
  const long all = steps_of(k, kStep<T>);
  const bool once = all <= kPackedSteps;
  const long tiles = (columns + kTileRows - 1) / kTileRows;
  for (long done = 0; done == 0 || done < all; done += kPackedSteps) {
    const long steps = least(kPackedSteps, all - done), begin = done * kStep<T>;
    pack_block<T>(left, columns, begin, k, steps, scratch.block);
    for (long first = 0; first < width; first += kPanel) {
      const long lanes = least(kPanel, width - first);
      pack_panel<T>([&](long i) { return right(i) + first; }, lanes, begin, k, steps, scratch.panel);
      const long stride = static_cast<long>(sizeof(T)) * (k > 1 ? right(1) - right(0) : 0);
      Upcoming upcoming = after;
      if (first + kPanel < width) {
        const char* from = reinterpret_cast<const char*>(right(begin) + first + kPanel);
        upcoming = {{{from, stride, least(k - begin, steps * kStep<T>)}}};
      }
      float* const kept = scratch.kept(0) + first * tiles * kTileRows;
      for (long t = 0; t < tiles; ++t) {
        const long count = least(kTileRows, columns - t * kTileRows);
        float* const sums = once ? scratch.sums : kept + t * kTileRows * kPanel;
        const char* words = reinterpret_cast<const char*>(scratch.block + t * steps * kTileRows);
        tile<T>(count, InBlock{}, words, scratch.panel, steps, sums, done > 0, upcoming.part());
        if (done + kPackedSteps >= all) finish(t * kTileRows, count, first, lanes, sums);
      }
    }
  }
}
