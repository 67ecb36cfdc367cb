"""Sums of rows: what puts a token together from the rows of its experts, and back.

The compiled operators (csrc/cpu/rows.cpp) make one pass over memory; the compositions here are their oracle, and what
runs on other devices and dtypes.
Letters: T tokens, K rows a token, N rows, H hidden width.
"""

from __future__ import annotations

import torch

from ruda_ds.ops.fused_experts import COMPILED_DTYPES, compiled_ready


def is_compiled(backend: str, rows: torch.Tensor) -> bool:
    """Whether the compiled operators do the sums for experts of a backend; they are built and loaded now if need be."""
    if backend not in ("auto", "cpu") or rows.device.type != "cpu" or rows.dtype not in COMPILED_DTYPES["cpu"]:
        return False
    return compiled_ready("cpu", explicit=backend == "cpu")


def fresh_rows(like: torch.Tensor, count: int, compiled: bool = False) -> torch.Tensor:
    """[count, H] uninitialised rows of the dtype and device of ``like`` [N, H].

    Compiled, a large one takes memory that an earlier one gave back: the first touch of new pages takes longer than
    what is then done with them.
    """
    if compiled:
        return torch.ops.ruda.fresh_rows(like, count)
    return like.new_empty(count, like.shape[1])


def sum_rows(
    rows: torch.Tensor, slots: torch.Tensor, compiled: bool = False, more: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, H]: each token's K rows, rows[slots[t, k]], added in the order of k in float32 or wider.

    Args:
        rows: [N, H], floating; the result has their dtype.
        slots: [T, K] int64.
        compiled: see `is_compiled`.
        more: [M, H], rows that are numbered from N on.
    """
    if compiled:
        return torch.ops.ruda.combine_rows(rows.contiguous(), more, None, slots)
    if more is not None:
        rows = torch.cat([rows, more])
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for column in slots.unbind(1):
        total += rows.index_select(0, column)
    return total.to(rows.dtype)


def combine_rows(
    rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, compiled: bool = False
) -> torch.Tensor:
    """[T, H]: sum over k of weights[t, k] * rows[slots[t, k]], in the order of k in float32 or wider.

    Args:
        rows: [N, H], floating; the result has their dtype.
        weights: [T, K], float32 or wider.
        slots: [T, K] int64.
        compiled: see `is_compiled`.
    """
    if compiled:
        return torch.ops.ruda.combine_rows(rows.contiguous(), None, weights.float().contiguous(), slots)
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(slots.shape[0], rows.shape[1], dtype=wide, device=rows.device)
    for k, column in enumerate(slots.unbind(1)):
        total.addcmul_(rows.index_select(0, column).to(wide), weights[:, k : k + 1].to(wide))
    return total.to(rows.dtype)


def combine_rows_backward(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    slots: torch.Tensor,
    compiled: bool = False,
    *,
    split: int,
    room: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Derivatives of `combine_rows` for slots that name no row twice.

    Args:
        gradient: [T, H] of the result.
        rows, weights, slots, compiled: as given to `combine_rows`.
        split: the gradients of that many first rows go to a tensor of their own.
        room: rows that this tensor has more, for the caller to fill.

    Returns:
        (of rows[:split] [split + room, H]; of rows[split:] [N - split, H]; of the weights [T, K]). Rows that no slot
        names, and the room, are undefined.
    """
    if compiled:
        narrow = weights.float().contiguous()
        first, second, of_weights = torch.ops.ruda.combine_rows_backward(
            gradient.contiguous(), rows.contiguous(), narrow, slots, split, room
        )
        return first, second, of_weights.to(weights.dtype)
    wide = torch.promote_types(rows.dtype, torch.float32)
    upstream = gradient.to(wide)
    of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)
    for k, column in enumerate(slots.unbind(1)):
        of_rows.index_copy_(0, column, (upstream * weights[:, k : k + 1].to(wide)).to(rows.dtype))
        products = upstream * rows.index_select(0, column).to(wide)
        of_weights[:, k] = products.sum(1).to(weights.dtype)
    if split == len(rows) and not room:
        return of_rows, of_rows[split:], of_weights
    first = rows.new_empty(split + room, rows.shape[1])
    first[:split] = of_rows[:split]
    return first, of_rows[split:], of_weights
