// Runs the kernels on the CPU, to find faulty indices, missing barriers and bank conflicts where there is no card.
//
// Every thread of a block is a fibre. cp.async really is late here: the bytes arrive at the wait that demands them.
// ldmatrix and mma.m16n8k16 act on a warp once all its lanes have come, with the register layouts of the PTX manual.
// In every round some warps, drawn anew, go on, their threads in a drawn order, so that code that leans on an order
// fails. No timing is modelled.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "cuda_runtime_api.h"

#define RUDA_DEVICE inline
#define RUDA_KERNEL(threads) inline void

namespace ruda {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {  // instantiated by the dispatch, never run here: only its product instruction differs
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
  const uint32_t wide = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline float to_float(float16) { std::abort(); }
inline void from_float(float& to, float x) { to = x; }
inline void from_float(bfloat16& to, float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if (x != x) to.bits = 0x7fff;
  else to.bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}
inline void from_float(float16&, float) { std::abort(); }
inline float exponential(float x) { return std::exp(x); }

namespace emulator {

constexpr int kShared = 160 * 1024;
constexpr int kStack = 64 * 1024;

enum class Wait { kNothing, kBlock, kWarp, kDone };
enum class Action { kNone, kLoad, kLoadTransposed, kMultiply };

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  Wait wait;
  Action action;
  const void* address;
  uint32_t* registers;
  const uint32_t* a;
  uint32_t b[2];
  float* sums;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
};

struct Machine {
  ucontext_t main;
  std::vector<Thread> threads;
  int current = 0;
  int64_t block = 0, blocks = 0;
  std::vector<char> shared = std::vector<char>(kShared + 128);
  int shared_bytes = 0;
  std::function<void()> kernel;
  std::mt19937 random{1};
  bool inside = false, failed = false;
  int64_t conflicts = 0;
};

inline Machine machine;

inline Thread& self() { return machine.threads[machine.current]; }

// The launch ends with an error; a thread that fails is left where it is.
inline void fail(const char* what) {
  if (!machine.failed)
    std::fprintf(stderr, "emulator: %s (block %lld, thread %d)\n", what, static_cast<long long>(machine.block),
                 machine.current);
  machine.failed = true;
  if (machine.inside) swapcontext(&self().context, &machine.main);
}
inline char* shared_begin() {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(machine.shared.data());
  return reinterpret_cast<char*>((begin + 127) / 128 * 128);
}
inline void check_shared(const void* at, int bytes) {
  const char* first = static_cast<const char*>(at);
  if (first < shared_begin() || first + bytes > shared_begin() + machine.shared_bytes) fail("outside shared memory");
  if (reinterpret_cast<uintptr_t>(at) % 16) fail("shared address not aligned to 16 bytes");
}
inline void pause(Wait wait) {
  Thread& thread = self();
  thread.wait = wait;
  swapcontext(&thread.context, &machine.main);
}
inline void collective(Action action) {
  self().action = action;
  pause(Wait::kWarp);
}

// The eight addresses of a phase must lie in eight different groups of four banks.
inline void count_conflicts(Thread* lanes) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned seen = 0;
    for (int row = 0; row < 8; ++row)
      seen |= 1u << (reinterpret_cast<uintptr_t>(lanes[matrix * 8 + row].address) / 16 % 8);
    machine.conflicts += 8 - __builtin_popcount(seen);
  }
}

inline void act_load(Thread* lanes, bool transposed) {
  count_conflicts(lanes);
  for (int lane = 0; lane < 32; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (int i = 0; i < 2; ++i) {
        const int row = transposed ? lane % 4 * 2 + i : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + i;
        std::memcpy(&pair[i], static_cast<const char*>(lanes[matrix * 8 + row].address) + column * 2, 2);
      }
      std::memcpy(&lanes[lane].registers[matrix], pair, 4);
    }
}

inline float half_of(uint32_t pair, int which) {
  return to_float(bfloat16{static_cast<uint16_t>(which ? pair >> 16 : pair)});
}

inline void act_multiply(Thread* lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 2; ++i) {
      const int g = lane / 4, t = lane % 4 * 2 + i;
      for (int part = 0; part < 4; ++part) a[g + part % 2 * 8][t + part / 2 * 8] = half_of(lanes[lane].a[part], i);
      for (int part = 0; part < 2; ++part) b[t + part * 8][g] = half_of(lanes[lane].b[part], i);
    }
  for (int lane = 0; lane < 32; ++lane)
    for (int part = 0; part < 4; ++part) {
      const int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
      for (int k = 0; k < 16; ++k) lanes[lane].sums[part] += a[row][k] * b[k][column];
    }
}

inline bool serve_warps() {
  bool served = false;
  for (size_t first = 0; first < machine.threads.size(); first += 32) {
    Thread* lanes = &machine.threads[first];
    if (!std::all_of(lanes, lanes + 32, [](const Thread& t) { return t.wait == Wait::kWarp; })) continue;
    if (!std::all_of(lanes, lanes + 32, [&](const Thread& t) { return t.action == lanes->action; }))
      fail("lanes of a warp wait for different things");
    if (lanes->action == Action::kMultiply) act_multiply(lanes);
    else act_load(lanes, lanes->action == Action::kLoadTransposed);
    for (int lane = 0; lane < 32; ++lane) lanes[lane].wait = Wait::kNothing;
    served = true;
  }
  return served;
}

inline bool serve_block() {
  bool any = false;
  for (Thread& thread : machine.threads) {
    if (thread.wait == Wait::kWarp) return false;
    any |= thread.wait == Wait::kBlock;
  }
  for (Thread& thread : machine.threads)
    if (thread.wait == Wait::kBlock) thread.wait = Wait::kNothing;
  return any;
}

inline void entry() {
  machine.kernel();
  self().wait = Wait::kDone;
  swapcontext(&self().context, &machine.main);
}

inline void run_block() {
  std::memset(shared_begin(), 0xff, kShared);  // NaN in every format
  std::vector<int> order(machine.threads.size());
  for (size_t i = 0; i < order.size(); ++i) {
    Thread& thread = machine.threads[i];
    order[i] = static_cast<int>(i);
    thread.groups.clear(), thread.open.clear();
    thread.wait = Wait::kNothing;
    thread.stack.resize(kStack);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
  }
  while (true) {
    std::shuffle(order.begin(), order.end(), machine.random);
    const unsigned chosen = machine.random();  // these warps go on in this round: the others fall behind
    bool ran = false, runnable = false, left = false;
    for (const int index : order) {
      if (machine.threads[index].wait != Wait::kNothing) continue;
      runnable = true;
      if (!(chosen >> (index / 32) & 1)) continue;
      machine.current = index;
      machine.inside = ran = true;
      swapcontext(&machine.main, &machine.threads[index].context);
      machine.inside = false;
      if (machine.failed) return;
    }
    for (const Thread& thread : machine.threads) left |= thread.wait != Wait::kDone;
    if (!left) return;
    const bool served = serve_warps() || (!runnable && serve_block());
    if (!served && !ran && !runnable) fail("threads wait for ever");
    if (machine.failed) return;
  }
}

}  // namespace emulator

inline int thread_index() { return emulator::machine.current; }
inline int64_t block_index() { return emulator::machine.block; }
inline int64_t block_count() { return emulator::machine.blocks; }
inline void sync_threads() { emulator::pause(emulator::Wait::kBlock); }
inline char* shared_memory() { return emulator::shared_begin(); }

inline void copy_async(void* shared, const void* global, int bytes) {
  emulator::check_shared(shared, 16);
  if (bytes < 0 || bytes > 16) emulator::fail("copy of a wrong size");
  if (reinterpret_cast<uintptr_t>(global) % 16) emulator::fail("global address not aligned to 16 bytes");
  emulator::self().open.push_back({shared, global, bytes});
}
inline void commit_copies() {
  emulator::self().groups.push_back(emulator::self().open);
  emulator::self().open.clear();
}
template <int Pending>
void await_copies() {
  auto& groups = emulator::self().groups;
  while (static_cast<int>(groups.size()) > Pending) {
    for (const emulator::Copy& copy : groups.front()) {
      std::memset(copy.to, 0, 16);
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    groups.erase(groups.begin());
  }
}
inline void load_matrices(uint32_t (&to)[4], const void* shared) {
  emulator::check_shared(shared, 16);
  emulator::self().address = shared;
  emulator::self().registers = to;
  emulator::collective(emulator::Action::kLoad);
}
inline void load_matrices_transposed(uint32_t (&to)[4], const void* shared) {
  emulator::check_shared(shared, 16);
  emulator::self().address = shared;
  emulator::self().registers = to;
  emulator::collective(emulator::Action::kLoadTransposed);
}
inline void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bfloat16) {
  emulator::Thread& thread = emulator::self();
  thread.sums = sum, thread.a = a, thread.b[0] = b0, thread.b[1] = b1;
  emulator::collective(emulator::Action::kMultiply);
}
inline void multiply(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t, float16) { std::abort(); }

template <class Kernel, class... Arguments>
cudaError_t launch(Kernel kernel, int64_t blocks, int shared, cudaStream_t, const Arguments&... arguments) {
  if (shared > emulator::kShared) return cudaErrorInvalidConfiguration;
  auto& machine = emulator::machine;
  machine.threads.resize(kThreads);
  machine.shared_bytes = shared;
  machine.blocks = blocks;
  machine.kernel = [&] { kernel(arguments...); };
  machine.failed = false;
  for (machine.block = 0; machine.block < blocks && !machine.failed; ++machine.block) emulator::run_block();
  return machine.failed ? cudaErrorUnknown : cudaSuccess;
}

}  // namespace ruda
