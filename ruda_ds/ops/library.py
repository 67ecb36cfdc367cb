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
# A layout's order and places.
Places = tuple[torch.Tensor | None, torch.Tensor | None]


def _fake_forward(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    order: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    size: int = 0,
    keep: bool = True,
) -> Tensors:
    count = rows.shape[0] if order is None else order.shape[0]
    output = rows.new_empty(count if places is None else size, rows.shape[1])
    return output, rows.new_empty((count, 2 * gate.shape[1]) if keep else (0,))


def _fake_backward(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    preactivation: torch.Tensor,
    needs: list[bool],
    gate_buffer: torch.Tensor | None,
    up_buffer: torch.Tensor | None,
    down_buffer: torch.Tensor | None,
    order: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
) -> Tensors:
    made = [rows.new_empty(rows.shape if needs[0] else (0,))]
    buffers = (gate_buffer, up_buffer, down_buffer)
    for needed, weight, buffer in zip(needs[1:], (gate, up, down), buffers, strict=True):
        made.append(weight.new_empty(weight.shape if needed and buffer is None else (0,)))
    return tuple(made)


def _forward_flops(
    rows: Any, offsets: Any, gate: Any, up: Any, down: Any, order: Any = None, *rest: Any, **named: Any
) -> int:
    """Three products of R F H multiplications and additions; arguments are shapes."""
    return 6 * (rows if order is None else order)[0] * gate[1] * gate[2]


def _backward_flops(
    gradient: Any,
    rows: Any,
    offsets: Any,
    gate: Any,
    up: Any,
    down: Any,
    preactivation: Any,
    needs: Any,
    *rest: Any,
    **named: Any,
) -> int:
    """Of the products that ``needs`` asks for: one for dA, two for the rows, one for each weight."""
    products = any(needs[:3]) + 2 * needs[0] + sum(needs[1:])
    return 2 * products * preactivation[0] * gate[1] * gate[2]


def _fake_fresh(like: torch.Tensor, count: int) -> torch.Tensor:
    return like.new_empty(count, like.shape[1])


def _fake_combine(
    rows: torch.Tensor, more: torch.Tensor | None, weights: torch.Tensor | None, slots: torch.Tensor
) -> torch.Tensor:
    return rows.new_empty(slots.shape[0], rows.shape[1])


def _fake_combine_backward(
    gradient: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, split: int, room: int
) -> Tensors:
    hidden = rows.shape[1]
    return (
        rows.new_empty(split + room, hidden),
        rows.new_empty(rows.shape[0] - split, hidden),
        torch.empty_like(weights),
    )


def register() -> None:
    """Give the operators, which must be loaded, their fake kernels and FLOP counts; further calls do nothing."""
    if torch.ops.ruda.fused_experts in flop_registry:
        return
    torch.library.register_fake("ruda::fused_experts", _fake_forward)
    torch.library.register_fake("ruda::fused_experts_backward", _fake_backward)
    torch.library.register_fake("ruda::fresh_rows", _fake_fresh)
    torch.library.register_fake("ruda::combine_rows", _fake_combine)
    torch.library.register_fake("ruda::combine_rows_backward", _fake_combine_backward)
    register_flop_formula(torch.ops.ruda.fused_experts)(_forward_flops)
    register_flop_formula(torch.ops.ruda.fused_experts_backward)(_backward_flops)


def _gradients(
    gradient: torch.Tensor, saved: Tensors, needs: list[bool], buffers: Buffers, layout: Places
) -> list[Any]:
    """Gradients of rows, gate, up and down: None where not needed, or added to a buffer."""
    found = torch.ops.ruda.fused_experts_backward(gradient, *saved, needs, *buffers, *layout)
    returned = [needs[0], *(needed and buffer is None for needed, buffer in zip(needs[1:], buffers, strict=True))]
    return [value if wanted else None for value, wanted in zip(found, returned, strict=True)]


class _Gradient(torch.autograd.Function):
    """The gradients under create_graph: connected to their inputs, so that a second derivative is refused, not lost."""

    @staticmethod
    def forward(
        ctx: Any, needs: list[bool], buffers: Buffers, layout: Places, gradient: torch.Tensor, *saved: torch.Tensor
    ) -> Any:
        return tuple(_gradients(gradient, saved, needs, buffers, layout))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise SecondDerivativeError(
            "a second derivative of fused_experts was asked for; the backends 'cpu' and 'cuda' have first derivatives "
            "only, 'reference' has all"
        )


class FusedExperts(torch.autograd.Function):
    """The operator with its derivatives. Saved: the inputs, and the pre-activation [R, 2 F] in the rows' dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        gate_buffer: torch.Tensor | None,
        up_buffer: torch.Tensor | None,
        down_buffer: torch.Tensor | None,
        order: torch.Tensor | None,
        places: torch.Tensor | None,
        size: int,
        keep: bool,
    ) -> torch.Tensor:
        """See `ruda_ds.ops.fused_experts`; ``keep``: for a backward pass, which is otherwise not possible."""
        output, preactivation = torch.ops.ruda.fused_experts(rows, offsets, gate, up, down, order, places, size, keep)
        ctx.save_for_backward(rows, offsets, gate, up, down, preactivation)
        ctx.buffers, ctx.layout = (gate_buffer, up_buffer, down_buffer), (order, places)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """First derivatives, of what needs them."""
        needs = [ctx.needs_input_grad[index] for index in (0, 2, 3, 4)]
        saved, buffers, layout = ctx.saved_tensors, ctx.buffers, ctx.layout
        if torch.is_grad_enabled():
            found = _Gradient.apply(needs, buffers, layout, gradients[0], *saved)
        else:
            found = _gradients(gradients[0], saved, needs, buffers, layout)
        return found[0], None, *found[1:], *[None] * 7
