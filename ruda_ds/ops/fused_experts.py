"""The experts' arithmetic as one call, and the choice of what does it.

Letters: R rows sorted by expert, L experts, H hidden width, F expert width.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ruda_ds.errors import BuildError, OwnershipError
from ruda_ds.ops import library
from ruda_ds.ops.layout import RowLayout
from ruda_ds.ops.reference import reference_experts

BACKENDS = ("auto", "reference", "grouped", "cpu", "cuda")
COMPILED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}


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


_WARNED: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, stacklevel=2)


# Not traced: what it finds does not change within a process, and a build cannot be part of a graph.
@torch.compiler.assume_constant_result
def compiled_ready(device_type: str, explicit: bool) -> bool:
    """Whether the compiled operator can be called on a kind of device; it is built and loaded now if need be.

    Raises:
        BuildError: ``explicit``, and it cannot.
    """
    from ruda_ds.ops.builder import load_fused_experts

    if not load_fused_experts(explicit).ready:
        return False
    key = device_type.upper()
    if not torch._C._dispatch_has_kernel_for_dispatch_key("ruda::fused_experts", key):
        reason = f"the compiled experts were built without {key}"
        if explicit:
            raise BuildError(reason)
        _warn_once(f"ruda_ds runs without its compiled operator: {reason}")
        return False
    library.register()
    return True


@torch.compiler.assume_constant_result
def _cuda_passed(device: torch.device) -> bool:
    """Whether the CUDA kernels gave right numbers on a device; one warning if not."""
    from ruda_ds.ops.self_check import cuda_problem

    problem = cuda_problem(device)
    if problem:
        _warn_once(f"ruda_ds does not use its compiled operator on {device}: {problem}")
    return problem is None


def _choice(backend: str, rows: torch.Tensor, gate: torch.Tensor) -> str:
    """The backend that "auto" stands for; a named one, if it fits."""
    kind = rows.device.type
    if backend == "auto":
        if rows.dtype in COMPILED_DTYPES.get(kind, ()) and compiled_ready(kind, explicit=False):
            return kind if kind == "cpu" or _cuda_passed(rows.device) else _choice_without(rows, gate)
        return _choice_without(rows, gate)
    if backend in COMPILED_DTYPES:
        if kind != backend or rows.dtype not in COMPILED_DTYPES[backend]:
            takes = ", ".join(str(dtype) for dtype in COMPILED_DTYPES[backend])
            raise OwnershipError(f"backend {backend!r} does not take {rows.dtype} rows on {kind}; expected {takes}")
        compiled_ready(kind, explicit=True)
    if backend == "grouped" and not _grouped_fits(rows, gate):
        raise OwnershipError(
            f"backend 'grouped' does not take rows {tuple(rows.shape)} {rows.dtype} and F {gate.shape[1]}"
        )
    return backend


def _choice_without(rows: torch.Tensor, gate: torch.Tensor) -> str:
    return "grouped" if _grouped_fits(rows, gate) else "reference"


def _check(rows: torch.Tensor, offsets: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
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


def _check_buffers(buffers: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]) -> None:
    if len(buffers) != len(weights):
        raise OwnershipError(f"weight_gradients has {len(buffers)} entries, expected those of gate, up and down")
    for name, buffer, weight in zip(("gate", "up", "down"), buffers, weights, strict=True):
        if buffer is None:
            continue
        fits = buffer.dtype == torch.float32 and buffer.shape == weight.shape and buffer.device == weight.device
        if not fits or not buffer.is_contiguous() or buffer.requires_grad:
            raise OwnershipError(
                f"weight_gradients of {name} is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}; expected "
                f"{tuple(weight.shape)} torch.float32 on {weight.device}, contiguous, without a gradient of its own"
            )


class _IntoBuffer(torch.autograd.Function):
    """A weight whose gradient is added to a float32 buffer instead of being handed on."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        ctx.buffer = buffer
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.buffer.add_(gradients[0])
        return None, None


def fused_experts(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    backend: str = "auto",
    weight_gradients: Sequence[torch.Tensor | None] | None = None,
    layout: RowLayout | None = None,
) -> torch.Tensor:
    """SwiGLU experts on rows sorted by expert; see `reference_experts` for shapes.

    With the backend "cpu" a row's result does not depend on which other rows or experts are in the call, nor the
    gradients of an expert on the other experts, nor anything on the number of threads, bit for bit. Sums are float32.
    Only first derivatives exist.

    Args:
        backend: "cpu" (float32, bfloat16) and "cuda" (float16 too): the compiled operator, built at first use;
            "reference": plain torch, any floating dtype; "grouped": torch's grouped product, its operands aligned to
            16 bytes; "auto": the compiled operator if it can be built and takes the rows (one warning says why if not),
            else grouped where it fits, else reference.
        weight_gradients: float32 buffers for the gradients of gate, up and down, or None for any of them. A backward
            pass adds to a buffer in place, and hands no gradient of that weight to autograd. The compiled backends add
            float32 sums; the others add gradients that were rounded to the weight's dtype.
        layout: rows that lie in another order than by expert, and where their results go: the backend "cpu" reads and
            writes them there, the others copy. None: both are sorted by expert.

    Raises:
        OwnershipError: shapes, dtypes, devices or buffers that do not belong together, or a backend that is unknown or
            does not take them.
        BuildError: the named backend cannot be built here.
        SecondDerivativeError: in a backward pass through a gradient of a compiled backend.
    """
    _check(rows, offsets, gate, up, down)
    if backend not in BACKENDS:
        raise OwnershipError(f"backend is {backend!r}, expected one of {', '.join(BACKENDS)}")
    weights = (gate, up, down)
    buffers: Any = tuple(weight_gradients) if weight_gradients is not None else (None, None, None)
    _check_buffers(buffers, weights)
    chosen = _choice(backend, rows, gate)
    if chosen == "cpu":
        return _compiled(rows, offsets, weights, buffers, layout)
    if layout is not None:
        rows = layout.sort(rows)
    if chosen == "cuda":
        results = _compiled(rows, offsets, weights, buffers, None)
    else:
        gate, up, down = (w if b is None else _IntoBuffer.apply(w, b) for w, b in zip(weights, buffers, strict=True))
        compute = reference_experts if chosen == "reference" else grouped_experts
        results = compute(rows, offsets, gate, up, down)
    return results if layout is None else layout.spread(results)


def _compiled(
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    buffers: library.Buffers,
    layout: RowLayout | None,
) -> torch.Tensor:
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (rows, *weights))
    placed = (None, None, 0) if layout is None else (layout.order, layout.places, layout.size)
    return library.FusedExperts.apply(rows, offsets, *weights, *buffers, *placed, keep)
