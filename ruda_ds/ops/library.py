"""The compiled operators as torch sees them: fake kernels, FLOP counts, and autograd.

The operators are torch.ops.ruda.fused_experts and fused_experts_backward; csrc/register.cpp says what they take.
Letters: R rows sorted by expert, L experts, H hidden width, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ruda_ds.errors import SecondDerivativeError

Tensors = tuple[torch.Tensor, ...]
# Of gate, up and down.
Buffers = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _fake_forward(
    rows: torch.Tensor, offsets: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> Tensors:
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape[0], 2 * gate.shape[1])


def _fake_backward(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    preactivation: torch.Tensor,
    needs: list[bool],
    *buffers: torch.Tensor | None,
) -> Tensors:
    made = [rows.new_empty(rows.shape if needs[0] else (0,))]
    for needed, weight, buffer in zip(needs[1:], (gate, up, down), buffers, strict=True):
        made.append(weight.new_empty(weight.shape if needed and buffer is None else (0,)))
    return tuple(made)


def _forward_flops(rows: Any, offsets: Any, gate: Any, *rest: Any, **named: Any) -> int:
    """Three products of R F H multiplications and additions; arguments are shapes."""
    return 6 * rows[0] * gate[1] * gate[2]


def _backward_flops(gradient: Any, rows: Any, offsets: Any, gate: Any, *rest: Any, **named: Any) -> int:
    """Of the products that ``needs`` asks for: one for dA, two for the rows, one for each weight."""
    needs = rest[3] if len(rest) > 3 else named["needs"]
    products = any(needs[:3]) + 2 * needs[0] + sum(needs[1:])
    return 2 * products * rows[0] * gate[1] * gate[2]


def register() -> None:
    """Give the operators, which must be loaded, their fake kernels and FLOP counts; further calls do nothing."""
    if torch.ops.ruda.fused_experts in flop_registry:
        return
    torch.library.register_fake("ruda::fused_experts", _fake_forward)
    torch.library.register_fake("ruda::fused_experts_backward", _fake_backward)
    register_flop_formula(torch.ops.ruda.fused_experts)(_forward_flops)
    register_flop_formula(torch.ops.ruda.fused_experts_backward)(_backward_flops)


def _gradients(gradient: torch.Tensor, saved: Tensors, needs: list[bool], buffers: Buffers) -> list[Any]:
    """Gradients of rows, gate, up and down: None where not needed, or added to a buffer."""
    found = torch.ops.ruda.fused_experts_backward(gradient, *saved, needs, *buffers)
    returned = [needs[0], *(needed and buffer is None for needed, buffer in zip(needs[1:], buffers, strict=True))]
    return [value if wanted else None for value, wanted in zip(found, returned, strict=True)]


class _Gradient(torch.autograd.Function):
    """The gradients under create_graph: connected to their inputs, so that a second derivative is refused, not lost."""

    @staticmethod
    def forward(ctx: Any, needs: list[bool], buffers: Buffers, gradient: torch.Tensor, *saved: torch.Tensor) -> Any:
        return tuple(_gradients(gradient, saved, needs, buffers))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise SecondDerivativeError(
            "a second derivative of fused_experts was asked for; the backends 'cpu' and 'cuda' have first derivatives "
            "only, 'reference' has all"
        )


class FusedExperts(torch.autograd.Function):
    """(rows, offsets, gate, up, down, float32 buffers or None for the gradients of gate, up and down) -> [R, H].

    Saved for backward: the inputs, and the pre-activation [R, 2 F] in the rows' dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        *buffers: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `ruda_ds.ops.reference_experts` for shapes."""
        output, preactivation = torch.ops.ruda.fused_experts(rows, offsets, gate, up, down)
        ctx.save_for_backward(rows, offsets, gate, up, down, preactivation)
        ctx.buffers = buffers
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """First derivatives, of what needs them."""
        needs = [ctx.needs_input_grad[index] for index in (0, 2, 3, 4)]
        saved, buffers = ctx.saved_tensors, ctx.buffers
        if torch.is_grad_enabled():
            found = _Gradient.apply(needs, buffers, gradients[0], *saved)
        else:
            found = _gradients(gradients[0], saved, needs, buffers)
        return found[0], None, *found[1:], None, None, None
