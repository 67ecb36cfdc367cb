#include "cuda/dispatch.cuh"

namespace ruda {

cudaError_t gate_up(const Problem& problem, const void* rows, const void* gate, const void* up, void* preactivation,
                    void* product) {
  return launch_rows<GateUp>(problem, [&](auto& policy) {
    point(policy.input, rows);
    point(policy.gate, gate);
    point(policy.up, up);
    point(policy.preactivation, preactivation);
    point(policy.product, product);
    policy.pair_width = problem.type == Type::kFloat32 ? kFmaPairWidth : kPairWidth;
  });
}

cudaError_t down(const Problem& problem, const void* product, const void* weight, void* output) {
  return launch_rows<Down>(problem, [&](auto& policy) {
    point(policy.product, product);
    point(policy.down, weight);
    point(policy.output, output);
  });
}

}  // namespace ruda
