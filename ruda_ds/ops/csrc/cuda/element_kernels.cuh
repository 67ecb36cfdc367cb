// Small kernels beside the products: the schedule, and SwiGLU alone for products that another library computes.
#pragma once

#include "cuda/policies.cuh"

namespace ruda {

constexpr int kScan = 256;

// starts [L + 1] from offsets [L + 1], by one block: see fill_starts, which says the same in one line.
RUDA_KERNEL(kScan) schedule(const int64_t* offsets, int experts, int64_t tile_rows, int32_t* starts) {
  int32_t* sums = reinterpret_cast<int32_t*>(shared_memory());
  const int mine = thread_index();
  int32_t before = 0;
  if (mine == 0) starts[0] = 0;
  for (int first = 0; first < experts; first += kScan) {
    const int e = first + mine;
    sums[mine] = e < experts ? tiles_of(offsets[e + 1] - offsets[e], tile_rows) : 0;
    sync_threads();
    for (int step = 1; step < kScan; step *= 2) {
      const int32_t left = mine >= step ? sums[mine - step] : 0;
      sync_threads();
      sums[mine] += left;
      sync_threads();
    }
    if (e < experts) starts[e + 1] = before + sums[mine];
    before += sums[kScan - 1];
    sync_threads();
  }
}

constexpr int kTogether = 8;  // elements of a thread at a time: one load of 16 bytes where they have 16 bits

// hidden = swiglu of gate and up, element by element.
template <class T>
RUDA_KERNEL(kThreads) swiglu_elements(const T* gate, const T* up, T* hidden, int64_t elements) {
  const int64_t step = block_count() * kThreads * kTogether;
  for (int64_t i = (block_index() * kThreads + thread_index()) * kTogether; i < elements; i += step) {
    float gates[kTogether], ups[kTogether], values[kTogether];
    load(gates, gate + i, elements - i);
    load(ups, up + i, elements - i);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) values[j] = swiglu(gates[j], ups[j]);
    store<kTogether>(hidden + i, values, elements - i);
  }
}

// The gradients of gate and up, and hidden again, from the gradient of hidden.
template <class T>
RUDA_KERNEL(kThreads) swiglu_elements_backward(const T* gradient, const T* gate, const T* up, T* gate_gradient,
                                               T* up_gradient, T* hidden, int64_t elements) {
  const int64_t step = block_count() * kThreads * kTogether;
  for (int64_t i = (block_index() * kThreads + thread_index()) * kTogether; i < elements; i += step) {
    float gradients[kTogether], gates[kTogether], ups[kTogether], values[kTogether];
    load(gradients, gradient + i, elements - i);
    load(gates, gate + i, elements - i);
    load(ups, up + i, elements - i);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const SwigluGradient found = swiglu_backward(gradients[j], gates[j], ups[j]);
      gates[j] = found.gate, ups[j] = found.up, values[j] = found.hidden;
    }
    store<kTogether>(gate_gradient + i, gates, elements - i);
    store<kTogether>(up_gradient + i, ups, elements - i);
    store<kTogether>(hidden + i, values, elements - i);
  }
}

}  // namespace ruda
