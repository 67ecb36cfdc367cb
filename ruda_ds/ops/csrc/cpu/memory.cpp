// Huge pages, unless the kernel has to make room for them first.
#include "memory.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>

#ifdef __linux__
#include <sys/mman.h>
#include <time.h>
#endif

namespace ruda::cpu {

#ifdef __linux__
namespace {

constexpr std::uintptr_t kPage = 2 << 20;
// What small pages reach; free huge pages are four times as fast. But a kernel that has to make room for them first, or
// a virtual machine whose host has to, can be four times as slow: no thread goes on that has lost so much time.
constexpr double kSmallPageBytesPerSecond = 2.4e9;
constexpr double kMostSecondsLost = 4e-3;
// And for so long, the other tensors of the same pass, none is asked for.
constexpr double kPauseSeconds = 0.3;
std::atomic<double> paused_until{0};

double seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Touches the pages of [begin, end) from all threads, until one finds it slow; false if one did.
bool touch(std::uintptr_t begin, std::uintptr_t end) {
  std::atomic<std::uintptr_t> next{begin};
  std::atomic<bool> slow{false};
  at::parallel_for(0, at::get_num_threads(), 1, [&](std::int64_t, std::int64_t) {
    // This thread's own time: waiting for a processor is not the page's fault.
    const double start = seconds(CLOCK_THREAD_CPUTIME_ID);
    double fair = kMostSecondsLost;
    for (std::uintptr_t at; !slow && (at = next.fetch_add(kPage)) < end;) {
      *reinterpret_cast<volatile char*>(at) = 0;
      fair += kPage / kSmallPageBytesPerSecond;
      if (seconds(CLOCK_THREAD_CPUTIME_ID) - start > fair) slow = true;
    }
  });
  return !slow;
}

void use_huge_pages(const at::Tensor& tensor) {
  const auto data = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const std::uintptr_t begin = (data + kPage - 1) / kPage * kPage, end = (data + tensor.nbytes()) / kPage * kPage;
  if (end <= begin || seconds(CLOCK_MONOTONIC) < paused_until) return;
  if (madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) || touch(begin, end)) return;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_NOHUGEPAGE);
  paused_until = seconds(CLOCK_MONOTONIC) + kPauseSeconds;
}

}  // namespace
#endif

at::Tensor fresh(at::IntArrayRef shape, const at::TensorOptions& options) {
  at::Tensor made = at::empty(shape, options);
#ifdef __linux__
  use_huge_pages(made);
#endif
  return made;
}

}  // namespace ruda::cpu
