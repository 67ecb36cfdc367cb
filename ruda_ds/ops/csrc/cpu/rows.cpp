// Sums of rows on the CPU: one pass over memory, where a composition of torch's operators makes several for each of the K.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <tuple>

namespace ruda::cpu {
namespace {

using at::Tensor;

// Columns that one pass holds in registers.
constexpr long kBlock = 64;
// Partial sums of a dot product, in a fixed order: the same on every machine that has this many lanes or fewer.
constexpr long kLanes = 16;
// Rows that are worth a thread's waking up.
constexpr long kGrain = 16;

inline float widen(float x) { return x; }
inline float widen(c10::BFloat16 x) {
  const std::uint32_t bits = std::uint32_t{x.x} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

template <class T>
T narrow(float x);
template <>
inline float narrow<float>(float x) {
  return x;
}
// To nearest, ties to even; a NaN stays one.
template <>
inline c10::BFloat16 narrow<c10::BFloat16>(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<std::uint16_t>(x == x ? rounded : 0x7fc0), c10::BFloat16::from_bits()};
}

// columns [begin, begin + count) of one token's sum; weights null: every weight is 1.
template <class T>
inline void combine_block(const T* rows, const std::int64_t* slots, const float* weights, long top_k, long hidden,
                          long begin, long count, T* out) {
  float sum[kBlock] = {};
  for (long k = 0; k < top_k; ++k) {
    const T* row = rows + slots[k] * hidden + begin;
    const float weight = weights ? weights[k] : 1.0f;
    for (long j = 0; j < count; ++j) sum[j] += weight * widen(row[j]);
  }
  for (long j = 0; j < count; ++j) out[begin + j] = narrow<T>(sum[j]);
}

template <class T>
void combine(const Tensor& rows, const float* weights, const Tensor& slots, Tensor& out) {
  const long top_k = slots.size(1), hidden = rows.size(1);
  const T* from = rows.const_data_ptr<T>();
  const std::int64_t* slot = slots.const_data_ptr<std::int64_t>();
  T* to = out.mutable_data_ptr<T>();
  at::parallel_for(0, slots.size(0), kGrain, [&](long first, long last) {
    for (long t = first; t < last; ++t) {
      const float* own = weights ? weights + t * top_k : nullptr;
      long h = 0;
      for (; h + kBlock <= hidden; h += kBlock)
        combine_block(from, slot + t * top_k, own, top_k, hidden, h, kBlock, to + t * hidden);
      if (h < hidden) combine_block(from, slot + t * top_k, own, top_k, hidden, h, hidden - h, to + t * hidden);
    }
  });
}

template <class T>
void backward(const Tensor& gradient, const Tensor& rows, const Tensor& weights, const Tensor& slots, Tensor& row_gradient,
              Tensor& weight_gradient) {
  const long top_k = slots.size(1), hidden = rows.size(1);
  const T* upstream = gradient.const_data_ptr<T>();
  const T* from = rows.const_data_ptr<T>();
  const float* weight = weights.const_data_ptr<float>();
  const std::int64_t* slot = slots.const_data_ptr<std::int64_t>();
  T* to = row_gradient.mutable_data_ptr<T>();
  float* dots = weight_gradient.mutable_data_ptr<float>();
  at::parallel_for(0, slots.size(0), kGrain, [&](long first, long last) {
    for (long at = first * top_k; at < last * top_k; ++at) {
      const T* g = upstream + at / top_k * hidden;
      const T* row = from + slot[at] * hidden;
      T* out = to + slot[at] * hidden;
      const float w = weight[at];
      float part[kLanes] = {};
      long h = 0;
      for (; h + kLanes <= hidden; h += kLanes)
        for (long j = 0; j < kLanes; ++j) {
          const float wide = widen(g[h + j]);
          out[h + j] = narrow<T>(wide * w);
          part[j] += wide * widen(row[h + j]);
        }
      for (long j = 0; h + j < hidden; ++j) {
        const float wide = widen(g[h + j]);
        out[h + j] = narrow<T>(wide * w);
        part[j] += wide * widen(row[h + j]);
      }
      float dot = 0;
      for (long j = 0; j < kLanes; ++j) dot += part[j];
      dots[at] = dot;
    }
  });
}

void check(const Tensor& rows, const Tensor& slots) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && slots.dim() == 2 && slots.scalar_type() == at::kLong && rows.is_contiguous() &&
                        slots.is_contiguous(),
                    "rows are ", rows.sizes(), " and slots ", slots.sizes(), " ", slots.scalar_type(),
                    ", expected contiguous [N, H] and int64 [T, K]");
  const auto type = rows.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16, "rows are ", type, ", expected float32 or bfloat16");
}

Tensor combine_rows(const Tensor& rows, const std::optional<Tensor>& weights, const Tensor& slots) {
  check(rows, slots);
  TORCH_CHECK_VALUE(!weights || (weights->scalar_type() == at::kFloat && weights->sizes() == slots.sizes() &&
                                 weights->is_contiguous()),
                    "weights are not contiguous float32 ", slots.sizes());
  Tensor out = at::empty({slots.size(0), rows.size(1)}, rows.options());
  const float* given = weights ? weights->const_data_ptr<float>() : nullptr;
  if (rows.scalar_type() == at::kFloat) {
    combine<float>(rows, given, slots, out);
  } else {
    combine<c10::BFloat16>(rows, given, slots, out);
  }
  return out;
}

std::tuple<Tensor, Tensor> combine_rows_backward(
    const Tensor& gradient, const Tensor& rows, const Tensor& weights, const Tensor& slots) {
  check(rows, slots);
  TORCH_CHECK_VALUE(weights.scalar_type() == at::kFloat && weights.sizes() == slots.sizes() && weights.is_contiguous(),
                    "weights are ", weights.scalar_type(), " ", weights.sizes(), ", expected contiguous float32 ",
                    slots.sizes());
  TORCH_CHECK_VALUE(gradient.scalar_type() == rows.scalar_type() && gradient.is_contiguous() &&
                        gradient.size(0) == slots.size(0) && gradient.size(1) == rows.size(1),
                    "the gradient is ", gradient.scalar_type(), " ", gradient.sizes(), ", expected contiguous ",
                    rows.scalar_type(), " [", slots.size(0), ", ", rows.size(1), "]");
  Tensor row_gradient = at::empty_like(rows), weight_gradient = at::empty_like(weights);
  if (rows.scalar_type() == at::kFloat) {
    backward<float>(gradient, rows, weights, slots, row_gradient, weight_gradient);
  } else {
    backward<c10::BFloat16>(gradient, rows, weights, slots, row_gradient, weight_gradient);
  }
  return {row_gradient, weight_gradient};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ruda, m) {
  m.def("combine_rows(Tensor rows, Tensor? weights, Tensor slots) -> Tensor");
  m.def("combine_rows_backward(Tensor gradient, Tensor rows, Tensor weights, Tensor slots) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(ruda, CPU, m) {
  m.impl("combine_rows", combine_rows);
  m.impl("combine_rows_backward", combine_rows_backward);
}

}  // namespace ruda::cpu
