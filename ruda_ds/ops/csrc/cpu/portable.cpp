// The tasks for any CPU.
#include "problem.h"

#define INLINE inline __attribute__((always_inline))

namespace ruda::cpu::portable {
namespace {
#include "vector_portable.h"
// in this order
#include "pack.h"
#include "tile.h"
#include "product.h"
#include "activation.h"
#include "tasks.h"
#include "row_sums.h"
}  // namespace

extern const Kernels kernels = {"portable", run, sum_rows};
}  // namespace ruda::cpu::portable
