// Launchers of the kernels: pointers, sizes and a stream; torch-free, so that they compile anywhere with nvcc alone.
//
// Letters as in policies.cuh. Every pointer lies on the card, contiguous. Nothing here waits for the card.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ruda {

enum class Type { kFloat32, kBFloat16, kFloat16 };

struct Problem {
  Type type;
  int64_t rows;    // R
  int experts;     // L
  int64_t hidden;  // H
  int64_t inner;   // F
  const int64_t* offsets;
  int32_t* starts;    // [L + 1], filled by `plan`
  int64_t tile_rows;  // rows of a tile, by `rows_of_a_tile`
  // Whether H and F are multiples of 16 bytes and all pointers lie at such; otherwise elements are copied one by one.
  bool vector;
  cudaStream_t stream;
};

// 128, or 32 where experts have few rows on average.
int64_t rows_of_a_tile(Type type, int64_t rows, int experts, bool vector);

// Fills starts. Before any of the products over row tiles.
cudaError_t plan(const Problem& problem);

cudaError_t gate_up(const Problem& problem, const void* rows, const void* gate, const void* up, void* preactivation,
                    void* product);
cudaError_t down(const Problem& problem, const void* product, const void* weight, void* output);
cudaError_t hidden_gradient(const Problem& problem, const void* gradient, const void* weight,
                            const void* preactivation, void* preactivation_gradient, void* product);
cudaError_t rows_gradient(const Problem& problem, const void* preactivation_gradient, const void* gate,
                          const void* up, void* gradient);

// One of the two, or none where the gradient is not wanted.
struct WeightTarget {
  float* buffer;  // float32, added to
  void* made;     // of the problem's type, written

  bool wanted() const { return buffer || made; }
};

// gate [L, F, H] and up alike = preactivation_gradient^T rows, in one pass where both are wanted.
cudaError_t gate_up_gradient(const Problem& problem, const void* preactivation_gradient, const void* rows,
                             WeightTarget gate, WeightTarget up);
// [L, H, F] = gradient^T product.
cudaError_t down_gradient(const Problem& problem, const void* gradient, const void* product, WeightTarget target);

// SwiGLU alone, for products that another library computes; all of one shape.
cudaError_t swiglu(Type type, const void* gate, const void* up, void* product, int64_t elements, cudaStream_t stream);

struct SwigluPointers {
  const void* gradient;
  const void* gate;
  const void* up;
  void* gate_gradient;
  void* up_gradient;
  void* product;
};

cudaError_t swiglu_gradient(Type type, const SwigluPointers& at, int64_t elements, cudaStream_t stream);

}  // namespace ruda
