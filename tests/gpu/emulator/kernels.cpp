// The launchers under the emulator, with C names for the tests.
#include "backward.cu"
#include "elements.cu"
#include "forward.cu"
#include "weights.cu"

using namespace ruda;

extern "C" {

struct Plain {
  int type;
  int64_t rows;
  int experts;
  int64_t hidden;
  int64_t inner;
  const int64_t* offsets;
  int32_t* starts;
  int64_t tile_rows;
  int vector;
};

static Problem problem_of(const Plain& plain) {
  return {static_cast<Type>(plain.type), plain.rows, plain.experts, plain.hidden, plain.inner, plain.offsets,
          plain.starts, plain.tile_rows, plain.vector != 0, nullptr};
}

int64_t ruda_rows_of_a_tile(int type, int64_t rows, int experts, int vector) {
  return rows_of_a_tile(static_cast<Type>(type), rows, experts, vector != 0);
}
int64_t ruda_conflicts() { return emulator::machine.conflicts; }
void ruda_seed(unsigned seed) { emulator::machine.random.seed(seed); }
int ruda_plan(const Plain* plain) { return plan(problem_of(*plain)); }
int ruda_gate_up(const Plain* plain, const void* rows, const void* gate, const void* up, void* preactivation,
                 void* product) {
  return gate_up(problem_of(*plain), rows, gate, up, preactivation, product);
}
int ruda_down(const Plain* plain, const void* product, const void* weight, void* output) {
  return down(problem_of(*plain), product, weight, output);
}
int ruda_hidden_gradient(const Plain* plain, const void* gradient, const void* weight, const void* preactivation,
                         void* preactivation_gradient, void* product) {
  return hidden_gradient(problem_of(*plain), gradient, weight, preactivation, preactivation_gradient, product);
}
int ruda_rows_gradient(const Plain* plain, const void* preactivation_gradient, const void* gate, const void* up,
                       void* gradient) {
  return rows_gradient(problem_of(*plain), preactivation_gradient, gate, up, gradient);
}
int ruda_gate_up_gradient(const Plain* plain, const void* preactivation_gradient, const void* rows,
                          float* gate_buffer, void* gate, float* up_buffer, void* up) {
  return gate_up_gradient(problem_of(*plain), preactivation_gradient, rows, {gate_buffer, gate}, {up_buffer, up});
}
int ruda_down_gradient(const Plain* plain, const void* gradient, const void* product, float* buffer, void* made) {
  return down_gradient(problem_of(*plain), gradient, product, {buffer, made});
}
int ruda_swiglu(int type, const void* gate, const void* up, void* product, int64_t elements) {
  return swiglu(static_cast<Type>(type), gate, up, product, elements, nullptr);
}
int ruda_swiglu_gradient(int type, const void* gradient, const void* gate, const void* up, void* gate_gradient,
                         void* up_gradient, void* product, int64_t elements) {
  return swiglu_gradient(static_cast<Type>(type), {gradient, gate, up, gate_gradient, up_gradient, product}, elements,
                         nullptr);
}

}  // extern "C"
