// Memory of large results.
#pragma once

#include <ATen/core/Tensor.h>

namespace ruda::cpu {

// An uninitialised tensor. A large one lies in huge pages where the kernel has them at hand: 4 KiB at a time its first
// touch is four times as slow, and takes a tenth to a quarter of a backward pass.
at::Tensor fresh(at::IntArrayRef shape, const at::TensorOptions& options);

}  // namespace ruda::cpu
