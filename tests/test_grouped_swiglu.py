"""The grouped CUDA path with the SwiGLU kernels written in torch, so that all but these two runs here."""

import sys
from pathlib import Path

import pytest
import torch

from ruda_ds.ops import self_check

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))
from grouped_swiglu import grouped_swiglu_experts

from ruda_ds.ops.reference import reference_experts


class Plain:
    """What csrc/cuda/element_kernels.cuh computes: in float32, rounded once."""

    @staticmethod
    def swiglu(gate, up):
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)

    @staticmethod
    def swiglu_backward(gradient, gate, up):
        wide, g, u = gradient.float(), gate.float(), up.float()
        share = torch.sigmoid(g)
        gates = wide * u * share * (1 + g * (1 - share))
        return gates.to(gate.dtype), (wide * g * share).to(gate.dtype), (g * share * u).to(gate.dtype)


def case(dtype):
    tensors, offsets, gradient = self_check._inputs((20, 0, 35), 40, 72, dtype, torch.device("cpu"))
    return [tensor.requires_grad_() for tensor in tensors], offsets, gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_the_references(dtype):
    tensors, offsets, gradient = case(dtype)
    output, wanted = self_check._wanted([tensor.detach() for tensor in tensors], offsets, gradient)
    found = grouped_swiglu_experts(tensors[0], offsets, *tensors[1:], kernels=Plain)
    grads = torch.autograd.grad(found, tensors, gradient)
    errors = [self_check.relative_error(a, b) for a, b in zip((found, *grads), (output, *wanted), strict=True)]
    assert max(errors) <= self_check.LIMITS[dtype], errors


def test_only_the_wanted_gradients_are_computed_and_a_second_derivative_is_refused():
    tensors, offsets, gradient = case(torch.float32)
    frozen = [tensor.detach() for tensor in tensors]
    for wanted in range(4):
        inputs = list(frozen)
        inputs[wanted] = tensors[wanted]
        found = grouped_swiglu_experts(inputs[0], offsets, *inputs[1:], kernels=Plain)
        exact = reference_experts(inputs[0], offsets, *inputs[1:])
        one, two = (torch.autograd.grad(out, tensors[wanted], gradient)[0] for out in (found, exact))
        torch.testing.assert_close(one, two)
    output = grouped_swiglu_experts(tensors[0], offsets, *tensors[1:], kernels=Plain)
    (first,) = torch.autograd.grad(output.square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
