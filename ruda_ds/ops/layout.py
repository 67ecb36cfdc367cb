"""Rows that do not lie sorted by expert, and results that are to lie elsewhere than they did.

Letters: R rows that belong to experts, N rows given, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Where rows lie before their experts, and after them. No number comes twice.

    Attributes:
        order: [R] int64, the r-th row by expert is rows[order[r]]; None: they lie so already.
        places: [R] int64, its result is results[places[r]].
        size: number of results; those that no place names are zero.
    """

    order: torch.Tensor | None
    places: torch.Tensor
    size: int

    def sort(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, H] as they lie -> [R, H] by expert."""
        return rows if self.order is None else _Sort.apply(rows, self.order)

    def spread(self, results: torch.Tensor) -> torch.Tensor:
        """[R, H] by expert -> [size, H] as they are to lie."""
        return _Spread.apply(results, self.places, self.size)


def _copied_to(places: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    """[size, H] with the rows at their places and zeros elsewhere."""
    made = rows.new_empty if size == len(places) else rows.new_zeros
    return made(size, rows.shape[1]).index_copy_(0, places, rows)


class _Sort(torch.autograd.Function):
    """rows[order]; as no row comes twice, the backward is a copy to places and not a scatter-add."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.size = len(rows)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (order,) = ctx.saved_tensors
        with record_function("ruda.backward.dispatch"):
            return _copied_to(order, gradient, ctx.size), None


class _Spread(torch.autograd.Function):
    """The inverse of _Sort: rows to distinct places."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return _copied_to(places, rows, size)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        with record_function("ruda.backward.dispatch"):
            return gradient.index_select(0, places), None, None
