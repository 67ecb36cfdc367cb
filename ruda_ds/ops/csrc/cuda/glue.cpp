// The operators of register.cpp on CUDA tensors: checks, memory and the order of the launches. Nothing waits for the
// card.
//
// Offsets are not looked at here, since they lie on the card: they must go from 0 to R without a step back.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "cuda/launch.h"

namespace ruda {
namespace {

using at::Tensor;

void check_like(const char* name, const Tensor& tensor, at::IntArrayRef shape, at::ScalarType type, at::Device device) {
  TORCH_CHECK_VALUE(tensor.device() == device, "fused_experts: ", name, " is on ", tensor.device(), ", the rows on ",
                    device);
  TORCH_CHECK_VALUE(tensor.scalar_type() == type && tensor.sizes() == shape, "fused_experts: ", name, " is ",
                    tensor.scalar_type(), " ", tensor.sizes(), ", expected ", type, " ", shape);
}

Type type_of(at::ScalarType type) {
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "fused_experts: rows are ", type,
                    ", on CUDA expected float32, bfloat16 or float16");
  return type == at::kFloat ? Type::kFloat32 : type == at::kBFloat16 ? Type::kBFloat16 : Type::kFloat16;
}

void check_card(at::Device device) {
  int major = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()));
  TORCH_CHECK(major >= 8, "fused_experts: ", device, " has compute capability ", major,
              ".x, the kernels need 8.0 or newer");
}

Tensor fresh(at::IntArrayRef shape, const at::TensorOptions& options) {
  return at::empty(shape, options.memory_format(at::MemoryFormat::Contiguous));
}

bool aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

// Inputs that have been checked and made contiguous, and the sizes of the problem.
struct Inputs {
  c10::cuda::CUDAGuard guard;
  Tensor rows, offsets, gate, up, down, starts;
  Problem problem{};

  Inputs(const Tensor& rows_, const Tensor& offsets_, const Tensor& gate_, const Tensor& up_, const Tensor& down_)
      : guard(rows_.device()) {
    TORCH_CHECK_VALUE(rows_.dim() == 2 && gate_.dim() == 3, "fused_experts: rows are ", rows_.sizes(), " and gate is ",
                      gate_.sizes(), ", expected [R, H] and [L, F, H]");
    const auto type = rows_.scalar_type();
    const int64_t experts = gate_.size(0), inner = gate_.size(1), hidden = rows_.size(1);
    problem.type = type_of(type);
    check_card(rows_.device());
    check_like("offsets", offsets_, {experts + 1}, at::kLong, rows_.device());
    check_like("gate", gate_, {experts, inner, hidden}, type, rows_.device());
    check_like("up", up_, {experts, inner, hidden}, type, rows_.device());
    check_like("down", down_, {experts, hidden, inner}, type, rows_.device());
    rows = rows_.contiguous(), offsets = offsets_.contiguous();
    gate = gate_.contiguous(), up = up_.contiguous(), down = down_.contiguous();
    starts = fresh({experts + 1}, offsets.options().dtype(at::kInt));
    problem.rows = rows.size(0), problem.experts = static_cast<int>(experts);
    problem.hidden = hidden, problem.inner = inner;
    problem.offsets = offsets.const_data_ptr<int64_t>();
    problem.starts = starts.mutable_data_ptr<int32_t>();
    const int64_t chunk = 16 / rows.element_size();
    problem.vector = hidden % chunk == 0 && inner % chunk == 0 && aligned(rows) && aligned(gate) && aligned(up) &&
                     aligned(down);
    problem.stream = c10::cuda::getCurrentCUDAStream();
  }

  // Once nothing changes `problem.vector` any more.
  void schedule() {
    problem.tile_rows = rows_of_a_tile(problem.type, problem.rows, problem.experts, problem.vector);
    C10_CUDA_CHECK(plan(problem));
  }
};

void check_sorted(const std::optional<Tensor>& order, const std::optional<Tensor>& places) {
  TORCH_CHECK_VALUE(!order && !places, "fused_experts: on a card rows are expected to lie sorted by expert");
}

std::tuple<Tensor, Tensor> fused_experts(
    const Tensor& rows, const Tensor& offsets, const Tensor& gate, const Tensor& up, const Tensor& down,
    const std::optional<Tensor>& order, const std::optional<Tensor>& places, int64_t, bool keep) {
  check_sorted(order, places);
  Inputs inputs(rows, offsets, gate, up, down);
  const Problem& problem = inputs.problem;
  inputs.schedule();
  Tensor output = fresh({problem.rows, problem.hidden}, rows.options());
  Tensor preactivation = fresh({problem.rows, 2 * problem.inner}, rows.options());
  Tensor product = fresh({problem.rows, problem.inner}, rows.options());
  C10_CUDA_CHECK(gate_up(problem, inputs.rows.const_data_ptr(), inputs.gate.const_data_ptr(),
                         inputs.up.const_data_ptr(), preactivation.mutable_data_ptr(), product.mutable_data_ptr()));
  C10_CUDA_CHECK(ruda::down(problem, product.const_data_ptr(), inputs.down.const_data_ptr(),
                            output.mutable_data_ptr()));
  return {output, keep ? preactivation : fresh({0}, rows.options())};
}

// A weight's gradient: the tensor to return, without elements where it is not wanted or is added to a buffer.
struct WeightResult {
  Tensor returned;
  WeightTarget target{nullptr, nullptr};

  WeightResult(const char* name, bool needed, const Tensor& weight, const std::optional<Tensor>& buffer) {
    returned = fresh({0}, weight.options());
    if (!needed) return;
    if (!buffer) {
      returned = fresh(weight.sizes(), weight.options());
      target.made = returned.mutable_data_ptr();
      return;
    }
    check_like(name, *buffer, weight.sizes(), at::kFloat, weight.device());
    TORCH_CHECK_VALUE(buffer->is_contiguous(), "fused_experts: ", name, " has strides ", buffer->strides(),
                      ", expected a contiguous tensor");
    target.buffer = buffer->mutable_data_ptr<float>();
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_experts_backward(
    const Tensor& gradient_, const Tensor& rows, const Tensor& offsets, const Tensor& gate, const Tensor& up,
    const Tensor& down, const Tensor& preactivation_, std::array<bool, 4> needs,
    const std::optional<Tensor>& gate_buffer, const std::optional<Tensor>& up_buffer,
    const std::optional<Tensor>& down_buffer, const std::optional<Tensor>& order,
    const std::optional<Tensor>& places) {
  check_sorted(order, places);
  Inputs inputs(rows, offsets, gate, up, down);
  Problem& problem = inputs.problem;
  check_like("gradient", gradient_, rows.sizes(), rows.scalar_type(), rows.device());
  check_like("preactivation", preactivation_, {problem.rows, 2 * problem.inner}, rows.scalar_type(), rows.device());
  const Tensor gradient = gradient_.contiguous(), preactivation = preactivation_.contiguous();
  problem.vector = problem.vector && aligned(gradient) && aligned(preactivation);
  inputs.schedule();
  WeightResult gate_result("gate_gradient", needs[1], gate, gate_buffer);
  WeightResult up_result("up_gradient", needs[2], up, up_buffer);
  WeightResult down_result("down_gradient", needs[3], down, down_buffer);
  Tensor rows_result = fresh(needs[0] ? rows.sizes() : at::IntArrayRef{0}, rows.options());
  Tensor inner_gradient = fresh(preactivation.sizes(), rows.options());
  Tensor product = fresh({problem.rows, problem.inner}, rows.options());
  C10_CUDA_CHECK(hidden_gradient(problem, gradient.const_data_ptr(), inputs.down.const_data_ptr(),
                                 preactivation.const_data_ptr(), inner_gradient.mutable_data_ptr(),
                                 product.mutable_data_ptr()));
  if (needs[0])
    C10_CUDA_CHECK(rows_gradient(problem, inner_gradient.const_data_ptr(), inputs.gate.const_data_ptr(),
                                 inputs.up.const_data_ptr(), rows_result.mutable_data_ptr()));
  C10_CUDA_CHECK(gate_up_gradient(problem, inner_gradient.const_data_ptr(), inputs.rows.const_data_ptr(),
                                  gate_result.target, up_result.target));
  C10_CUDA_CHECK(down_gradient(problem, gradient.const_data_ptr(), product.const_data_ptr(), down_result.target));
  return {rows_result, gate_result.returned, up_result.returned, down_result.returned};
}

// SwiGLU alone, for products that another library computes: silu(gate) * up.
Tensor swiglu_of(const Tensor& gate_, const Tensor& up_) {
  const c10::cuda::CUDAGuard guard(gate_.device());
  const Type type = type_of(gate_.scalar_type());
  check_like("up", up_, gate_.sizes(), gate_.scalar_type(), gate_.device());
  const Tensor gate = gate_.contiguous(), up = up_.contiguous();
  Tensor product = fresh(gate.sizes(), gate.options());
  C10_CUDA_CHECK(swiglu(type, gate.const_data_ptr(), up.const_data_ptr(), product.mutable_data_ptr(), gate.numel(),
                        c10::cuda::getCurrentCUDAStream()));
  return product;
}

// -> the gradients of gate and up, and silu(gate) * up again.
std::tuple<Tensor, Tensor, Tensor> swiglu_backward_of(const Tensor& gradient_, const Tensor& gate_, const Tensor& up_) {
  const c10::cuda::CUDAGuard guard(gate_.device());
  const Type type = type_of(gate_.scalar_type());
  check_like("up", up_, gate_.sizes(), gate_.scalar_type(), gate_.device());
  check_like("gradient", gradient_, gate_.sizes(), gate_.scalar_type(), gate_.device());
  const Tensor gradient = gradient_.contiguous(), gate = gate_.contiguous(), up = up_.contiguous();
  Tensor gate_gradient = fresh(gate.sizes(), gate.options()), up_gradient = fresh(gate.sizes(), gate.options());
  Tensor product = fresh(gate.sizes(), gate.options());
  const SwigluPointers at{gradient.const_data_ptr(),        gate.const_data_ptr(),
                          up.const_data_ptr(),              gate_gradient.mutable_data_ptr(),
                          up_gradient.mutable_data_ptr(),   product.mutable_data_ptr()};
  C10_CUDA_CHECK(swiglu_gradient(type, at, gate.numel(), c10::cuda::getCurrentCUDAStream()));
  return {gate_gradient, up_gradient, product};
}

TORCH_LIBRARY_FRAGMENT(ruda, m) {
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(ruda, CUDA, m) {
  m.impl("fused_experts", fused_experts);
  m.impl("fused_experts_backward", fused_experts_backward);
  m.impl("swiglu", swiglu_of);
  m.impl("swiglu_backward", swiglu_backward_of);
}

}  // namespace
}  // namespace ruda
