// The six kinds of task. Included inside an instruction set's own namespace.
#pragma once

template <class T>
INLINE Vec load_part(const T* from, long lanes) {
  if (lanes >= 16) return load(from);
  T part[16] = {};
  __builtin_memcpy(part, from, lanes * sizeof(T));
  return load(part);
}

template <class T>
INLINE void store_part(T* to, Vec x, long lanes) {
  if (lanes >= 16) return store(to, x);
  T part[16];
  store(part, x);
  __builtin_memcpy(to, part, lanes * sizeof(T));
}

template <class T>
INLINE void store_sums(T* to, const float* sums, long lanes) {
  for (long lane = 0; lane < lanes; lane += 16) store_part(to + lane, load(sums + lane), lanes - lane);
}

INLINE void add_sums(float* to, const float* sums, long lanes) {
  for (long lane = 0; lane < lanes; lane += 16)
    store_part(to + lane, load_part(to + lane, lanes - lane) + load(sums + lane), lanes - lane);
}

template <class T>
struct Tasks {
  const Problem& p;
  const Task& task;
  const Task* next;
  Scratch scratch;

  template <class U = T>
  static const U* in(const void* tensor, long at) {
    return static_cast<const U*>(tensor) + at;
  }
  template <class U = T>
  static U* out(void* tensor, long at) {
    return static_cast<U*>(tensor) + at;
  }
  // An expert's matrix in a cube of weights.
  const T* weight(const void* cube) const { return in(cube, task.expert * p.hidden * p.inner); }

  // A matrix of ``width`` columns from the ``row``-th row by expert on.
  static Rows<T> matrix(const void* tensor, long width, long row, const std::int64_t* index = nullptr) {
    return {in(tensor, index ? 0 : row * width), width, index ? index + row : nullptr};
  }
  static long placed(const std::int64_t* index, long row) { return index ? index[row] : row; }

  static void nothing(long, long) {}

  static Ahead ahead(const T* from, long stride, long pieces) {
    return {reinterpret_cast<const char*>(from), stride * static_cast<long>(sizeof(T)), pieces};
  }

  // What the next task packs first.
  Upcoming upcoming() const {
    if (!next) return {};
    const long at = next->expert * p.hidden * p.inner, first = next->first, lines = next->count * p.hidden / kPanel;
    switch (next->kind) {
      case Kind::forward_inner:
        return {{ahead(in(p.gate, at + first * p.hidden), kPanel, lines),
                 ahead(in(p.up, at + first * p.hidden), kPanel, lines)}};
      case Kind::forward_output:
        return {{ahead(in(p.down, at + first * p.inner), kPanel, next->count * p.inner / kPanel), {}}};
      case Kind::backward_inner: return {{ahead(in(p.down, at + first), p.inner, p.hidden), {}}};
      case Kind::backward_rows:
        return {{ahead(in(p.gate, at + first), p.hidden, p.inner), ahead(in(p.up, at + first), p.hidden, p.inner)}};
      case Kind::backward_outer: return block_and_panel(inner_gradients(next->row), inputs(next->row));
      case Kind::backward_down: return block_and_panel(gradients(next->row), activations(next->row));
    }
    return {};
  }

  Rows<T> inputs(long row) const { return matrix(p.x, p.hidden, row, p.order); }
  Rows<T> activations(long row) const { return matrix(p.activation, p.inner, row); }
  Rows<T> gradients(long row) const { return matrix(p.gradient, p.hidden, row, p.places); }
  Rows<T> inner_gradients(long row) const { return matrix(p.preactivation_gradient, 2 * p.inner, row); }

  static_assert(kBlockColumns <= (Upcoming::kParts - 1) * kPanel);

  Upcoming block_and_panel(const Rows<T>& left, const Rows<T>& right) const {
    Upcoming upcoming{};
    const long rows = least(next->rows, kPackedSteps * kStep<T>), strips = (next->count + kPanel - 1) / kPanel;
    for (long i = 0; i < strips; ++i) upcoming.parts[i] = left.ahead(0, next->first + i * kPanel, rows);
    upcoming.parts[strips] = right.ahead(0, 0, rows);
    return upcoming;
  }

  // Lanes 0 .. 31 of a panel are columns of gate x, lanes 32 .. 63 the same columns of up x.
  void forward_inner() const {
    const T* const rows[2] = {weight(p.gate) + task.first * p.hidden, weight(p.up) + task.first * p.hidden};
    const auto pack = [&](long begin, long steps, Word* panel) {
      for (long lane = 0; lane < kPanel; lane += 16) {
        const long column = lane % 32, lanes = task.count - column;
        const T* from = rows[lane / 32] + (lanes > 0 ? column : 0) * p.hidden;
        pack_lanes(from, p.hidden, lanes < 0 ? 0 : least(lanes, 16), begin, p.hidden, steps, panel + lane);
      }
    };
    const auto finish = [&](long row, long count, const float* sums) {
      for (long i = 0; i < count; ++i, sums += kPanel)
        for (long lane = 0; lane < task.count; lane += 16) {
          const Vec gate = load(sums + lane), up = load(sums + 32 + lane);
          const long at = task.row + row + i, lanes = task.count - lane;
          store_part(out(p.activation, at * p.inner + task.first + lane), swiglu(gate, up), lanes);
          if (!p.preactivation) continue;
          T* const pre = out(p.preactivation, at * 2 * p.inner + task.first + lane);
          store_part(pre, gate, lanes);
          store_part(pre + p.inner, up, lanes);
        }
    };
    product<T>(inputs(task.row), task.rows, scratch, upcoming(), pack, nothing, finish);
  }

  void forward_output() const {
    const auto pack = [&](long begin, long steps, Word* panel) {
      for (long lane = 0; lane < kPanel; lane += 16) {
        const long lanes = task.count - lane;
        const T* from = weight(p.down) + (task.first + (lanes > 0 ? lane : 0)) * p.inner;
        pack_lanes(from, p.inner, lanes < 0 ? 0 : least(lanes, 16), begin, p.inner, steps, panel + lane);
      }
    };
    const auto finish = [&](long row, long count, const float* sums) {
      for (long i = 0; i < count; ++i, sums += kPanel)
        store_sums(out(p.output, placed(p.places, task.row + row + i) * p.hidden + task.first), sums, task.count);
    };
    product<T>(activations(task.row), task.rows, scratch, upcoming(), pack, nothing, finish);
  }

  // From one row's gradients of the activation, null if only the activation is wanted.
  void differentiate(long row, const float* sums) const {
    const T* const pre = in(p.preactivation, row * 2 * p.inner + task.first);
    T* const to = p.preactivation_gradient ? out(p.preactivation_gradient, row * 2 * p.inner + task.first) : nullptr;
    for (long lane = 0; lane < task.count; lane += 16) {
      const long lanes = task.count - lane;
      const Vec gate = load_part(pre + lane, lanes), up = load_part(pre + p.inner + lane, lanes);
      const SwigluGradient found = swiglu_gradient(sums ? load(sums + lane) : zero(), gate, up);
      if (p.activation) store_part(out(p.activation, row * p.inner + task.first + lane), found.activation, lanes);
      if (!to) continue;
      store_part(to + lane, found.gate, lanes);
      store_part(to + p.inner + lane, found.up, lanes);
    }
  }

  void backward_inner() const {
    if (!p.preactivation_gradient) {
      for (long row = 0; row < task.rows; ++row) differentiate(task.row + row, nullptr);
      return;
    }
    const T* const down = weight(p.down) + task.first;
    const auto pack = [&](long begin, long steps, Word* panel) {
      pack_panel<T>([&](long k) { return down + k * p.inner; }, task.count, begin, p.hidden, steps, panel);
    };
    const auto finish = [&](long row, long count, const float* sums) {
      for (long i = 0; i < count; ++i) differentiate(task.row + row + i, sums + i * kPanel);
    };
    const auto prepare = [&](long row, long count) {
      for (long i = 0; i < 2 * count; ++i) {
        const T* from = in(p.preactivation, ((task.row + row) * 2 + i) * p.inner + task.first);
        for (long lane = 0; lane < task.count; lane += 16 * kStep<T>) __builtin_prefetch(from + lane);
      }
    };
    product<T>(gradients(task.row), task.rows, scratch, upcoming(), pack, prepare, finish);
  }

  // [gate; up] are one matrix of 2 F rows here, as their gradients are one of 2 F columns.
  void backward_rows() const {
    const T* const gate = weight(p.gate) + task.first;
    const T* const up = weight(p.up) + task.first - p.inner * p.hidden;
    const auto pack = [&](long begin, long steps, Word* panel) {
      const auto row = [&](long k) { return (k < p.inner ? gate : up) + k * p.hidden; };
      pack_panel<T>(row, task.count, begin, 2 * p.inner, steps, panel);
    };
    const auto finish = [&](long row, long count, const float* sums) {
      for (long i = 0; i < count; ++i, sums += kPanel)
        store_sums(out(p.x_gradient, placed(p.order, task.row + row + i) * p.hidden + task.first), sums, task.count);
    };
    product<T>(inner_gradients(task.row), task.rows, scratch, upcoming(), pack, nothing, finish);
  }

  // Where a weight's row of gradients lies.
  struct Place {
    int which;
    long at;
  };

  Place place(long row, long first) const {
    if (task.kind == Kind::backward_down) return {2, (task.expert * p.hidden + row) * p.inner + first};
    const int is_up = row >= p.inner;  // one matrix [gate; up]
    return {is_up, (task.expert * p.inner + row - is_up * p.inner) * p.hidden + first};
  }

  void weight_gradient(Rows<T> left, const Rows<T>& right) const {
    const auto finish = [&](long column, long count, long first, long lanes, const float* sums) {
      for (long i = 0; i < count; ++i, sums += kPanel) {
        const Place to = place(task.first + column + i, first);
        if (p.add[to.which])
          add_sums(out<float>(p.weight_gradient[to.which], to.at), sums, lanes);
        else
          store_sums(out(p.weight_gradient[to.which], to.at), sums, lanes);
      }
    };
    left.first += task.first;
    outer_product<T>(left, task.count, right, task.rows, scratch, upcoming(), finish);
  }

  void run() const {
    switch (task.kind) {
      case Kind::forward_inner: return forward_inner();
      case Kind::forward_output: return forward_output();
      case Kind::backward_inner: return backward_inner();
      case Kind::backward_rows: return backward_rows();
      case Kind::backward_outer: return weight_gradient(inner_gradients(task.row), inputs(task.row));
      case Kind::backward_down: return weight_gradient(gradients(task.row), activations(task.row));
    }
  }
};

void run(const Problem& problem, const Task& task, const Task* next, char* memory) {
  if (problem.scalar == Scalar::bf16)
    Tasks<Bf16>{problem, task, next, Scratch(memory)}.run();
  else
    Tasks<float>{problem, task, next, Scratch(memory)}.run();
}
