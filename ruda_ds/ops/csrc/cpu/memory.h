// Memory of large results.
#pragma once

#include <ATen/core/Tensor.h>

namespace ruda::cpu {

// The operators that allocate.
enum class Caller : int { forward, backward, rows, sums, sums_backward, count };

// What one call of an operator allocates.
class Pass {
 public:
  explicit Pass(Caller caller) : caller_(caller) {}
  ~Pass();
  // An uninitialised tensor. A large one takes memory that an earlier one has given back: the first touch of new pages
  // takes a tenth to a third of a backward pass. What lies ready is at most the sum over the operators of what the
  // largest call of each has asked for: about what one layer needs.
  at::Tensor fresh(at::IntArrayRef shape, const at::TensorOptions& options);

 private:
  Caller caller_;
  std::size_t asked_ = 0;
};

}  // namespace ruda::cpu
