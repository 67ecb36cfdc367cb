// Tasks of a pass: one takes some columns of the result for all, or some, of one expert's rows, so that each weight is
// packed once.
#include "schedule.h"

#include <algorithm>
#include <numeric>

namespace ruda::cpu {
namespace {

// Fewer rows than this are not worth packing a panel of weights for.
constexpr long kFewestRows = 16 * kTileRows;
constexpr long kTasksPerThread = 4;

long divide_up(long a, long b) { return (a + b - 1) / b; }
long round_up(long a, long b) { return divide_up(a, b) * b; }

class Builder {
 public:
  Builder(const Problem& problem, int threads) : p_(problem), enough_(threads > 1 ? kTasksPerThread * threads : 1) {
    order_.resize(p_.experts);
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return rows(a) > rows(b); });
  }

  // Columns [0, columns) of a product with rows, ``width`` at a time; rows split only if there were too few tasks.
  void add_columns(Stage& stage, Kind kind, long columns, long width) const {
    const long pieces = divide_up(columns, width) * busy();
    const long splits = pieces ? divide_up(enough_, pieces) : 1;
    for (int expert : order_) {
      const long all = rows(expert), each = std::max(kFewestRows, round_up(divide_up(all, splits), kTileRows));
      for (long row = 0; row < all; row += each)
        for (long first = 0; first < columns; first += width)
          stage.push_back({kind, expert, first, std::min(width, columns - first), p_.offsets[expert] + row,
                           std::min(each, all - row)});
    }
  }

  // Rows [begin, end) of a weight's gradient; ``skip``: experts without rows have nothing to write.
  void add_gradient(Stage& stage, Kind kind, long begin, long end, bool skip) const {
    const long widest = round_up(std::max(divide_up((end - begin) * std::max(busy(), 1L), enough_), 1L), kTileRows);
    for (int expert : order_) {
      if (skip && !rows(expert)) continue;
      const long width = std::min(block_columns(rows(expert)), widest);
      for (long first = begin; first < end; first += width)
        stage.push_back({kind, expert, first, std::min(width, end - first), p_.offsets[expert], rows(expert)});
    }
  }

 private:
  long rows(int expert) const { return p_.offsets[expert + 1] - p_.offsets[expert]; }
  long busy() const {
    return std::count_if(order_.begin(), order_.end(), [&](int expert) { return rows(expert) > 0; });
  }
  long block_columns(long k) const {
    const long steps = std::clamp(divide_up(k, p_.scalar == Scalar::bf16 ? 2 : 1), 1L, kPackedSteps);
    return std::min(kBlockColumns, kBlockWords / steps / kTileRows * kTileRows);
  }

  const Problem& p_;
  const long enough_;
  std::vector<int> order_;
};

}  // namespace

std::vector<Stage> forward_stages(const Problem& problem, int threads) {
  const Builder builder(problem, threads);
  std::vector<Stage> stages(2);
  builder.add_columns(stages[0], Kind::forward_inner, problem.inner, kPanel / 2);
  builder.add_columns(stages[1], Kind::forward_output, problem.hidden, kPanel);
  return stages;
}

std::vector<Stage> backward_stages(const Problem& problem, int threads) {
  const Builder builder(problem, threads);
  std::vector<Stage> stages(2);
  if (problem.activation || problem.preactivation_gradient)
    builder.add_columns(stages[0], Kind::backward_inner, problem.inner, kPanel);
  if (problem.x_gradient) builder.add_columns(stages[1], Kind::backward_rows, problem.hidden, kPanel);
  const bool* add = problem.add;
  const bool gate = problem.weight_gradient[0], up = problem.weight_gradient[1];
  if (gate || up)
    builder.add_gradient(stages[1], Kind::backward_outer, gate ? 0 : problem.inner, (up ? 2 : 1) * problem.inner,
                         (add[0] || !gate) && (add[1] || !up));
  if (problem.weight_gradient[2]) builder.add_gradient(stages[1], Kind::backward_down, 0, problem.hidden, add[2]);
  return stages;
}

long scratch_bytes(const Problem& problem) {
  const long step = problem.scalar == Scalar::bf16 ? 2 : 1;
  long most = 0, kept = 0;
  for (long expert = 0; expert < problem.experts; ++expert)
    most = std::max<long>(most, problem.offsets[expert + 1] - problem.offsets[expert]);
  if (divide_up(std::max(problem.hidden, 2 * problem.inner), step) > kPackedSteps) kept = kKeptRows * kPanel;
  if (divide_up(most, step) > kPackedSteps)
    kept = std::max(kept, kBlockWords / kPackedSteps * round_up(std::max(problem.hidden, problem.inner), kPanel));
  const long padded = kTileRows * kPackedSteps + 16;
  return static_cast<long>(sizeof(Word)) * (kPackedSteps * kPanel + kBlockWords + kTileRows * kPanel + padded + kept);
}

}  // namespace ruda::cpu
