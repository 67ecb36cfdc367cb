// The CPU operators: checks, allocation, and threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "memory.h"
#include "schedule.h"

namespace ruda::cpu {
namespace {

using at::Tensor;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

// This thread's memory, kept for its next task.
char* scratch(long bytes) {
  constexpr std::size_t alignment = 64;
  thread_local std::unique_ptr<char, Free> memory;
  thread_local long size = 0;
  if (size < bytes) {
    size = 0;
    memory.reset(static_cast<char*>(std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)));
    TORCH_CHECK(memory, "fused_experts: no memory for ", bytes, " bytes of a thread's own");
    size = bytes;
  }
  return memory.get();
}

void run(const Problem& problem, const std::vector<Stage>& stages, int threads) {
  const RunTask run_task = kernels().run;
  const long bytes = scratch_bytes(problem);
  for (const Stage& stage : stages) {
    std::atomic<std::size_t> next{0};
    // Every thread takes the next task until there is none: one call of the lambda does them all where at::parallel_for
    // does not go parallel. It takes one ahead, to know what to fetch.
    at::parallel_for(0, std::min<long>(threads, stage.size()), 1, [&](long, long) {
      char* memory = scratch(bytes);
      const auto take = [&] {
        const std::size_t at = next.fetch_add(1);
        return at < stage.size() ? &stage[at] : nullptr;
      };
      for (const Task* task = take(); task;) {
        const Task* const after = take();
        run_task(problem, *task, after, memory);
        task = after;
      }
    });
  }
}

void check_like(const char* name, const Tensor& tensor, at::IntArrayRef shape, at::ScalarType type) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "fused_experts: ", name, " is on ", tensor.device(),
                    ", expected the CPU");
  TORCH_CHECK_VALUE(tensor.scalar_type() == type && tensor.sizes() == shape, "fused_experts: ", name, " is ",
                    tensor.scalar_type(), " ", tensor.sizes(), ", expected ", type, " ", shape);
}

// Where the rows by expert lie in a matrix of ``size`` rows, each in one of its own; the others are zeroed.
struct Places {
  Tensor index;
  std::vector<std::int64_t> empty;

  Places(const char* name, const Tensor& given, long count, long size) {
    check_like(name, given, {count}, at::kLong);
    index = given.contiguous();
    std::vector<bool> taken(size);
    for (const std::int64_t at : at::IntArrayRef(pointer(), count)) {
      TORCH_CHECK_VALUE(at >= 0 && at < size && !taken[at], "fused_experts: ", name, " holds ", at,
                        ", expected each number below ", size, " once at most");
      taken[at] = true;
    }
    for (long at = 0; at < size; ++at)
      if (!taken[at]) empty.push_back(at);
  }
  const std::int64_t* pointer() const { return index.const_data_ptr<std::int64_t>(); }
  void zero_empty(const Tensor& matrix) const {
    const long bytes = matrix.size(1) * matrix.element_size();
    for (const std::int64_t at : empty) std::memset(static_cast<char*>(matrix.mutable_data_ptr()) + at * bytes, 0, bytes);
  }
};

using MaybePlaces = std::optional<Places>;

// A problem with its inputs checked and made contiguous; it keeps the copies alive.
struct Inputs {
  Problem problem{};
  Tensor rows, offsets, gate, up, down;
  MaybePlaces order, places;
  long size;  // rows of the output

  Inputs(const Tensor& rows_, const Tensor& offsets_, const Tensor& gate_, const Tensor& up_, const Tensor& down_,
         const std::optional<Tensor>& order_, const std::optional<Tensor>& places_, long size_) {
    TORCH_CHECK_VALUE(rows_.dim() == 2 && gate_.dim() == 3, "fused_experts: rows are ", rows_.sizes(), " and gate is ",
                      gate_.sizes(), ", expected [R, H] and [L, F, H]");
    const auto type = rows_.scalar_type();
    TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16, "fused_experts: rows are ", type,
                      ", on a CPU expected float32 or bfloat16");
    const long experts = gate_.size(0), inner = gate_.size(1), hidden = rows_.size(1);
    check_like("rows", rows_, rows_.sizes(), type);
    check_like("offsets", offsets_, {experts + 1}, at::kLong);
    check_like("gate", gate_, {experts, inner, hidden}, type);
    check_like("up", up_, {experts, inner, hidden}, type);
    check_like("down", down_, {experts, hidden, inner}, type);
    rows = rows_.contiguous(), offsets = offsets_.contiguous();
    gate = gate_.contiguous(), up = up_.contiguous(), down = down_.contiguous();
    const std::int64_t* bound = offsets.const_data_ptr<std::int64_t>();
    const long count = order_ ? order_->numel() : rows.size(0);
    TORCH_CHECK_VALUE(bound[0] == 0 && bound[experts] == count && std::is_sorted(bound, bound + experts + 1),
                      "fused_experts: offsets go from ", bound[0], " to ", bound[experts], ", expected 0 to ", count,
                      " without a step back");
    size = places_ ? size_ : count;
    if (order_) problem.order = order.emplace("order", *order_, count, rows.size(0)).pointer();
    if (places_) problem.places = places.emplace("places", *places_, count, size).pointer();
    problem.scalar = type == at::kFloat ? Scalar::f32 : Scalar::bf16;
    problem.rows = count, problem.experts = experts, problem.hidden = hidden, problem.inner = inner;
    problem.offsets = bound;
    problem.x = rows.const_data_ptr(), problem.gate = gate.const_data_ptr(), problem.up = up.const_data_ptr();
    problem.down = down.const_data_ptr();
  }
};

// A fresh matrix for rows at their places.
Tensor fresh_at(Pass& pass, const MaybePlaces& places, long size, const Tensor& like) {
  Tensor made = pass.fresh({size, like.size(1)}, like.options());
  if (places) places->zero_empty(made);
  return made;
}

std::tuple<Tensor, Tensor> fused_experts(
    const Tensor& rows, const Tensor& offsets, const Tensor& gate, const Tensor& up, const Tensor& down,
    const std::optional<Tensor>& order, const std::optional<Tensor>& places, std::int64_t size, bool keep) {
  Inputs inputs(rows, offsets, gate, up, down, order, places, size);
  Problem& p = inputs.problem;
  Pass pass(Caller::forward);
  Tensor output = fresh_at(pass, inputs.places, inputs.size, inputs.rows);
  Tensor preactivation = keep ? pass.fresh({p.rows, 2 * p.inner}, rows.options()) : at::empty({0}, rows.options());
  Tensor activation = pass.fresh({p.rows, p.inner}, rows.options());
  p.output = output.mutable_data_ptr(), p.activation = activation.mutable_data_ptr();
  if (keep) p.preactivation = preactivation.mutable_data_ptr();
  const int threads = at::get_num_threads();
  run(p, forward_stages(p, threads), threads);
  return {output, preactivation};
}

// The tensor for a weight's gradient, which is returned unless it is a given buffer.
Tensor weight_gradient(Pass& pass, Problem& p, int which, const char* name, bool needed, const Tensor& weight,
                       const std::optional<Tensor>& buffer) {
  Tensor nothing = at::empty({0}, weight.options());
  if (!needed) return nothing;
  if (!buffer) {
    Tensor made = pass.fresh(weight.sizes(), weight.options());
    p.weight_gradient[which] = made.mutable_data_ptr();
    return made;
  }
  check_like(name, *buffer, weight.sizes(), at::kFloat);
  TORCH_CHECK_VALUE(buffer->is_contiguous(), "fused_experts: ", name, " has strides ", buffer->strides(),
                    ", expected a contiguous tensor");
  p.add[which] = true;
  p.weight_gradient[which] = buffer->mutable_data_ptr();
  return nothing;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_experts_backward(
    const Tensor& gradient, const Tensor& rows, const Tensor& offsets, const Tensor& gate, const Tensor& up,
    const Tensor& down, const Tensor& preactivation, std::array<bool, 4> needs,
    const std::optional<Tensor>& gate_buffer, const std::optional<Tensor>& up_buffer,
    const std::optional<Tensor>& down_buffer, const std::optional<Tensor>& order,
    const std::optional<Tensor>& places) {
  Inputs inputs(rows, offsets, gate, up, down, order, places, gradient.size(0));
  Problem& p = inputs.problem;
  check_like("gradient", gradient, {inputs.size, p.hidden}, rows.scalar_type());
  check_like("preactivation", preactivation, {p.rows, 2 * p.inner}, rows.scalar_type());
  const Tensor given = gradient.contiguous(), pre = preactivation.contiguous();
  p.gradient = given.const_data_ptr();
  p.preactivation = const_cast<void*>(pre.const_data_ptr());  // only read by this pass
  Pass pass(Caller::backward);
  Tensor found = needs[0] ? fresh_at(pass, inputs.order, rows.size(0), inputs.rows) : at::empty({0}, rows.options());
  if (needs[0]) p.x_gradient = found.mutable_data_ptr();
  Tensor gate_found = weight_gradient(pass, p, 0, "gate_gradient", needs[1], gate, gate_buffer);
  Tensor up_found = weight_gradient(pass, p, 1, "up_gradient", needs[2], up, up_buffer);
  Tensor down_found = weight_gradient(pass, p, 2, "down_gradient", needs[3], down, down_buffer);
  Tensor activation, inner;
  if (needs[3]) activation = pass.fresh({p.rows, p.inner}, rows.options());
  if (needs[0] || needs[1] || needs[2]) inner = pass.fresh(pre.sizes(), rows.options());
  if (activation.defined()) p.activation = activation.mutable_data_ptr();
  if (inner.defined()) p.preactivation_gradient = inner.mutable_data_ptr();
  const int threads = at::get_num_threads();
  run(p, backward_stages(p, threads), threads);
  return {found, gate_found, up_found, down_found};
}

std::string cpu_kernels(std::string_view name) {
  if (!name.empty()) {
    const Kernels* named = kernels_named(std::string(name).c_str());
    TORCH_CHECK_VALUE(named, "fused_experts: this CPU cannot run the kernels ", name);
    choose_kernels(*named);
  }
  return kernels().name;
}

TORCH_LIBRARY_IMPL(ruda, CPU, m) {
  m.impl("fused_experts", fused_experts);
  m.impl("fused_experts_backward", fused_experts_backward);
}

TORCH_LIBRARY_IMPL(ruda, CompositeExplicitAutograd, m) { m.impl("cpu_kernels", cpu_kernels); }

}  // namespace
}  // namespace ruda::cpu
