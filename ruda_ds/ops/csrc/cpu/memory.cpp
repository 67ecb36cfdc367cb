// Large blocks of memory, used again.
#include "memory.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <mutex>

namespace ruda::cpu {
namespace {

// Smaller ones malloc keeps by itself.
constexpr std::size_t kLarge = 1 << 20;

// In steps of an eighth, so that a block fits many a tensor.
std::size_t block_size(std::size_t bytes) {
  std::size_t step = kLarge / 8;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

struct Block {
  void* data;
  std::size_t size;
  std::size_t used;  // bytes of the tensor
};

// Of this process, and never destroyed: tensors may outlive whatever else there is.
class Pool {
 public:
  static Pool& get() {
    static Pool* const pool = new Pool;
    return *pool;
  }

  Block* take(std::size_t bytes) {
    const std::size_t size = block_size(bytes);
    void* data = kept(size);
    if (!data) data = map(size);
    if (!data) {
      drop(0);
      data = map(size);
    }
    TORCH_CHECK(data, "fused_experts: no memory for ", size, " bytes of a result");
    Block* const block = new Block{data, size, bytes};
    report(*block, static_cast<std::int64_t>(bytes));
    return block;
  }

  static void give_back(void* context) {
    Block* const block = static_cast<Block*>(context);
    Pool& pool = get();
    pool.report(*block, -static_cast<std::int64_t>(block->used));
    {
      const std::lock_guard<std::mutex> lock(pool.mutex_);
      pool.kept_ += block->size;
      pool.free_.push_back(*block);
    }
    delete block;
    pool.drop(pool.limit_);
  }

  // A call has asked for so many bytes.
  void learn(Caller caller, std::size_t asked) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t& largest = largest_[static_cast<int>(caller)];
    if (asked <= largest) return;
    limit_ += asked - largest;
    largest = asked;
  }

 private:
  // From the system and not from malloc, which keeps of its own what it is given back.
  static void* map(std::size_t size) {
    void* const found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return found == MAP_FAILED ? nullptr : found;
  }

  // Memory that lies ready; null if none does. The last given back first: it may still be in the caches.
  void* kept(std::size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = std::find_if(free_.rbegin(), free_.rend(), [&](const Block& b) { return b.size == size; });
    if (found == free_.rend()) return nullptr;
    void* const data = found->data;
    kept_ -= size;
    free_.erase(std::next(found).base());
    return data;
  }

  // The oldest blocks, until no more than ``most`` bytes are kept.
  void drop(std::size_t most) {
    std::deque<Block> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (; kept_ > most; free_.pop_front()) {
        kept_ -= free_.front().size;
        dropped.push_back(free_.front());
      }
    }
    for (const Block& block : dropped) munmap(block.data, block.size);
  }

  // As torch's own allocator tells its profiler.
  void report(const Block& block, std::int64_t bytes) {
    live_ += bytes;
    if (c10::memoryProfilingEnabled())
      c10::reportMemoryUsageToProfiler(block.data, bytes, live_, 0, at::Device(at::DeviceType::CPU));
  }

  std::mutex mutex_;
  std::deque<Block> free_;  // the oldest first
  std::size_t kept_ = 0;
  std::array<std::size_t, static_cast<int>(Caller::count)> largest_{};
  std::atomic<std::size_t> limit_{0}, live_{0};
};

}  // namespace

Pass::~Pass() {
  if (asked_) Pool::get().learn(caller_, asked_);
}

at::Tensor Pass::fresh(at::IntArrayRef shape, const at::TensorOptions& options) {
  const at::Tensor made = at::empty({0}, options);
  std::size_t bytes = made.element_size();
  for (const std::int64_t width : shape) bytes *= width;
  // torch fills new memory with NaN where it is asked for, to show what nobody has written.
  const at::Context& context = at::globalContext();
  if (bytes < kLarge || (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()))
    return at::empty(shape, options);
  Block* const block = Pool::get().take(bytes);
  asked_ += block->size;
  at::DataPtr data(block->data, block, &Pool::give_back, at::Device(at::DeviceType::CPU));
  return made.set_(c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true), 0,
                   shape);
}

}  // namespace ruda::cpu
