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

void check_rows(const Tensor& rows) {
  const auto type = rows.scalar_type();
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.is_contiguous(), "rows are ", rows.sizes(), ", expected contiguous [N, H]");
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16, "rows are ", type, ", expected float32 or bfloat16");
}

RowSums checked(const Tensor& rows, const Tensor* more, const Tensor& slots, const Tensor* weights) {
  check_rows(rows);
  TORCH_CHECK_VALUE(slots.dim() == 2 && slots.scalar_type() == at::kLong && slots.is_contiguous(), "slots are ",
                    slots.sizes(), " ", slots.scalar_type(), ", expected contiguous int64 [T, K]");
  TORCH_CHECK_VALUE(!weights || (weights->scalar_type() == at::kFloat && weights->sizes() == slots.sizes() &&
                                 weights->is_contiguous()),
                    "weights are not contiguous float32 ", slots.sizes());
  if (more) {
    check_rows(*more);
    TORCH_CHECK_VALUE(more->scalar_type() == rows.scalar_type() && more->size(1) == rows.size(1), "more rows are ",
                      more->scalar_type(), " ", more->sizes(), ", expected ", rows.scalar_type(), " [.., ",
                      rows.size(1), "]");
  }
  const std::int64_t count = rows.size(0) + (more ? more->size(0) : 0);
  for (const std::int64_t slot : at::IntArrayRef(slots.const_data_ptr<std::int64_t>(), slots.numel()))
    TORCH_CHECK_INDEX(slot >= 0 && slot < count, "a slot is ", slot, ", expected a row of ", count);
  RowSums sums{};
  sums.scalar = rows.scalar_type() == at::kFloat ? Scalar::f32 : Scalar::bf16;
  sums.top_k = slots.size(1), sums.hidden = rows.size(1);
  sums.rows_split = rows.size(0);
  sums.rows[0] = rows.const_data_ptr(), sums.rows[1] = more ? more->const_data_ptr() : nullptr;
  sums.slots = slots.const_data_ptr<std::int64_t>();
  sums.weights = weights ? weights->const_data_ptr<float>() : nullptr;
  return sums;
}

void run(const RowSums& sums, long tokens) {
  const SumRows sum_rows = kernels().sum_rows;
  at::parallel_for(0, tokens, kGrain, [&](long first, long last) { sum_rows(sums, first, last); });
}

Tensor fresh_rows(const Tensor& like, std::int64_t count) {
  TORCH_CHECK_VALUE(like.dim() == 2 && count >= 0, "like is ", like.sizes(), " and count ", count,
                    ", expected [N, H] and 0 or more");
  return Pass(Caller::rows).fresh({count, like.size(1)}, like.options());
}

Tensor combine_rows(const Tensor& rows, const std::optional<Tensor>& more, const std::optional<Tensor>& weights,
                    const Tensor& slots) {
  RowSums sums = checked(rows, more ? &*more : nullptr, slots, weights ? &*weights : nullptr);
  Tensor out = Pass(Caller::sums).fresh({slots.size(0), rows.size(1)}, rows.options());
  sums.sums = out.mutable_data_ptr();
  run(sums, slots.size(0));
  return out;
}

std::tuple<Tensor, Tensor, Tensor> combine_rows_backward(
    const Tensor& gradient, const Tensor& rows, const Tensor& weights, const Tensor& slots, std::int64_t split,
    std::int64_t room) {
  RowSums sums = checked(rows, nullptr, slots, &weights);
  TORCH_CHECK_VALUE(gradient.scalar_type() == rows.scalar_type() && gradient.is_contiguous() &&
                        gradient.size(0) == slots.size(0) && gradient.size(1) == rows.size(1),
                    "the gradient is ", gradient.scalar_type(), " ", gradient.sizes(), ", expected contiguous ",
                    rows.scalar_type(), " [", slots.size(0), ", ", rows.size(1), "]");
  TORCH_CHECK_VALUE(split >= 0 && split <= rows.size(0) && room >= 0, "split is ", split, " and room ", room,
                    ", expected 0 to ", rows.size(0), " and 0 or more");
  Pass pass(Caller::sums_backward);
  Tensor first = pass.fresh({split + room, rows.size(1)}, rows.options());
  Tensor second = pass.fresh({rows.size(0) - split, rows.size(1)}, rows.options());
  Tensor weight_gradient = at::empty_like(weights);
  sums.gradient = gradient.const_data_ptr();
  sums.gradient_split = split;
  sums.row_gradient[0] = first.mutable_data_ptr(), sums.row_gradient[1] = second.mutable_data_ptr();
  sums.weight_gradient = weight_gradient.mutable_data_ptr<float>();
  run(sums, slots.size(0));
  return {first, second, weight_gradient};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ruda, m) {
  // [count, H], uninitialised, of the type of like [N, H].
  m.def("fresh_rows(Tensor like, int count) -> Tensor");
  // Slots from N on name rows of ``more``; no weights: ones.
  m.def("combine_rows(Tensor rows, Tensor? more, Tensor? weights, Tensor slots) -> Tensor");
  // -> of rows[:split], with ``room`` rows more, undefined; of rows[split:]; of the weights.
  m.def(
      "combine_rows_backward(Tensor gradient, Tensor rows, Tensor weights, Tensor slots, int split, int room)"
      " -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(ruda, CPU, m) {
  m.impl("fresh_rows", fresh_rows);
  m.impl("combine_rows", combine_rows);
  m.impl("combine_rows_backward", combine_rows_backward);
}

}  // namespace ruda::cpu
