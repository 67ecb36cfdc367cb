// Operands laid out as the register tile reads them. Included inside an instruction set's own namespace.
//
// A panel is [steps][64] words: in each word the float of one k, or the bf16 of two neighbouring k, of one lane. What
// lies outside the operand is zero.
#pragma once

template <class T>
constexpr long kStep = 4 / sizeof(T);

INLINE long steps_of(long k, long step) { return (k + step - 1) / step; }
INLINE long least(long a, long b) { return a < b ? a : b; }

// Sixteen lanes of a panel from rows that hold one lane each, k contiguous: k in [begin, begin + steps * kStep).
template <class T>
void pack_lanes(const T* rows, long stride, long lanes, long begin, long k, long steps, Word* panel) {
  long s = 0;
  if (lanes == 16) {
    const char* from = reinterpret_cast<const char*>(rows + begin);
    for (; (s + 16) * kStep<T> <= k - begin && s + 16 <= steps; s += 16)
      transpose(from + 4 * s, stride * static_cast<long>(sizeof(T)), panel + s * kPanel, kPanel);
  }
  for (; s < steps; ++s)
    for (long lane = 0; lane < 16; ++lane) {
      Word word = 0;
      const long at = begin + s * kStep<T>;
      const long there = lane < lanes ? least(kStep<T>, k - at) : 0;
      if (there > 0) __builtin_memcpy(&word, rows + lane * stride + at, there * sizeof(T));
      panel[s * kPanel + lane] = word;
    }
}

// ``lanes`` words of one step from the one or two rows (of which ``odd`` may be null) that it is made of.
INLINE void pack_step(const float* even, const float*, long lanes, Word* out) {
  long lane = 0;
  for (; lane + 16 <= lanes; lane += 16) store(reinterpret_cast<float*>(out) + lane, load(even + lane));
  const int rest = static_cast<int>(lanes - lane);
  if (rest) store(reinterpret_cast<float*>(out) + lane, load_lanes(even + lane, rest));
}

INLINE void pack_step(const Bf16* even, const Bf16* odd, long lanes, Word* out) {
  static const Bf16 none[16] = {};
  long lane = 0;
  for (; lane + 16 <= lanes; lane += 16) interleave(even + lane, odd ? odd + lane : none, out + lane);
  if (lane == lanes) return;
  Bf16 rest[2][16] = {};
  __builtin_memcpy(rest[0], even + lane, (lanes - lane) * sizeof(Bf16));
  if (odd) __builtin_memcpy(rest[1], odd + lane, (lanes - lane) * sizeof(Bf16));
  interleave(rest[0], rest[1], out + lane);
}

// A panel from rows that hold one k each, lanes contiguous. ``row(k)`` points at the first lane.
template <class T, class Row>
void pack_panel(Row row, long lanes, long begin, long k, long steps, Word* panel) {
  constexpr long ahead = 8;
  const long written = (lanes + 15) / 16 * 16;
  for (long s = 0; s < steps; ++s) {
    const long at = begin + s * kStep<T>;
    for (long j = 0; j < kStep<T>; ++j) {
      if (at + ahead * kStep<T> + j >= k) break;
      const char* next = reinterpret_cast<const char*>(row(at + ahead * kStep<T> + j));
      for (long byte = 0; byte < lanes * static_cast<long>(sizeof(T)); byte += 64) __builtin_prefetch(next + byte);
    }
    pack_step(row(at), at + 1 < k && kStep<T> == 2 ? row(at + 1) : nullptr, lanes, panel + s * kPanel);
    for (long lane = written; lane < kPanel; ++lane) panel[s * kPanel + lane] = 0;
  }
}

// The left operand of wgrad: [tile][steps][6] words from ``columns`` columns of rows that hold one k each. Some steps
// at a time, so that each tile's are written together: tiles lie at distances that share few lines of the first cache.
template <class T, class Row>
void pack_block(Row row, long columns, long begin, long k, long steps, Word* block) {
  constexpr long together = 16, width = kBlockColumns + 16;
  Word words[together * width];
  const long tiles = (columns + kTileRows - 1) / kTileRows;
  for (long i = 0; i < together; ++i)
    for (long lane = columns; lane < tiles * kTileRows; ++lane) words[i * width + lane] = 0;
  for (long first = 0; first < steps; first += together) {
    const long last = least(first + together, steps);
    for (long s = first; s < last; ++s) {
      const long at = begin + s * kStep<T>;
      pack_step(row(at), at + 1 < k && kStep<T> == 2 ? row(at + 1) : nullptr, columns, words + (s - first) * width);
    }
    for (long tile = 0; tile < tiles; ++tile)
      for (long s = first; s < last; ++s)
        __builtin_memcpy(block + (tile * steps + s) * kTileRows, words + (s - first) * width + tile * kTileRows,
                         kTileRows * sizeof(Word));
  }
}
