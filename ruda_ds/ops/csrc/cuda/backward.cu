#include "cuda/dispatch.cuh"

namespace ruda {

cudaError_t hidden_gradient(const Problem& problem, const void* gradient, const void* weight,
                            const void* preactivation, void* preactivation_gradient, void* product) {
  return launch_rows<HiddenGradient>(problem, [&](auto& policy) {
    point(policy.gradient, gradient);
    point(policy.down, weight);
    point(policy.preactivation, preactivation);
    point(policy.preactivation_gradient, preactivation_gradient);
    point(policy.product, product);
  });
}

cudaError_t rows_gradient(const Problem& problem, const void* preactivation_gradient, const void* gate,
                          const void* up, void* gradient) {
  return launch_rows<RowsGradient>(problem, [&](auto& policy) {
    point(policy.preactivation_gradient, preactivation_gradient);
    point(policy.gate, gate);
    point(policy.up, up);
    point(policy.rows_gradient, gradient);
  });
}

}  // namespace ruda
