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

// Rows of a matrix, in the order of an index if there is one.
template <class T>
struct Rows {
  const T* first;
  long width;
  const std::int64_t* index;

  INLINE const T* operator()(long i) const { return first + (index ? index[i] : i) * width; }
  Ahead ahead(long row, long column, long pieces) const {
    const long stride = width * static_cast<long>(sizeof(T));
    return {reinterpret_cast<const char*>(first + (index ? 0 : row * width) + column), stride, pieces,
            index ? index + row : nullptr};
  }
};

// The words of rows [row, row + count) of ``last`` rows, k from ``begin`` on. Where k is odd they would cross into the
// next row, and a copy is read instead.
template <class T>
INLINE InRows words(const Rows<T>& left, long row, long count, long last, long begin, long steps, Word* padded) {
  InRows at;
  const bool whole = begin + steps * kStep<T> <= left.width;
  for (long i = 0; i < kTileRows; ++i) {
    at.row[i] = reinterpret_cast<const char*>(left(least(row + i, last - 1)) + begin);
    at.next[i] = reinterpret_cast<const char*>(left(least(row + kTileRows + i, last - 1)) + begin);
    if (whole || i >= count) continue;
    Word* const copy = padded + i * steps;
    copy[steps - 1] = 0;
    __builtin_memcpy(copy, at.row[i], (left.width - begin) * sizeof(T));
    at.row[i] = reinterpret_cast<const char*>(copy);
  }
  return at;
}

// For every tile of ``rows`` rows times a panel that pack(begin, steps, panel) makes: prepare(row, count), the product,
// and finish(row, count, sums [count][64]).
template <class T, class Pack, class Prepare, class Finish>
void product(const Rows<T>& left, long rows, const Scratch& scratch, Upcoming upcoming, Pack pack, Prepare prepare,
             Finish finish) {
  const long all = steps_of(left.width, kStep<T>);
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
        const InRows at = words(left, row, count, rows, done * kStep<T>, steps, scratch.padded);
        const bool due = upcoming.due((rows - row + kTileRows - 1) / kTileRows, steps);
        Ahead none{};
        if (done + kPackedSteps >= all) prepare(row, count);
        tile<T>(count, at, scratch.panel, steps, sums, done > 0, due ? upcoming.part() : none);
        if (done + kPackedSteps >= all) finish(row, count, sums);
      }
    }
  }
}

// finish(column of left, count, column of right, lanes, sums) for left^T x right, both with one k in a row; of left the
// first ``columns``.
template <class T, class Finish>
void outer_product(const Rows<T>& left, long columns, const Rows<T>& right, long k, const Scratch& scratch,
                   Upcoming after, Finish finish) {
  const long width = right.width;
  const long all = steps_of(k, kStep<T>);
  const bool once = all <= kPackedSteps;
  const long tiles = (columns + kTileRows - 1) / kTileRows;
  for (long done = 0; done == 0 || done < all; done += kPackedSteps) {
    const long steps = least(kPackedSteps, all - done), begin = done * kStep<T>;
    pack_block<T>(left, columns, begin, k, steps, scratch.block);
    for (long first = 0; first < width; first += kPanel) {
      const long lanes = least(kPanel, width - first);
      pack_panel<T>([&](long i) { return right(i) + first; }, lanes, begin, k, steps, scratch.panel);
      Upcoming upcoming = after;
      if (first + kPanel < width)
        upcoming = {{right.ahead(begin, first + kPanel, least(k - begin, steps * kStep<T>))}};
      float* const kept = scratch.kept(0) + first * tiles * kTileRows;
      for (long t = 0; t < tiles; ++t) {
        const long count = least(kTileRows, columns - t * kTileRows);
        float* const sums = once ? scratch.sums : kept + t * kTileRows * kPanel;
        const InBlock at{reinterpret_cast<const char*>(scratch.block + t * steps * kTileRows)};
        tile<T>(count, at, scratch.panel, steps, sums, done > 0, upcoming.part());
        if (done + kPackedSteps >= all) finish(t * kTileRows, count, first, lanes, sums);
      }
    }
  }
}
