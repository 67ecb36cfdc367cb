// The tasks for CPUs with avx512f, avx512bw, avx512dq, avx512vl, avx2, fma.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
// GCC 12 takes its own headers for users of unset values.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

#include "problem.h"

#define INLINE inline __attribute__((always_inline))

namespace ruda::cpu::avx512 {
namespace {
#include "vector_avx512.h"
// in this order
#include "pack.h"
#include "tile.h"
#include "product.h"
#include "activation.h"
#include "tasks.h"
#include "row_sums.h"
}  // namespace

extern const Kernels kernels = {"avx512", run, sum_rows};
}  // namespace ruda::cpu::avx512
#endif
