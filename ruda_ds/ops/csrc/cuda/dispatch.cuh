// From a Problem to the kernel that was compiled for it. Included by the .cu files only.
#pragma once

#include "cuda/fma_kernel.cuh"
#include "cuda/launch.h"
#include "cuda/mma_kernel.cuh"

namespace ruda {

template <class T, template <class> class Policy>
Policy<T> begin_policy(const Problem& problem) {
  Policy<T> policy{};
  policy.offsets = problem.offsets;
  policy.starts = problem.starts;
  policy.experts = problem.experts;
  policy.hidden = problem.hidden;
  policy.inner = problem.inner;
  return policy;
}

template <class Policy>
int64_t row_blocks(const Problem& problem, const Policy& policy, int64_t tile_columns) {
  const int64_t wide = Policy::kDual ? tile_columns / 2 : tile_columns;
  return tile_bound(problem.rows, problem.experts, problem.tile_rows) * ((policy.columns() + wide - 1) / wide);
}

// Unaligned operands take the small tile only: they are rare, and every pair is one more kernel to compile.
template <class T, class Policy>
cudaError_t launch_mma(const Problem& problem, const Policy& policy) {
  const int64_t blocks = row_blocks(problem, policy, kColumns);
  if (!problem.vector)
    return launch(row_product<T, 32, false, Policy>, blocks, shared_bytes<32>(), problem.stream, policy);
  if (problem.tile_rows == 32)
    return launch(row_product<T, 32, true, Policy>, blocks, shared_bytes<32>(), problem.stream, policy);
  return launch(row_product<T, 128, true, Policy>, blocks, shared_bytes<128>(), problem.stream, policy);
}

template <class Policy>
cudaError_t launch_fma(const Problem& problem, const Policy& policy) {
  const int64_t blocks = row_blocks(problem, policy, kFmaTile);
  if (problem.vector)
    return launch(fma_row_product<true, Policy>, blocks, fma_shared_bytes(), problem.stream, policy);
  return launch(fma_row_product<false, Policy>, blocks, fma_shared_bytes(), problem.stream, policy);
}

// Fills a policy for the problem's dtype and launches its product. `fill` is a generic function of a policy.
template <template <class> class Policy, class Fill>
cudaError_t launch_rows(const Problem& problem, const Fill& fill) {
  if (problem.rows == 0 || problem.experts == 0) return cudaSuccess;
  if (problem.type == Type::kFloat32) {
    auto policy = begin_policy<float, Policy>(problem);
    fill(policy);
    return launch_fma(problem, policy);
  }
  if (problem.type == Type::kBFloat16) {
    auto policy = begin_policy<bfloat16, Policy>(problem);
    fill(policy);
    return launch_mma<bfloat16>(problem, policy);
  }
  auto policy = begin_policy<float16, Policy>(problem);
  fill(policy);
  return launch_mma<float16>(problem, policy);
}

template <class To, class From>
void point(To*& to, From* from) {
  to = static_cast<To*>(from);
}

}  // namespace ruda
