// The tasks for CPUs with avx2, fma.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#include <immintrin.h>

#include "problem.h"

#define INLINE inline __attribute__((always_inline))

namespace ruda::cpu::avx2 {
namespace {
#include "vector_avx2.h"
// in this order
#include "pack.h"
#include "tile.h"
#include "product.h"
#include "activation.h"
#include "tasks.h"
#include "row_sums.h"
}  // namespace

extern const Kernels kernels = {"avx2", run, sum_rows};
}  // namespace ruda::cpu::avx2
#endif
