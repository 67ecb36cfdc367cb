"""Rows sorted by expert on the way out, weights applied once on the way back. No communication.

Letters: T tokens, K experts a token, R = T * K rows (assignments), E experts, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from ruda_ds.ops.rows import combine_rows, combine_rows_backward, sum_rows


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """How T * K assignments are ordered by expert.

    Attributes:
        tokens: [R] int64, the token of each row, rows sorted by expert and, within one, by token.
        slots: [T, K] int64, the row of each assignment; column k is a token's k-th expert in ascending order.
        counts: [E] int64, rows of each expert.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> Dispatch:
    """The order of ``experts`` [T, K], ascending within a token."""
    flat = experts.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    slots = torch.empty_like(order)
    slots[order] = torch.arange(order.numel(), device=order.device)
    return Dispatch(
        tokens=order.div(experts.shape[1], rounding_mode="floor"),
        slots=slots.view_as(experts),
        counts=torch.bincount(flat, minlength=num_experts),
    )


class Gather(torch.autograd.Function):
    """Rows [R, H] out of tokens [T, H]; the backward adds a token's K gradients in ascending expert order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, compiled: bool) -> torch.Tensor:
        """``x[tokens]``; ``compiled``: see ops/rows.py."""
        ctx.save_for_backward(slots)
        ctx.compiled = compiled
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Sum over K, in float32 or wider."""
        (slots,) = ctx.saved_tensors
        with record_function("ruda.backward.dispatch"):
            return sum_rows(gradient, slots, ctx.compiled), None, None, None


class Combine(torch.autograd.Function):
    """out [T, H] = sum over k of weights [T, K] * rows[slots[:, k]], added in float32 in ascending expert order.

    ``term`` is a scalar loss that the layer adds by itself: its derivative is what ``account`` returns. ``account`` is
    called once for each backward that uses the layer, which activation checkpointing of any kind does not repeat.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
        term: torch.Tensor,
        account: Callable[[], float],
        compiled: bool,
    ) -> torch.Tensor:
        """The weighted sum, in the rows' dtype; ``compiled``: see ops/rows.py."""
        ctx.save_for_backward(rows, weights, slots)
        ctx.account, ctx.like, ctx.compiled = account, (term.dtype, term.device), compiled
        return combine_rows(rows, weights, slots, compiled)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each row's gradient is written once; a weight's is a dot product in float32 or wider."""
        with record_function("ruda.backward.combine"):
            rows, weights, slots = ctx.saved_tensors
            row_gradient, weight_gradient = combine_rows_backward(gradient, rows, weights, slots, ctx.compiled)
            dtype, device = ctx.like
            term_gradient = torch.full((), ctx.account(), dtype=dtype, device=device)
        return row_gradient, weight_gradient, None, term_gradient, None, None


def regroup(table: torch.Tensor) -> torch.Tensor:
    """[R] int64: the arrived row at each place when rows are sorted by expert and, within one, by rank.

    Args:
        table: [P, L] rows of each expert from each rank, in which order they arrived.
    """
    starts = torch.zeros(table.numel(), dtype=torch.int64)
    torch.cumsum(table.reshape(-1)[:-1], 0, out=starts[1:])
    sizes = table.t().reshape(-1)  # in the wanted order
    begins = starts.view(table.shape).t().reshape(-1)
    ends = torch.cumsum(sizes, 0)
    within = torch.arange(int(sizes.sum())) - torch.repeat_interleave(ends - sizes, sizes)
    return torch.repeat_interleave(begins, sizes) + within
