// Sums of rows, some tokens at a time. Included inside an instruction set's own namespace.
#pragma once

// Vectors side by side in one pass over a token's rows.
constexpr int kSumVectors = 4;
constexpr long kSumLanes = 16 * kSumVectors;

template <class T>
struct TokenSums {
  const RowSums& s;

  const T* row(const void* matrix, long at) const { return static_cast<const T*>(matrix) + at * s.hidden; }
  T* row(void* matrix, long at) const { return static_cast<T*>(matrix) + at * s.hidden; }
  const T* source(long slot) const {
    return slot < s.rows_split ? row(s.rows[0], slot) : row(s.rows[1], slot - s.rows_split);
  }
  T* target(long slot) const {
    return slot < s.gradient_split ? row(s.row_gradient[0], slot) : row(s.row_gradient[1], slot - s.gradient_split);
  }

  // Calls with(vector, its first column, lanes from there on) for each vector that has a column of the row.
  template <class With>
  INLINE static void each_vector(long column, long hidden, With with) {
#pragma GCC unroll 4
    for (int j = 0; j < kSumVectors; ++j)
      if (column + 16 * j < hidden) with(j, column + 16 * j, hidden - column - 16 * j);
  }

  void combine(long token) const {
    const std::int64_t* slots = s.slots + token * s.top_k;
    const float* weights = s.weights ? s.weights + token * s.top_k : nullptr;
    T* const out = row(s.sums, token);
    for (long column = 0; column < s.hidden; column += kSumLanes) {
      Vec sum[kSumVectors] = {zero(), zero(), zero(), zero()};
      for (long k = 0; k < s.top_k; ++k) {
        const T* from = source(slots[k]);
        const Vec weight = splat(weights ? weights[k] : 1.0f);
        each_vector(column, s.hidden, [&](int j, long at, long lanes) {
          sum[j] = fma(weight, load_part(from + at, lanes), sum[j]);
        });
      }
      each_vector(column, s.hidden, [&](int j, long at, long lanes) { store_part(out + at, sum[j], lanes); });
    }
  }

  void differentiate(long token) const {
    const T* gradient = row(s.gradient, token);
    for (long k = token * s.top_k; k < (token + 1) * s.top_k; ++k) {
      const T* from = source(s.slots[k]);
      T* to = target(s.slots[k]);
      const Vec weight = splat(s.weights[k]);
      Vec dot[kSumVectors] = {zero(), zero(), zero(), zero()};
      for (long column = 0; column < s.hidden; column += kSumLanes)
        each_vector(column, s.hidden, [&](int j, long at, long lanes) {
          const Vec upstream = load_part(gradient + at, lanes);
          store_part(to + at, upstream * weight, lanes);
          dot[j] = fma(upstream, load_part(from + at, lanes), dot[j]);
        });
      float lanes[16], total = 0;
      store(lanes, (dot[0] + dot[1]) + (dot[2] + dot[3]));
      for (float lane : lanes) total += lane;
      s.weight_gradient[k] = total;
    }
  }
};

template <class T>
void sum_tokens(const RowSums& sums, long first, long last) {
  const TokenSums<T> tokens{sums};
  for (long token = first; token < last; ++token) sums.gradient ? tokens.differentiate(token) : tokens.combine(token);
}

void sum_rows(const RowSums& sums, long first, long last) {
  sums.scalar == Scalar::bf16 ? sum_tokens<Bf16>(sums, first, last) : sum_tokens<float>(sums, first, last);
}
