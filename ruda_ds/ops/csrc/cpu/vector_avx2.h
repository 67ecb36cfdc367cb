// Sixteen float lanes in two AVX2 registers. Included inside an instruction set's own namespace.
#pragma once  // once a source file, each of which is one instruction set

struct Vec {
  __m256 a, b;
};

constexpr int kTileVectors = 1;

INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
INLINE Vec operator+(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE Vec operator-(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE Vec operator*(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE Vec operator/(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE Vec fma(Vec x, Vec y, Vec z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE __m256 clamp(__m256 x, float low, float high) {
  return _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(low)), _mm256_set1_ps(high));
}
INLINE Vec clamp(Vec x, float low, float high) { return {clamp(x.a, low, high), clamp(x.b, low, high)}; }
INLINE Vec round_even(Vec x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
}
INLINE __m256 scale(__m256 x, __m256 n) {
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}
INLINE Vec scale(Vec x, Vec n) { return {scale(x.a, n.a), scale(x.b, n.b)}; }

INLINE __m256i first_lanes(int lanes) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE Vec load_lanes(const float* p, int lanes) {
  return {_mm256_maskload_ps(p, first_lanes(lanes)), _mm256_maskload_ps(p + 8, first_lanes(lanes - 8))};
}
INLINE void store_lanes(float* p, Vec x, int lanes) {
  _mm256_maskstore_ps(p, first_lanes(lanes), x.a);
  _mm256_maskstore_ps(p + 8, first_lanes(lanes - 8), x.b);
}

INLINE __m256i widen(const Bf16* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE Vec load(const Bf16* p) {
  const __m256i low = _mm256_slli_epi32(widen(p), 16), high = _mm256_slli_epi32(widen(p + 8), 16);
  return {_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)};
}
INLINE __m256i rounded(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
INLINE void store(Bf16* p, Vec x) {
  const __m256i mixed = _mm256_packus_epi32(rounded(x.a), rounded(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}

INLINE Vec broadcast_word(const void* p) {
  int word;
  __builtin_memcpy(&word, p, 4);
  const __m256 x = _mm256_castsi256_ps(_mm256_set1_epi32(word));
  return {x, x};
}
INLINE Vec load_words(const Word* p) { return load(reinterpret_cast<const float*>(p)); }

INLINE __m256 low_half(__m256 x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
INLINE __m256 high_half(__m256 x) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
template <class T>
INLINE Vec multiply_add(Vec sum, Vec a, Vec b);
template <>
INLINE Vec multiply_add<float>(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
template <>
INLINE Vec multiply_add<Bf16>(Vec sum, Vec x, Vec y) {
  const Vec low = {low_half(x.a), low_half(x.b)}, high = {high_half(x.a), high_half(x.b)};
  return fma(high, Vec{high_half(y.a), high_half(y.b)}, fma(low, Vec{low_half(y.a), low_half(y.b)}, sum));
}

INLINE void interleave(const Bf16* even, const Bf16* odd, Word* out) {
  for (int half = 0; half < 16; half += 8) {
    const __m256i words = _mm256_or_si256(widen(even + half), _mm256_slli_epi32(widen(odd + half), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + half), words);
  }
}

INLINE void transpose(const char* in, long in_bytes, Word* out, long out_words) {
  for (int j = 0; j < 16; ++j)
    for (int i = 0; i < 16; ++i) __builtin_memcpy(out + i * out_words + j, in + j * in_bytes + 4 * i, 4);
}
