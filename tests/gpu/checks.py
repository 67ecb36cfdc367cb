"""Everything that must be right on a card before a time means anything."""

from __future__ import annotations

from collections.abc import Callable

import torch
from grouped_swiglu import grouped_swiglu_experts

from ruda_ds.ops import self_check
from ruda_ds.ops.fused_experts import fused_experts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# (rows of each expert, H, F)
SHAPES = [
    ((40, 0, 15), 40, 72),
    ((0, 300, 129), 136, 264),
    ((3, 0, 50, 0), 33, 7),
    ((0, 0), 8, 16),
    ((1,), 1, 1),
    ((1000, 0, 0, 0), 1000, 1000),
    ((0, 7, 0, 600, 1, 0, 129, 128), 1000, 33),
    (tuple((e * 7919) % 90 for e in range(300)), 256, 128),
]
LARGE = [((1024,) * 8, 1024, 1024), (tuple(128 if e % 4 else 0 for e in range(64)), 1024, 512), ((4096, 1), 2048, 1408)]


def device() -> torch.device:
    """The card in use."""
    return torch.device("cuda", torch.cuda.current_device())


def accuracy(dtype: torch.dtype, shapes: list) -> str:
    """ "ok", or the first case that is off."""
    for shape in shapes:
        errors = self_check.case_errors(*shape, dtype, device())
        # A single value's error is not averaged over others.
        limit = self_check.LIMITS[dtype] * (2 if shape[1] * shape[2] == 1 else 1)
        bad = {name: error for name, error in errors.items() if error > limit}
        if bad:
            return f"{shape[0][:8]}, H {shape[1]}, F {shape[2]}: " + ", ".join(f"{n} {e:.1e}" for n, e in bad.items())
    return "ok"


def inputs(dtype: torch.dtype) -> tuple:
    """A middling problem."""
    return self_check._inputs((300, 0, 129, 40), 256, 264, dtype, device())


def both(tensors: list, offsets: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients by the operator."""
    output, preactivation = torch.ops.ruda.fused_experts(tensors[0], offsets, *tensors[1:])
    given = (gradient, tensors[0], offsets, *tensors[1:], preactivation)
    return [output, *torch.ops.ruda.fused_experts_backward(*given, [True] * 4, None, None, None)]


def repeatable() -> str:
    """Bit for bit the same, ten times over."""
    for dtype in DTYPES:
        first = both(*inputs(dtype))
        for _ in range(10):
            if not all(torch.equal(a, b) for a, b in zip(first, both(*inputs(dtype)), strict=True)):
                return f"{dtype} differs from run to run"
    return "ok"


def without_waiting() -> str:
    """No call makes the host wait for the card."""
    given = inputs(torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "ok"


def captured() -> str:
    """In a CUDA graph, replayed with other offsets: the schedule is made on the card."""
    tensors, offsets, gradient = inputs(torch.bfloat16)
    both(tensors, offsets, gradient)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(tensors, offsets, gradient)
    offsets.copy_(torch.tensor([0, 11, 11, 400, 469]))
    graph.replay()
    wanted = both(tensors, offsets, gradient)
    return "ok" if all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) else "a replay differs"


def other_stream() -> str:
    """On a stream of its own, right after the inputs were made on it."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return accuracy(torch.bfloat16, SHAPES[:2])


def unaligned_views() -> str:
    """Inputs that are not contiguous, or begin at odd addresses."""
    tensors, offsets, gradient = inputs(torch.bfloat16)
    wanted = both(tensors, offsets, gradient)
    moved = [torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view_as(t).copy_(t) for t in tensors]
    turned = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in tensors]
    for name, given in (("odd addresses", moved), ("transposed", turned)):
        found = both(given, offsets, gradient)
        errors = [self_check.relative_error(a, b.double()) for a, b in zip(found, wanted, strict=True)]
        if max(errors) > 5e-3:
            return f"{name}: {max(errors):.1e}"
    return "ok"


def chosen_gradients() -> str:
    """Each gradient alone is the one that all together give."""
    tensors, offsets, gradient = inputs(torch.bfloat16)
    _, *wanted = both(tensors, offsets, gradient)
    _, preactivation = torch.ops.ruda.fused_experts(tensors[0], offsets, *tensors[1:])
    given = (gradient, tensors[0], offsets, *tensors[1:], preactivation)
    for which in range(4):
        needs = [which == one for one in range(4)]
        found = torch.ops.ruda.fused_experts_backward(*given, needs, None, None, None)
        if not torch.equal(found[which], wanted[which]) or any(found[one].numel() for one in range(4) if one != which):
            return f"{self_check.NAMES[which]} alone differs"
    return "ok"


def through_autograd() -> str:
    """`fused_experts` by name and by "auto": the operator's own gradients, and sums in given buffers."""
    tensors, offsets, gradient = inputs(torch.bfloat16)
    output, *wanted = both(tensors, offsets, gradient)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    for backend in ("cuda", "auto"):
        found = fused_experts(leaves[0], offsets, *leaves[1:], backend=backend)
        pairs = zip((found, *torch.autograd.grad(found, leaves, gradient)), (output, *wanted), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return f"backend {backend!r} differs from the operator"
    buffers = [torch.zeros(weight.shape, device=weight.device) for weight in leaves[1:]]
    fused_experts(leaves[0], offsets, *leaves[1:], backend="cuda", weight_gradients=buffers).backward(gradient)
    rounded = [buffer.to(torch.bfloat16) for buffer in buffers]
    return "ok" if all(map(torch.equal, rounded, wanted[1:])) else "buffers differ from the rounded gradients"


def grouped() -> str:
    """torch's grouped product with our SwiGLU kernels."""
    for dtype in (torch.bfloat16, torch.float16):
        tensors, offsets, gradient = self_check._inputs((300, 0, 129, 40), 256, 264, dtype, device())
        output, wanted = self_check._wanted(tensors, offsets, gradient)
        leaves = [tensor.requires_grad_() for tensor in tensors]
        try:
            found = grouped_swiglu_experts(leaves[0], offsets, *leaves[1:])
        except RuntimeError as error:
            if dtype == torch.float16:
                continue  # torch's grouped product is for bfloat16 on some cards
            return str(error).splitlines()[0]
        pairs = zip((found, *torch.autograd.grad(found, leaves, gradient)), (output, *wanted), strict=True)
        errors = [self_check.relative_error(a.detach(), b) for a, b in pairs]
        if max(errors) > self_check.LIMITS[dtype]:
            return f"{dtype}: {max(errors):.1e}"
    return "ok"


def refusals() -> str:
    """Wrong inputs are refused, by name."""
    tensors, offsets, _ = inputs(torch.bfloat16)
    for bad, word in (
        ((tensors[0].double(), offsets, *tensors[1:]), "rows are"),
        ((tensors[0], offsets[:-1], *tensors[1:]), "offsets is"),
        ((tensors[0], offsets.cpu(), *tensors[1:]), "offsets is on cpu"),
    ):
        try:
            torch.ops.ruda.fused_experts(*bad)
        except (ValueError, RuntimeError) as error:
            if word not in str(error):
                return f"expected {word!r} in: {error}"
            continue
        return f"not refused: {word}"
    return "ok"


def run(quick: bool) -> list[dict[str, str]]:
    """Every check with its result; an exception is a result too."""
    named: dict[str, Callable[[], str]] = {
        f"accuracy, {str(d)[6:]}": lambda d=d: accuracy(d, SHAPES if quick else SHAPES + LARGE) for d in DTYPES
    }
    named |= {
        "the choice of auto": lambda: self_check.cuda_problem(device()) or "ok",
        "bitwise repeatable": repeatable,
        "never waits for the card": without_waiting,
        "CUDA graph": captured,
        "another stream": other_stream,
        "views and odd addresses": unaligned_views,
        "chosen gradients": chosen_gradients,
        "through autograd": through_autograd,
        "grouped product and SwiGLU kernels": grouped,
        "refusals": refusals,
    }
    found = []
    for name, check in named.items():
        try:
            result = check()
            torch.cuda.synchronize()
        except Exception as error:
            result = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        found.append({"check": name, "result": result})
    return found
