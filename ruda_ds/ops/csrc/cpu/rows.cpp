// Sums of rows on the CPU: one pass over memory, where a composition of torch's operators makes several for each of the K.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

#include "memory.h"
#include "problem.h"

namespace ruda::cpu {
namespace {

using at::Tensor;

// Tokens that are worth a thread's waking up.
constexpr long kGrain = 16;

RowSums checked(const Tensor& rows, const Tensor& slots, const Tensor* weights) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && slots.dim() == 2 && slots.scalar_type() == at::kLong && rows.is_contiguous() &&
                        slots.is_contiguous(),
                    "rows are ", rows.sizes(), " and slots ", slots.sizes(), " ", slots.scalar_type(),
                    ", expected contiguous [N, H] and int64 [T, K]");
  const auto type = rows.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16, "rows are ", type, ", expected float32 or bfloat16");
  TORCH_CHECK_VALUE(!weights || (weights->scalar_type() == at::kFloat && weights->sizes() == slots.sizes() &&
                                 weights->is_contiguous()),
                    "weights are not contiguous float32 ", slots.sizes());
  for (const std::int64_t slot : at::IntArrayRef(slots.const_data_ptr<std::int64_t>(), slots.numel()))
    TORCH_CHECK_INDEX(slot >= 0 && slot < rows.size(0), "a slot is ", slot, ", expected a row of ", rows.size(0));
  RowSums sums{};
  sums.scalar = type == at::kFloat ? Scalar::f32 : Scalar::bf16;
  sums.top_k = slots.size(1), sums.hidden = rows.size(1);
  sums.rows = rows.const_data_ptr(), sums.slots = slots.const_data_ptr<std::int64_t>();
  sums.weights = weights ? weights->const_data_ptr<float>() : nullptr;
  return sums;
}

void run(const RowSums& sums, long tokens) {
  const SumRows sum_rows = kernels().sum_rows;
  at::parallel_for(0, tokens, kGrain, [&](long first, long last) { sum_rows(sums, first, last); });
}

Tensor combine_rows(const Tensor& rows, const std::optional<Tensor>& weights, const Tensor& slots) {
  RowSums sums = checked(rows, slots, weights ? &*weights : nullptr);
  Tensor out = Pass().fresh({slots.size(0), rows.size(1)}, rows.options());
  sums.sums = out.mutable_data_ptr();
  run(sums, slots.size(0));
  return out;
}

std::tuple<Tensor, Tensor> combine_rows_backward(
    const Tensor& gradient, const Tensor& rows, const Tensor& weights, const Tensor& slots) {
  RowSums sums = checked(rows, slots, &weights);
  TORCH_CHECK_VALUE(gradient.scalar_type() == rows.scalar_type() && gradient.is_contiguous() &&
                        gradient.size(0) == slots.size(0) && gradient.size(1) == rows.size(1),
                    "the gradient is ", gradient.scalar_type(), " ", gradient.sizes(), ", expected contiguous ",
                    rows.scalar_type(), " [", slots.size(0), ", ", rows.size(1), "]");
  Tensor row_gradient = Pass().fresh(rows.sizes(), rows.options()), weight_gradient = at::empty_like(weights);
  sums.gradient = gradient.const_data_ptr();
  sums.row_gradient = row_gradient.mutable_data_ptr();
  sums.weight_gradient = weight_gradient.mutable_data_ptr<float>();
  run(sums, slots.size(0));
  return {row_gradient, weight_gradient};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ruda, m) {
  m.def("combine_rows(Tensor rows, Tensor? weights, Tensor slots) -> Tensor");
  m.def("combine_rows_backward(Tensor gradient, Tensor rows, Tensor weights, Tensor slots) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(ruda, CPU, m) {
  m.impl("combine_rows", combine_rows);
  m.impl("combine_rows_backward", combine_rows_backward);
}

}  // namespace ruda::cpu
