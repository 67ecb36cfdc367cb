// Sixteen float lanes in one AVX-512 register. Included inside an instruction set's own namespace.
#pragma once  // once a source file, each of which is one instruction set

struct Vec {
  __m512 v;
};

// Vectors side by side in one register tile: 6 x 4 sums, 4 columns and a broadcast fill 29 of 32 registers.
constexpr int kTileVectors = 4;

INLINE Vec zero() { return {_mm512_setzero_ps()}; }
INLINE Vec splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE Vec clamp(Vec x, float low, float high) {
  return {_mm512_min_ps(_mm512_max_ps(x.v, _mm512_set1_ps(low)), _mm512_set1_ps(high))};
}
INLINE Vec round_even(Vec x) { return {_mm512_roundscale_ps(x.v, 0)}; }
// x * 2^n for an integral n.
INLINE Vec scale(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }

INLINE __mmask16 first_lanes(int lanes) { return static_cast<__mmask16>((1u << lanes) - 1); }

INLINE Vec load_lanes(const float* p, int lanes) { return {_mm512_maskz_loadu_ps(first_lanes(lanes), p)}; }
INLINE void store_lanes(float* p, Vec x, int lanes) { _mm512_mask_storeu_ps(p, first_lanes(lanes), x.v); }

INLINE Vec from_bits(__m256i bits) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))}; }
INLINE Vec load(const Bf16* p) { return from_bits(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

#ifdef RUDA_BF16_DOT
INLINE __m256i to_bits(Vec x) { return (__m256i)_mm512_cvtneps_pbh(x.v); }
#else
INLINE __m256i to_bits(Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i whole = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(whole, 16));
}
#endif
INLINE void store(Bf16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bits(x)); }

INLINE Vec broadcast_word(const void* p) {
  int word;
  __builtin_memcpy(&word, p, 4);
  return {_mm512_castsi512_ps(_mm512_set1_epi32(word))};
}
INLINE Vec load_words(const Word* p) { return {_mm512_loadu_ps(reinterpret_cast<const float*>(p))}; }

template <class T>
INLINE Vec multiply_add(Vec sum, Vec a, Vec b);
template <>
INLINE Vec multiply_add<float>(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
template <>
INLINE Vec multiply_add<Bf16>(Vec sum, Vec a, Vec b) {
#ifdef RUDA_BF16_DOT
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i x = _mm512_castps_si512(a.v), y = _mm512_castps_si512(b.v);
  const __m512i x0 = _mm512_slli_epi32(x, 16), y0 = _mm512_slli_epi32(y, 16);
  const __m512i x1 = _mm512_and_si512(x, high), y1 = _mm512_and_si512(y, high);
  sum.v = _mm512_fmadd_ps(_mm512_castsi512_ps(x0), _mm512_castsi512_ps(y0), sum.v);
  return {_mm512_fmadd_ps(_mm512_castsi512_ps(x1), _mm512_castsi512_ps(y1), sum.v)};
#endif
}

// Words (even[i], odd[i]) of 16 lanes.
INLINE void interleave(const Bf16* even, const Bf16* odd, Word* out) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// out[i * out_stride + j] = in[j * in_stride + i] for i, j < 16, in words.
INLINE void transpose(const char* in, long in_bytes, Word* out, long out_words) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(in + i * in_bytes);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  // a[4 q + c]: column 4 l + c of rows 4 q .. 4 q + 3 in each 128-bit part l.
#pragma GCC unroll 4
  for (int q = 0; q < 16; q += 4) {
    a[q] = _mm512_unpacklo_epi64(b[q], b[q + 2]);
    a[q + 1] = _mm512_unpackhi_epi64(b[q], b[q + 2]);
    a[q + 2] = _mm512_unpacklo_epi64(b[q + 1], b[q + 3]);
    a[q + 3] = _mm512_unpackhi_epi64(b[q + 1], b[q + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
    _mm512_storeu_si512(out + c * out_words, _mm512_shuffle_i32x4(low01, low23, 0x88));
    _mm512_storeu_si512(out + (4 + c) * out_words, _mm512_shuffle_i32x4(low01, low23, 0xdd));
    _mm512_storeu_si512(out + (8 + c) * out_words, _mm512_shuffle_i32x4(high01, high23, 0x88));
    _mm512_storeu_si512(out + (12 + c) * out_words, _mm512_shuffle_i32x4(high01, high23, 0xdd));
  }
}
