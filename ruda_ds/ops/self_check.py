"""The compiled operator tried on the device at hand, before it is chosen without being asked for.

Small problems with fresh random inputs against the reference in float64: forward, all four gradients, weight gradients
added to given buffers, empty experts, no rows, aligned and odd widths, few and many rows an expert.
"""

from __future__ import annotations

import torch

from ruda_ds.ops.reference import reference_experts

# Largest relative error by norm.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 5e-3}
# (rows of each expert, H, F): small and large tiles, odd widths, no rows.
CASES = (
    ((40, 0, 15), 40, 72),
    ((0, 300, 129), 136, 264),
    ((3, 0, 50, 0), 33, 7),
    ((0, 0), 8, 16),
)
NAMES = ("rows", "gate", "up", "down")


def _inputs(
    counts: tuple[int, ...], hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """([rows, gate, up, down], offsets, gradient of the output), random; weights scaled to keep the variance."""
    generator = torch.Generator().manual_seed(sum(counts) * 31 + hidden)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    experts, total = len(counts), sum(counts)
    rows, gradient = draw(total, hidden), draw(total, hidden)
    gate, up = (draw(experts, inner, hidden, scale=hidden**-0.5) for _ in range(2))
    down = draw(experts, hidden, inner, scale=inner**-0.5)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device)
    return [rows, gate, up, down], offsets, gradient


def _wanted(
    tensors: list[torch.Tensor], offsets: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The output and the four gradients, in float64 by the reference."""
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    output = reference_experts(exact[0], offsets, *exact[1:])
    return output.detach(), list(torch.autograd.grad(output, exact, gradient.double()))


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Error by norm against a float64 tensor; the absolute one where zero is wanted. NaN counts as infinite."""
    scale = wanted.norm().item()
    error = (found.double() - wanted).norm().item() / (scale if scale else 1.0)
    return error if error == error else float("inf")


def case_errors(
    counts: tuple[int, ...], hidden: int, inner: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Relative errors of torch.ops.ruda's forward and backward: output, the four gradients, and those in buffers."""
    tensors, offsets, gradient = _inputs(counts, hidden, inner, dtype, device)
    output, gradients = _wanted(tensors, offsets, gradient)
    found, preactivation = torch.ops.ruda.fused_experts(tensors[0], offsets, *tensors[1:])
    given = (gradient, tensors[0], offsets, *tensors[1:], preactivation)
    plain = torch.ops.ruda.fused_experts_backward(*given, [True] * 4, None, None, None)
    # Of the gradients' own size, so that the sums' rounding is no larger than theirs.
    begun = [wanted.float() for wanted in gradients[1:]]
    buffers = [value.clone() for value in begun]
    torch.ops.ruda.fused_experts_backward(*given, [False, True, True, True], *buffers)
    errors = {"output": relative_error(found, output)}
    errors |= {
        name: relative_error(*pair) for name, pair in zip(NAMES, zip(plain, gradients, strict=True), strict=True)
    }
    for name, buffer, start, wanted in zip(NAMES[1:], buffers, begun, gradients[1:], strict=True):
        errors[f"{name} in a buffer"] = relative_error(buffer.double() - start.double(), wanted)
    return errors


def check_operator(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> str | None:
    """What torch.ops.ruda computes wrongly on a device; None if everything is within `LIMITS`."""
    for dtype in dtypes:
        for counts, hidden, inner in CASES:
            where = f"{str(dtype).removeprefix('torch.')}, rows {list(counts)}, H {hidden}, F {inner}"
            try:
                errors = case_errors(counts, hidden, inner, dtype, device)
            except (RuntimeError, ValueError) as error:
                return f"{where}: {str(error).splitlines()[0]}"
            bad = [f"{name} is off by {error:.1e}" for name, error in errors.items() if error > LIMITS[dtype]]
            if bad:
                return f"{where}: {', '.join(bad)}, at most {LIMITS[dtype]:.0e} is allowed"
    return None


_FOUND: dict[torch.device, str | None] = {}


def cuda_problem(device: torch.device) -> str | None:
    """Why the compiled kernels are not to be chosen by "auto" on a CUDA device; None if they passed there.

    Tried once a process and device, some milliseconds, with the card waited for: not possible while a graph is being
    captured, where it says so and tries again at the next call.
    """
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device in _FOUND:
        return _FOUND[device]
    if torch.cuda.is_current_stream_capturing():
        return "not yet checked on this device, and it cannot be while a graph is captured: run one step before"
    dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_bf16_supported() else [])
    with torch.enable_grad(), torch.cuda.device(device), torch.autocast("cuda", enabled=False):
        _FOUND[device] = check_operator(device, tuple(dtypes))
    return _FOUND[device]
