#include "cuda/dispatch.cuh"

namespace ruda {
namespace {

struct Operand {
  const void* data;
  int64_t offset;
  int64_t stride;
  int64_t width;
};

template <class T>
WeightGradient<T> weight_policy(const Problem& problem, const Operand& left, const Operand& right, int64_t split,
                                WeightTarget first, WeightTarget second) {
  WeightGradient<T> policy{};
  policy.offsets = problem.offsets;
  policy.experts = problem.experts;
  policy.left = static_cast<const T*>(left.data) + left.offset;
  policy.left_stride = left.stride;
  policy.right = static_cast<const T*>(right.data) + right.offset;
  policy.right_stride = right.stride;
  policy.height = left.width;
  policy.width = right.width;
  policy.split = split;
  policy.first = {first.buffer, static_cast<T*>(first.made)};
  policy.second = {second.buffer, static_cast<T*>(second.made)};
  return policy;
}

cudaError_t launch_weights(const Problem& problem, const Operand& left, const Operand& right, int64_t split,
                           WeightTarget first, WeightTarget second) {
  const int64_t blocks = problem.experts * ((left.width + 127) / 128) * ((right.width + kColumns - 1) / kColumns);
  const auto with = [&](auto zero) {
    return weight_policy<decltype(zero)>(problem, left, right, split, first, second);
  };
  if (problem.type == Type::kFloat32) {
    if (problem.vector)
      return launch(fma_weight_product<true>, blocks, fma_shared_bytes(), problem.stream, with(float{}));
    return launch(fma_weight_product<false>, blocks, fma_shared_bytes(), problem.stream, with(float{}));
  }
  const int shared = shared_bytes<128>();
  if (problem.type == Type::kBFloat16) {
    if (problem.vector)
      return launch(weight_product<bfloat16, true>, blocks, shared, problem.stream, with(bfloat16{}));
    return launch(weight_product<bfloat16, false>, blocks, shared, problem.stream, with(bfloat16{}));
  }
  if (problem.vector) return launch(weight_product<float16, true>, blocks, shared, problem.stream, with(float16{}));
  return launch(weight_product<float16, false>, blocks, shared, problem.stream, with(float16{}));
}

}  // namespace

cudaError_t gate_up_gradient(const Problem& problem, const void* preactivation_gradient, const void* rows,
                             WeightTarget gate, WeightTarget up) {
  const int64_t hidden = problem.hidden, inner = problem.inner;
  const Operand right{rows, 0, hidden, hidden};
  if (gate.wanted() && up.wanted())
    return launch_weights(problem, {preactivation_gradient, 0, 2 * inner, 2 * inner}, right, inner, gate, up);
  if (gate.wanted())
    return launch_weights(problem, {preactivation_gradient, 0, 2 * inner, inner}, right, inner, gate, gate);
  if (up.wanted())
    return launch_weights(problem, {preactivation_gradient, inner, 2 * inner, inner}, right, inner, up, up);
  return cudaSuccess;
}

cudaError_t down_gradient(const Problem& problem, const void* gradient, const void* product, WeightTarget target) {
  if (!target.wanted()) return cudaSuccess;
  const int64_t hidden = problem.hidden, inner = problem.inner;
  return launch_weights(problem, {gradient, 0, hidden, hidden}, {product, 0, inner, inner}, hidden, target, target);
}

}  // namespace ruda
