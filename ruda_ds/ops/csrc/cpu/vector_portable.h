// Sixteen float lanes as plain C++. Included inside an instruction set's own namespace.
#pragma once  // once a source file, each of which is one instruction set

struct Vec {
  float v[16];
};

constexpr int kTileVectors = 1;

template <class F>
INLINE Vec each_lane(F lane) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.v[i] = lane(i);
  return out;
}

INLINE float float_of(Word bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
INLINE Word bits_of(float x) {
  Word bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

INLINE Vec zero() { return Vec{}; }
INLINE Vec splat(float x) {
  return each_lane([&](int) { return x; });
}
INLINE Vec load(const float* p) {
  return each_lane([&](int i) { return p[i]; });
}
INLINE void store(float* p, Vec x) { __builtin_memcpy(p, x.v, sizeof(x)); }
INLINE Vec operator+(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
INLINE Vec operator-(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
INLINE Vec operator*(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
INLINE Vec operator/(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.v[i] / b.v[i]; });
}
// Not a call of fmaf: where the CPU has no such instruction that is slow.
INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) { return a * b + c; }
INLINE Vec clamp(const Vec& x, float low, float high) {
  return each_lane([&](int i) { return x.v[i] > low ? (x.v[i] < high ? x.v[i] : high) : low; });
}
// Exact below 2^22, which a clamped exponent is.
INLINE Vec round_even(const Vec& x) {
  return each_lane([&](int i) {
    volatile float shifted = x.v[i] + 12582912.0f;
    return shifted - 12582912.0f;
  });
}
INLINE Vec scale(const Vec& x, const Vec& n) {
  return each_lane([&](int i) { return x.v[i] * float_of(static_cast<Word>(static_cast<int>(n.v[i]) + 127) << 23); });
}

INLINE Vec load_lanes(const float* p, int lanes) {
  return each_lane([&](int i) { return i < lanes ? p[i] : 0.0f; });
}
INLINE void store_lanes(float* p, const Vec& x, int lanes) {
  for (int i = 0; i < lanes; ++i) p[i] = x.v[i];
}

INLINE Vec load(const Bf16* p) {
  return each_lane([&](int i) { return float_of(static_cast<Word>(p[i].bits) << 16); });
}
INLINE void store(Bf16* p, const Vec& x) {
  for (int i = 0; i < 16; ++i) {
    const Word bits = bits_of(x.v[i]);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    p[i].bits = static_cast<std::uint16_t>(nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

INLINE Vec broadcast_word(const void* p) {
  Word word;
  __builtin_memcpy(&word, p, 4);
  return splat(float_of(word));
}
INLINE Vec load_words(const Word* p) { return load(reinterpret_cast<const float*>(p)); }

template <class T>
INLINE Vec multiply_add(const Vec& sum, const Vec& a, const Vec& b);
template <>
INLINE Vec multiply_add<float>(const Vec& sum, const Vec& a, const Vec& b) { return fma(a, b, sum); }
template <>
INLINE Vec multiply_add<Bf16>(const Vec& sum, const Vec& a, const Vec& b) {
  const Vec a0 = each_lane([&](int i) { return float_of(bits_of(a.v[i]) << 16); });
  const Vec b0 = each_lane([&](int i) { return float_of(bits_of(b.v[i]) << 16); });
  const Vec a1 = each_lane([&](int i) { return float_of(bits_of(a.v[i]) & 0xffff0000); });
  const Vec b1 = each_lane([&](int i) { return float_of(bits_of(b.v[i]) & 0xffff0000); });
  return fma(a1, b1, fma(a0, b0, sum));
}

INLINE void interleave(const Bf16* even, const Bf16* odd, Word* out) {
  for (int i = 0; i < 16; ++i) out[i] = even[i].bits | static_cast<Word>(odd[i].bits) << 16;
}

INLINE void transpose(const char* in, long in_bytes, Word* out, long out_words) {
  for (int j = 0; j < 16; ++j)
    for (int i = 0; i < 16; ++i) __builtin_memcpy(out + i * out_words + j, in + j * in_bytes + 4 * i, 4);
}
