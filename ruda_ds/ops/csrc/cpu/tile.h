// The register tile: up to 6 rows by 64 lanes of sums. Included inside an instruction set's own namespace.
//
// Every sum goes over k from first to last, in chunks whose sums are added in order, whatever the size of the tile: a
// row gives the same bits in any company. Chunks also keep the error of a float32 sum at that of a short one.
#pragma once

template <class T>
constexpr long kChunk = sizeof(T) == 4 ? 256 : 512;

// Steps in a line of the caches.
constexpr long kLineSteps = 64 / sizeof(Word);

// Where the words of the left operand lie: rows of a matrix (k contiguous), or [steps][6] of a packed block.
struct InRows {
  const char* row[kTileRows];
  const char* next[kTileRows];  // of the next tile
  INLINE const char* at(int i, long step) const { return row[i] + 4 * step; }
  // Brings the next tile near, line by line.
  template <int kRows>
  INLINE void fetch_next(long step) const {
    if (step % kLineSteps) return;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) __builtin_prefetch(next[i] + 4 * step);
  }
};
struct InBlock {
  const char* block;
  INLINE const char* at(int i, long step) const { return block + (step * kTileRows + i) * 4; }
  template <int kRows>
  INLINE void fetch_next(long) const {}  // contiguous: the CPU sees it coming
};

// Memory that a later panel is packed from, to be brought near while sums are made: ``left`` pieces of 64 lanes.
struct Ahead {
  const char* at;
  long stride, left;                    // bytes, pieces
  const std::int64_t* index = nullptr;  // null: each piece a stride after the one before; else index strides from at
};
// One piece in so many steps.
constexpr long kAheadSteps = 8;

template <class T>
INLINE void fetch(Ahead& ahead) {
  if (ahead.left <= 0) return;
  const char* const from = ahead.index ? ahead.at + *ahead.index++ * ahead.stride : ahead.at;
#pragma GCC unroll 4
  for (int line = 0; line < static_cast<int>(sizeof(T)); ++line) __builtin_prefetch(from + 64 * line, 0, 2);
  if (!ahead.index) ahead.at += ahead.stride;
  --ahead.left;
}

// What the next panel, or the next task, is packed from.
struct Upcoming {
  static constexpr int kParts = 4;
  Ahead parts[kParts];

  // The first that is not through.
  Ahead& part() {
    int i = 0;
    while (i < kParts - 1 && parts[i].left <= 0) ++i;
    return parts[i];
  }
  // Whether it is time to begin, with so many tiles of so many steps to go: late enough not to push out what is in use.
  bool due(long tiles, long steps) const {
    long left = 0;
    for (const Ahead& part : parts) left += part.left;
    return tiles * (steps / kAheadSteps + 1) <= left + steps / kAheadSteps;
  }
};

// sums[row][64] = left x panel over ``steps``, or += if ``add``.
template <class T, int kRows, class Left>
void tile(const Left& left, const Word* panel, long steps, float* sums, bool add, Ahead& next) {
  constexpr int kVectors = kTileVectors;
  if (!steps && !add)
    for (long i = 0; i < kRows * kPanel; ++i) sums[i] = 0;
  Ahead ahead = next;
  for (long begin = 0; begin < steps; begin += kChunk<T>) {
    const long end = least(begin + kChunk<T>, steps);
    for (int lane = 0; lane < kPanel; lane += 16 * kVectors) {
      Vec sum[kRows][kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) sum[i][j] = zero();
      for (long s = begin; s < end; ++s) {
        if (s % kAheadSteps == 0) fetch<T>(ahead);
        left.template fetch_next<kRows>(s);
        Vec b[kVectors];
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) b[j] = load_words(panel + s * kPanel + lane + 16 * j);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const Vec word = broadcast_word(left.at(i, s));
#pragma GCC unroll 8
          for (int j = 0; j < kVectors; ++j) sum[i][j] = multiply_add<T>(sum[i][j], word, b[j]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
          float* to = sums + i * kPanel + lane + 16 * j;
          store(to, begin || add ? load(to) + sum[i][j] : sum[i][j]);
        }
    }
  }
  next = ahead;
}

template <class T, class Left>
void tile(long rows, const Left& left, const Word* panel, long steps, float* sums, bool add, Ahead& ahead) {
  switch (rows) {
    case 1: return tile<T, 1>(left, panel, steps, sums, add, ahead);
    case 2: return tile<T, 2>(left, panel, steps, sums, add, ahead);
    case 3: return tile<T, 3>(left, panel, steps, sums, add, ahead);
    case 4: return tile<T, 4>(left, panel, steps, sums, add, ahead);
    case 5: return tile<T, 5>(left, panel, steps, sums, add, ahead);
    default: return tile<T, 6>(left, panel, steps, sums, add, ahead);
  }
}
