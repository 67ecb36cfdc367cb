// SwiGLU and its derivative on sixteen lanes. Included inside an instruction set's own namespace.
#pragma once

// e^x as 2^n e^r, |r| <= ln(2) / 2; the Taylor series to r^7 is exact to 5e-9 there. x outside +-87 is clamped.
INLINE Vec exponential(Vec x) {
  x = clamp(x, -87.0f, 87.0f);
  const Vec n = round_even(x * splat(1.44269504f));
  // ln(2) in two parts, the first of which times n is exact.
  const Vec r = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145751953125f), x));
  Vec sum = splat(1.0f / 5040);
  const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (float coefficient : coefficients) sum = fma(sum, r, splat(coefficient));
  return scale(sum, n);
}

INLINE Vec sigmoid(Vec x) { return splat(1) / (splat(1) + exponential(zero() - x)); }

INLINE Vec swiglu(Vec gate, Vec up) { return gate * sigmoid(gate) * up; }

struct SwigluGradient {
  Vec activation, gate, up;
};

// For a gradient d of swiglu(gate, up): silu'(g) = s (1 + g (1 - s)) with s = sigmoid(g).
INLINE SwigluGradient swiglu_gradient(Vec d, Vec gate, Vec up) {
  const Vec s = sigmoid(gate), silu = gate * s;
  return {silu * up, d * up * (s * fma(gate, splat(1) - s, splat(1))), d * silu};
}
