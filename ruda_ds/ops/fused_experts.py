"""The experts' arithmetic as one call, and the choice of what does it.

Letters: R rows sorted by expert, L experts, H hidden width, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ruda_ds.errors import OwnershipError
from ruda_ds.ops.reference import reference_experts

BACKENDS = ("auto", "reference", "grouped")


def _grouped_fits(rows: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether torch's grouped product takes these operands: its rows must begin at multiples of 16 bytes."""
    if not hasattr(F, "grouped_mm") or rows.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    aligned = 16 // rows.element_size()
    return rows.shape[1] % aligned == 0 and gate.shape[1] % aligned == 0 and rows.shape[0] > 0 and gate.shape[0] > 0


def grouped_experts(
    rows: torch.Tensor, offsets: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """`reference_experts` by torch's grouped matrix product."""
    ends = offsets[1:].to(torch.int32)
    gated = F.silu(F.grouped_mm(rows, gate.transpose(1, 2), offs=ends))
    hidden = gated * F.grouped_mm(rows, up.transpose(1, 2), offs=ends)
    return F.grouped_mm(hidden, down.transpose(1, 2), offs=ends)


def fused_experts(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    backend: str = "auto",
) -> torch.Tensor:
    """SwiGLU experts on rows sorted by expert; see `reference_experts` for shapes.

    Args:
        backend: "reference", "grouped" (torch's grouped product; its operands must be aligned to 16 bytes), or "auto":
            grouped where it fits.

    Raises:
        OwnershipError: shapes or dtypes that do not belong together, or a backend that is unknown or does not fit.
    """
    experts, inner, hidden = gate.shape
    if up.shape != gate.shape or tuple(down.shape) != (experts, hidden, inner):
        raise OwnershipError(
            f"gate is {tuple(gate.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)}; expected [L, F, H], "
            "[L, F, H] and [L, H, F]"
        )
    if rows.ndim != 2 or rows.shape[1] != hidden or rows.dtype != gate.dtype or offsets.numel() != experts + 1:
        raise OwnershipError(
            f"rows are {tuple(rows.shape)} {rows.dtype} with {offsets.numel()} offsets; expected [R, {hidden}] "
            f"{gate.dtype} with {experts + 1}"
        )
    if backend not in BACKENDS:
        raise OwnershipError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    fits = _grouped_fits(rows, gate)
    if backend == "grouped" and not fits:
        raise OwnershipError(f"backend 'grouped' does not take rows {tuple(rows.shape)} {rows.dtype} and F {inner}")
    if backend == "reference" or not fits:
        return reference_experts(rows, offsets, gate, up, down)
    return grouped_experts(rows, offsets, gate, up, down)
