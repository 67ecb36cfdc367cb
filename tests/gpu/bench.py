"""Times of the fused experts on a card against torch's own ways, interleaved in one run with the peak matmul."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from grouped_swiglu import grouped_swiglu_experts

from ruda_ds.ops.fused_experts import grouped_experts
from ruda_ds.ops.reference import reference_experts

LEGEND = (
    "Medians in milliseconds, forward / forward and backward. Share: of the same run's peak matmul, forward and "
    "backward, counted as 6 (forward) and 18 R H F floating point operations. Ways: ours (the fused operator), grouped "
    "(F.grouped_mm under autograd), grouped+ (F.grouped_mm with our SwiGLU kernels), loop (over experts; it reads the "
    "offsets and so waits for the card). Saved: bytes kept for backward, rows and weights "
    "left out, over the rows' bytes."
)
# (rows, experts, H, F, skewed)
CASES = [
    (8192, 8, 1024, 1024, False),
    (8192, 64, 1024, 512, False),
    (8192, 64, 1024, 512, True),
    (8192, 128, 512, 256, False),
    (512, 32, 256, 128, False),
    (64, 64, 1024, 512, False),
]
LARGE = [
    (32768, 8, 4096, 4096, False),
    (65536, 64, 2048, 1408, False),
    (65536, 64, 2048, 1408, True),
    (65536, 128, 2048, 768, False),
]


def counts_of(rows: int, experts: int, skewed: bool) -> list[int]:
    """Rows of each expert; skewed: a quarter empty, the others falling like 1 / rank."""
    if not skewed:
        return [rows // experts + (e < rows % experts) for e in range(experts)]
    weights = [0.0 if e % 4 == 3 else 1.0 / (1 + e) for e in range(experts)]
    counts = [int(rows * weight / sum(weights)) for weight in weights]
    counts[0] += rows - sum(counts)
    return counts


def milliseconds(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of each, taken in turns; a way that raises is left out."""
    times: dict[str, list[float]] = {}
    for name, function in functions.items():
        try:
            for _ in range(3):
                function()
            torch.cuda.synchronize()
            times[name] = []
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    for _ in range(rounds):
        for name in times:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            functions[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def ours(needs_backward: bool, rows, offsets, gate, up, down, gradient):
    """The operator, without autograd around it."""
    output, preactivation = torch.ops.ruda.fused_experts(rows, offsets, gate, up, down)
    if needs_backward:
        given = (gradient, rows, offsets, gate, up, down, preactivation)
        torch.ops.ruda.fused_experts_backward(*given, [True] * 4, None, None, None)
    return output


def by_autograd(way, needs_backward: bool, rows, offsets, gate, up, down, gradient):
    """Another way, through autograd."""
    if not needs_backward:
        with torch.no_grad():
            return way(rows, offsets, gate, up, down)
    leaves = (rows, gate, up, down)
    return torch.autograd.grad(way(rows, offsets, gate, up, down), leaves, gradient)


def saved_share(rows: torch.Tensor, way, *given) -> float:
    """Bytes that a way keeps for backward beside the rows and the weights, over the rows' bytes."""
    kept: dict[int, int] = {}
    inputs = {tensor.untyped_storage().data_ptr() for tensor in (given[0], *given[2:5])}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        way(*given)
    return sum(kept.values()) / (rows.numel() * rows.element_size())


def peak(dtype: torch.dtype, rounds: int) -> float:
    """TFLOP/s of one large matmul."""
    size = 8192 if dtype != torch.float32 else 4096
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    time = milliseconds({"matmul": lambda: a @ b}, rounds)["matmul"]
    return 2 * size**3 / time / 1e9


def measure(case: tuple, dtype: torch.dtype, rounds: int) -> dict[str, str]:
    """One row of the table."""
    count, experts, hidden, inner, skewed = case
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").mul_(shape[-1] ** -0.5).to(dtype).requires_grad_()

    offsets = torch.tensor([0, *counts_of(count, experts, skewed)], device="cuda").cumsum(0)
    given = (draw(count, hidden), offsets, draw(experts, inner, hidden), draw(experts, inner, hidden))
    given = (*given, draw(experts, hidden, inner))
    gradient = torch.randn(count, hidden, device="cuda").to(dtype)
    ways = {"grouped": grouped_experts, "grouped+": grouped_swiglu_experts, "loop": reference_experts}
    functions: dict[str, Callable[[], object]] = {}
    plain = [tensor.detach() for tensor in given]
    for backward, mark in ((False, "forward"), (True, "both")):
        functions[f"ours {mark}"] = lambda backward=backward: ours(backward, *plain, gradient)
        for name, way in ways.items():
            functions[f"{name} {mark}"] = lambda w=way, b=backward: by_autograd(w, b, *given, gradient)
    times = milliseconds(functions, rounds)
    floor = peak(dtype, rounds)
    flops = 18 * count * hidden * inner
    best = min((v for n, v in times.items() if n.endswith("both") and not n.startswith("ours")), default=float("nan"))
    row = {"R, L, H, F": f"{count}, {experts}, {hidden}, {inner}" + (", skewed" if skewed else "")}
    row |= {"type": str(dtype)[6:], "peak TFLOP/s": f"{floor:.0f}"}
    for name in ("ours", *ways):
        pair = [times.get(f"{name} {mark}") for mark in ("forward", "both")]
        row[name] = " / ".join("-" if value is None else f"{value:.3f}" for value in pair)
    row["share"] = f"{flops / times['ours both'] / 1e9 / floor:.2f}" if "ours both" in times else "-"
    row["against the best other"] = f"{best / times['ours both']:.2f}" if "ours both" in times else "-"
    # The operator keeps the pre-activation.
    row["saved: ours"] = f"{2 * inner / hidden:.1f}"
    kept = saved_share(given[0], grouped_experts, *given) if "grouped both" in times else None
    row["saved: grouped"] = "-" if kept is None else f"{kept:.1f}"
    return row


def run(quick: bool) -> list[dict[str, str]]:
    """The whole table."""
    rows = []
    cases, dtypes = (CASES[:2], (torch.bfloat16,)) if quick else (CASES + LARGE, (torch.bfloat16, torch.float32))
    for dtype in dtypes:
        for case in cases:
            if dtype == torch.float32 and case in LARGE:
                continue
            rows.append(measure(case, dtype, 10 if quick else 30))
            torch.cuda.empty_cache()
    return rows
