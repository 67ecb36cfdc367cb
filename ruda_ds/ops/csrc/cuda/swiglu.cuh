// SwiGLU and its derivatives on single elements, in float32 (arXiv:2002.05202, section 2).
#pragma once

#include "cuda/primitives.cuh"

namespace ruda {

RUDA_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

RUDA_DEVICE float swiglu(float gate, float up) { return gate * sigmoid(gate) * up; }

struct SwigluGradient {
  float hidden;
  float gate;
  float up;
};

// The value again, and the gradients of gate and up, for the gradient of the value.
RUDA_DEVICE SwigluGradient swiglu_backward(float gradient, float gate, float up) {
  const float share = sigmoid(gate);
  const float silu = gate * share;
  return {silu * up, gradient * up * share * (1.0f + gate * (1.0f - share)), gradient * silu};
}

}  // namespace ruda
