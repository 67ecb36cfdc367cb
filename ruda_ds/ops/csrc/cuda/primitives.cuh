// The machine's instructions, one function each. With RUDA_EMULATE the tests give a CPU version of the same names.
#pragma once

#include "common/layout.h"

#if defined(RUDA_EMULATE)
#include "emulate.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define RUDA_DEVICE __device__ __forceinline__
#define RUDA_KERNEL(threads) __global__ void __launch_bounds__(threads)

namespace ruda {

using bfloat16 = __nv_bfloat16;
using float16 = __half;

RUDA_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
RUDA_DEVICE int64_t block_index() { return static_cast<int64_t>(blockIdx.x); }
RUDA_DEVICE int64_t block_count() { return static_cast<int64_t>(gridDim.x); }
RUDA_DEVICE void sync_threads() { __syncthreads(); }
RUDA_DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

RUDA_DEVICE float to_float(float x) { return x; }
RUDA_DEVICE float to_float(bfloat16 x) { return __bfloat162float(x); }
RUDA_DEVICE float to_float(float16 x) { return __half2float(x); }
RUDA_DEVICE void from_float(float& to, float x) { to = x; }
RUDA_DEVICE void from_float(bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
RUDA_DEVICE void from_float(float16& to, float x) { to = __float2half_rn(x); }

RUDA_DEVICE float exponential(float x) { return expf(x); }

RUDA_DEVICE unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Copies `bytes` (0 to 16) and fills the rest of the 16 with zeros; both addresses aligned to 16.
RUDA_DEVICE void copy_async(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
RUDA_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most `Pending` of the last groups are under way.
template <int Pending>
RUDA_DEVICE void await_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

RUDA_DEVICE void load_matrices(uint32_t (&to)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(shared))
               : "memory");
}
RUDA_DEVICE void load_matrices_transposed(uint32_t (&to)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(shared))
               : "memory");
}

// sum[16 x 8] += a[16 x 16] b[16 x 8], float32 sums (m16n8k16).
RUDA_DEVICE void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
RUDA_DEVICE void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Launches a kernel of blocks of kThreads, with `shared` bytes of shared memory; no blocks, no launch.
template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, int64_t blocks, int shared, cudaStream_t stream, const Arguments&... arguments) {
  if (blocks <= 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (shared > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (status != cudaSuccess) return status;
  }
  kernel<<<static_cast<unsigned>(blocks), kThreads, shared, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace ruda

#endif
