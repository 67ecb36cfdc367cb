// Which instruction set the kernels use.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "problem.h"

namespace ruda::cpu {

#if defined(__x86_64__)
namespace avx512_bf16 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

namespace {

struct Choice {
  const Kernels* kernels;
  bool there;
  const char* level;  // the name that RUDA_CPU_LEVEL has for it
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Widest first.
const Choice* choices(int& count) {
  static const Choice all[] = {
#if defined(__x86_64__)
      {&avx512_bf16::kernels, has_avx512() && __builtin_cpu_supports("avx512bf16"), "avx512"},
      {&avx512::kernels, has_avx512(), "avx512"},
      {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "avx2"},
#endif
      {&portable::kernels, true, "default"},
  };
  count = static_cast<int>(sizeof(all) / sizeof(all[0]));
  return all;
}

const Kernels* best() {
  const char* level = std::getenv("RUDA_CPU_LEVEL");
  int count = 0;
  const Choice* all = choices(count);
  bool allowed = !level || !*level;
  for (int i = 0; i < count; ++i) {
    allowed = allowed || !std::strcmp(all[i].level, level);
    if (allowed && all[i].there) return all[i].kernels;
  }
  return &portable::kernels;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  if (!chosen.load()) chosen.store(best());
  return *chosen.load();
}

const Kernels* kernels_named(const char* name) {
  int count = 0;
  const Choice* all = choices(count);
  for (int i = 0; i < count; ++i)
    if (all[i].there && !std::strcmp(all[i].kernels->name, name)) return all[i].kernels;
  return nullptr;
}

void choose_kernels(const Kernels& wanted) { chosen.store(&wanted); }

}  // namespace ruda::cpu
