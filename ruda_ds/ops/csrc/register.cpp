// The operators' schemas, and the module that Python imports to have them.
#include <Python.h>
#include <torch/library.h>

TORCH_LIBRARY(ruda, m) {
  // rows [R, H] sorted by expert, offsets [L + 1] int64, gate and up [L, F, H], down [L, H, F]
  // -> output [R, H], preactivation [R, 2 F] (gate, then up; no elements unless ``keep``), in the rows' type.
  // On the CPU: order, int64 [R], is where the rows by expert lie in rows [N, H]; places where their results lie in the
  // output, which has ``size`` rows. No number comes twice. Rows that come in neither are zero in the results.
  m.def(
      "fused_experts(Tensor rows, Tensor offsets, Tensor gate, Tensor up, Tensor down, Tensor? order=None,"
      " Tensor? places=None, int size=0, bool keep=True) -> (Tensor output, Tensor preactivation)");
  // needs: of the gradients of rows, gate, up, down. A weight's float32 gradient is added to the float32 buffer given
  // for it, else returned, rounded once to the weight's type. What is not returned has no elements.
  m.def(
      "fused_experts_backward(Tensor gradient, Tensor rows, Tensor offsets, Tensor gate, Tensor up, Tensor down,"
      " Tensor preactivation, bool[4] needs, Tensor(a!)? gate_gradient, Tensor(b!)? up_gradient,"
      " Tensor(c!)? down_gradient, Tensor? order=None, Tensor? places=None) -> (Tensor, Tensor, Tensor, Tensor)");
  // The instruction set of the CPU kernels; with a name, that one is used from here on, if this CPU has it.
  m.def("cpu_kernels(str name=\"\") -> str");
}

#define JOIN(a, b) a##b
#define MODULE_INIT(name) JOIN(PyInit_, name)
#define TEXT(name) #name
#define QUOTED(name) TEXT(name)

extern "C" PyObject* MODULE_INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT};
  definition.m_name = QUOTED(TORCH_EXTENSION_NAME);
  definition.m_doc = "Fused experts.";
  definition.m_size = -1;
  return PyModule_Create(&definition);
}
