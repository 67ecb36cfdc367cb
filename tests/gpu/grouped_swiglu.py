"""A candidate for CUDA: torch's grouped product and our SwiGLU kernels, beside which tests/gpu/run measures the others.

Saves the rows and the two halves of the pre-activation, and computes everything else again in backward.
Letters: R rows sorted by expert, L experts, H hidden width, F expert width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class Elementwise(Protocol):
    """The two element by element kernels; `torch.ops.ruda` has them once the CUDA operators are loaded."""

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up."""

    def swiglu_backward(
        self, gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gradient of gate, gradient of up, silu(gate) * up)."""


class _GroupedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        ends: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        kernels: Elementwise,
    ) -> torch.Tensor:
        gates = F.grouped_mm(rows, gate.transpose(1, 2), offs=ends)
        ups = F.grouped_mm(rows, up.transpose(1, 2), offs=ends)
        ctx.save_for_backward(rows, ends, gate, up, down, gates, ups)
        ctx.kernels = kernels
        return F.grouped_mm(kernels.swiglu(gates, ups), down.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, ends, gate, up, down, gates, ups = ctx.saved_tensors
        gradient = gradient.contiguous()
        found: list[torch.Tensor | None] = [None] * 6
        needs = ctx.needs_input_grad
        hidden_gradient = F.grouped_mm(gradient, down, offs=ends)
        gates_gradient, ups_gradient, hidden = ctx.kernels.swiglu_backward(hidden_gradient, gates, ups)
        if needs[0]:
            found[0] = F.grouped_mm(gates_gradient, gate, offs=ends) + F.grouped_mm(ups_gradient, up, offs=ends)
        # [F, R] by [R, H], the sum cut at the experts' ends: [L, F, H].
        if needs[2]:
            found[2] = F.grouped_mm(gates_gradient.t(), rows, offs=ends)
        if needs[3]:
            found[3] = F.grouped_mm(ups_gradient.t(), rows, offs=ends)
        if needs[4]:
            found[4] = F.grouped_mm(gradient.t(), hidden, offs=ends)
        return tuple(found)


def grouped_swiglu_experts(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    kernels: Elementwise | None = None,
) -> torch.Tensor:
    """`reference_experts`, for operands whose rows begin at multiples of 16 bytes and at least one row and expert.

    Args:
        kernels: where the SwiGLU kernels are; None for `torch.ops.ruda`, whose CUDA part must be loaded.

    Returns:
        [R, H]; differentiable once. Weight gradients are summed in float32 and rounded once to the weights' type.
    """
    ends = offsets[1:].to(torch.int32)
    return _GroupedSwiglu.apply(rows, ends, gate, up, down, torch.ops.ruda if kernels is None else kernels)
