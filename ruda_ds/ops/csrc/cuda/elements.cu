#include "cuda/dispatch.cuh"
#include "cuda/element_kernels.cuh"

namespace ruda {
namespace {

// Enough blocks to fill any card; the kernels go on in steps of the whole grid.
int64_t element_blocks(int64_t elements) {
  const int64_t wanted = (elements + kThreads * kTogether - 1) / (kThreads * kTogether);
  return wanted < 4096 ? wanted : 4096;
}

template <class T>
cudaError_t swiglu_of(const void* gate, const void* up, void* product, int64_t elements, cudaStream_t stream) {
  return launch(swiglu_elements<T>, element_blocks(elements), 0, stream, static_cast<const T*>(gate),
                static_cast<const T*>(up), static_cast<T*>(product), elements);
}

template <class T>
cudaError_t swiglu_gradient_of(const SwigluPointers& at, int64_t elements, cudaStream_t stream) {
  return launch(swiglu_elements_backward<T>, element_blocks(elements), 0, stream, static_cast<const T*>(at.gradient),
                static_cast<const T*>(at.gate), static_cast<const T*>(at.up), static_cast<T*>(at.gate_gradient),
                static_cast<T*>(at.up_gradient), static_cast<T*>(at.product), elements);
}

}  // namespace

int64_t rows_of_a_tile(Type type, int64_t rows, int experts, bool vector) {
  if (type == Type::kFloat32) return kFmaTile;
  if (!vector) return 32;
  return rows < 64 * static_cast<int64_t>(experts) ? 32 : 128;
}

cudaError_t plan(const Problem& problem) {
  return launch(schedule, 1, kScan * sizeof(int32_t), problem.stream, problem.offsets, problem.experts,
                problem.tile_rows, problem.starts);
}

cudaError_t swiglu(Type type, const void* gate, const void* up, void* product, int64_t elements, cudaStream_t stream) {
  if (type == Type::kFloat32) return swiglu_of<float>(gate, up, product, elements, stream);
  if (type == Type::kBFloat16) return swiglu_of<bfloat16>(gate, up, product, elements, stream);
  return swiglu_of<float16>(gate, up, product, elements, stream);
}

cudaError_t swiglu_gradient(Type type, const SwigluPointers& at, int64_t elements, cudaStream_t stream) {
  if (type == Type::kFloat32) return swiglu_gradient_of<float>(at, elements, stream);
  if (type == Type::kBFloat16) return swiglu_gradient_of<bfloat16>(at, elements, stream);
  return swiglu_gradient_of<float16>(at, elements, stream);
}

}  // namespace ruda
