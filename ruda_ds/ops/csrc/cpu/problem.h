// What a task of the fused experts is told: plain pointers and sizes, no torch.
//
// Letters: R rows sorted by expert, L experts, H hidden width, F expert width.
#pragma once

#include <cstdint>

namespace ruda::cpu {

// One 32-bit unit of a packed operand: a float, or the bf16 of two neighbouring k.
using Word = std::uint32_t;

struct Bf16 {
  std::uint16_t bits;
};

enum class Scalar { f32, bf16 };

// Rows of a register tile and lanes of a packed panel.
constexpr long kTileRows = 6;
constexpr long kPanel = 64;

// Steps (of one word) that are packed at a time: a panel of them, 256 KiB, stays in the second-level cache.
constexpr long kPackedSteps = 1024;
// Rows whose sums are kept in memory where a product has more than kPackedSteps steps.
constexpr long kKeptRows = 1020;
// Words of a packed block of wgrad's left operand, and its most columns.
constexpr long kBlockWords = 96 * 1024;
constexpr long kBlockColumns = 32 * kTileRows;

// All tensors are contiguous. Null: not wanted.
struct Problem {
  Scalar scalar;
  long rows, experts, hidden, inner;
  const std::int64_t* offsets;  // [L + 1]
  // [R]: where the r-th row by expert lies, in x and its gradient, and in the output and its gradient. Null: at r.
  const std::int64_t* order;
  const std::int64_t* places;
  const void* x;                // [N, H]
  const void* gate;             // [L, F, H]
  const void* up;               // [L, F, H]
  const void* down;             // [L, H, F]
  void* preactivation;          // [R, 2 F], gate then up; written by the forward pass, read by the backward pass
  void* activation;             // [R, F], silu(gate x) * up x
  void* output;                 // [M, H]
  const void* gradient;         // [M, H], of the output
  void* preactivation_gradient;  // [R, 2 F]
  void* x_gradient;              // [N, H]
  // Gradients of gate, up and down. ``add``: float32, added to; else in the scalar's type, overwritten.
  void* weight_gradient[3];
  bool add[3];
};

enum class Kind : int {
  forward_inner,    // columns of the activation
  forward_output,   // columns of the output
  backward_inner,   // columns of the activation, recomputed, and of the pre-activation's gradient
  backward_rows,    // columns of the rows' gradient
  backward_outer,   // rows of one expert's [gate; up] gradient
  backward_down,    // rows of one expert's down gradient
};

struct Task {
  Kind kind;
  int expert;
  long first, count;  // columns, or rows of a weight gradient
  long row, rows;     // of this expert's rows, counted from the first of all
};

// Does one task, and brings near what this thread's next one (null: none) packs. ``scratch`` is scratch_bytes() long,
// and this thread's own.
using RunTask = void (*)(const Problem&, const Task&, const Task* next, char* scratch);

// Sums of K rows a token. Null ``gradient``: sums[t] = sum over k of weights[t, k] rows[slots[t, k]], weights null: 1;
// else its derivatives, for slots that name no row twice. Rows, and their gradients, may lie in two places: those from
// ``split`` on in the second.
struct RowSums {
  Scalar scalar;
  long top_k, hidden;
  long rows_split, gradient_split;
  const void* rows[2];        // [split, H], [.., H]
  const std::int64_t* slots;  // [T, K]
  const float* weights;       // [T, K]
  void* sums;                 // [T, H]
  const void* gradient;       // [T, H]
  void* row_gradient[2];      // [split, H], [.., H], written where a slot points
  float* weight_gradient;     // [T, K]
};

// For tokens [first, last).
using SumRows = void (*)(const RowSums&, long first, long last);

// Of the best instruction set that this CPU and RUDA_CPU_LEVEL allow.
struct Kernels {
  const char* name;
  RunTask run;
  SumRows sum_rows;
};
const Kernels& kernels();
// By name ("avx512_bf16", "avx512", "avx2", "portable"); null where this CPU lacks it.
const Kernels* kernels_named(const char* name);
void choose_kernels(const Kernels& chosen);

}  // namespace ruda::cpu
