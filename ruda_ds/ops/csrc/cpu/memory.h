// Memory of large results.
#pragma once

#include <ATen/core/Tensor.h>

namespace ruda::cpu {

// What one pass allocates.
class Pass {
 public:
  ~Pass();
  // An uninitialised tensor. A large one takes memory that an earlier one has given back: the first touch of new pages
  // takes a tenth to a third of a backward pass. What lies ready is at most what the largest pass has asked for.
  at::Tensor fresh(at::IntArrayRef shape, const at::TensorOptions& options);

 private:
  std::size_t asked_ = 0;
};

}  // namespace ruda::cpu
