"""The compiled experts beside what else computes SwiGLU experts on a CPU, as shares of the run's own peak.

    python tests/benchmarks/bench_fused_experts.py [--cases 8,64] [--dtypes bfloat16] [--rounds 5] [--threads 2]

The peak is that of torch.mm on 2048 x 2048 matrices, taken in every round before the contenders: "ours" (backend
"cpu"), "grouped" (F.grouped_mm), "unbind" (a loop over the unbound cubes) and "autoep" (the grouped path of DeepSpeed's
AutoEP). A round is one forward, and one forward + backward with all four gradients, of each; who goes first changes
from round to round. Shares are those of the medians of wall time; "cpu" is the same share in processor time, which
scatters less on a machine that others use too. Saved bytes are what a forward pass keeps for its backward beside its
inputs and weights, as a multiple of the rows' bytes; peak bytes are the most that a forward + backward has allocated at
once, gradients included.

Before it is timed, every contender is compared with the reference in float64, on some of the experts: experts are
independent of each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from ruda_ds.ops import fused_experts

# name: (rows, experts, H, F, skewed)
CASES = {
    "8": (8192, 8, 1024, 1024, False),
    "64": (8192, 64, 1024, 512, False),
    "64-skewed": (8192, 64, 1024, 512, True),
    "128": (8192, 128, 512, 256, False),
    "16-rows": (512, 32, 256, 128, False),
    "1-row": (64, 64, 1024, 512, False),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LIMITS = {torch.bfloat16: 5e-3, torch.float32: 1e-6}
# The peers round more often, or sum in another order.
PEER_LIMITS = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
PEAK_SIZE = 2048

Contender = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]


def skewed_counts(rows: int, experts: int) -> list[int]:
    """A quarter without rows; the others' shares fall as their rank to the power 0.7."""
    weights = torch.tensor([0.0 if i % 4 == 3 else (i + 1) ** -0.7 for i in range(experts)], dtype=torch.float64)
    counts = (weights / weights.sum() * rows).long()
    counts[0] += rows - counts.sum()
    return counts.tolist()


@dataclass
class Inputs:
    """Leaves rows [R, H], gate and up [L, F, H], down [L, H, F]; offsets; the gradient of the output."""

    tensors: list[torch.Tensor]
    offsets: torch.Tensor
    gradient: torch.Tensor

    @property
    def flops(self) -> int:
        """Of a forward pass; a backward pass has twice as many."""
        return 6 * self.tensors[0].shape[0] * self.tensors[1][0].numel()


def make(case: str, dtype: torch.dtype) -> Inputs:
    rows, experts, hidden, inner, skewed = CASES[case]
    counts = skewed_counts(rows, experts) if skewed else [rows // experts] * experts
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    tensors = [draw(rows, hidden), *(draw(experts, inner, hidden, scale=hidden**-0.5) for _ in range(2))]
    tensors.append(draw(experts, hidden, inner, scale=inner**-0.5))
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return Inputs([tensor.requires_grad_() for tensor in tensors], offsets, draw(rows, hidden))


def by_backend(backend: str) -> Contender:
    return lambda tensors, offsets: fused_experts(tensors[0], offsets, *tensors[1:], backend=backend)


def autoep(tensors: list[torch.Tensor], offsets: torch.Tensor) -> torch.Tensor:
    """The experts module of AutoEP, on our tensors."""
    from deepspeed.moe.ep_experts import GroupedExperts

    with torch.device("meta"):
        module = GroupedExperts(tensors[0].shape[1], tensors[1].shape[1], tensors[1].shape[0], use_grouped_mm=True)
    weights = {"w1": tensors[1], "w3": tensors[2], "w2": tensors[3]}
    return torch.func.functional_call(module, weights, (tensors[0], offsets.diff()))


CONTENDERS: dict[str, Contender] = {
    "ours": by_backend("cpu"),
    "grouped": by_backend("grouped"),
    "unbind": by_backend("reference"),
    "autoep": autoep,
}


def both(contender: Contender, inputs: Inputs) -> list[torch.Tensor]:
    output = contender(inputs.tensors, inputs.offsets)
    return [output, *torch.autograd.grad(output, inputs.tensors, inputs.gradient)]


def alone(inputs: Inputs, expert: int) -> list[torch.Tensor]:
    """Results of one expert, by the reference in float64."""
    begin, end = inputs.offsets[expert : expert + 2].tolist()
    part = [inputs.tensors[0][begin:end], *(cube[expert : expert + 1] for cube in inputs.tensors[1:])]
    exact = [tensor.detach().double().requires_grad_() for tensor in part]
    one = Inputs(exact, torch.tensor([0, end - begin]), inputs.gradient[begin:end].double())
    return [value.detach() for value in both(by_backend("reference"), one)]


def check(inputs: Inputs) -> None:
    """Compare the fullest expert, the last and a middle one with the reference."""
    dtype = inputs.tensors[0].dtype
    busy = inputs.offsets.diff().nonzero().flatten().tolist()
    wanted = {e: alone(inputs, e) for e in {int(inputs.offsets.diff().argmax()), busy[-1], busy[len(busy) // 2]}}
    for name, contender in CONTENDERS.items():
        found = both(contender, inputs)
        limit = (LIMITS if name == "ours" else PEER_LIMITS)[dtype]
        for expert, results in wanted.items():
            rows = slice(*inputs.offsets[expert : expert + 2].tolist())
            for index, right in enumerate(results):
                value = found[index][rows if index < 2 else slice(expert, expert + 1)].double()
                error = ((value - right).norm() / right.norm()).item()
                assert error <= limit, f"{name}, expert {expert}, result {index}: off by {error:.1e}, allowed {limit}"


def saved_bytes(contender: Contender, inputs: Inputs) -> int:
    """Bytes kept by a forward pass, without its inputs and views of them."""
    kept: dict[int, int] = {}
    given = {tensor.untyped_storage().data_ptr() for tensor in (*inputs.tensors, inputs.offsets)}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = contender(inputs.tensors, inputs.offsets)
    total = sum(kept.values())
    del output
    return total


def peak_bytes(contender: Contender, inputs: Inputs) -> int:
    """The most that torch had allocated at once in a forward + backward, above what there was before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        both(contender, inputs)
    live, peak = 0, 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(wall, processor) seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - wall) / repeats, (time.process_time() - cpu) / repeats


def measure(case: str, dtype_name: str, rounds: int) -> dict:
    inputs = make(case, DTYPES[dtype_name])
    check(inputs)
    memory = {name: (saved_bytes(c, inputs), peak_bytes(c, inputs)) for name, c in CONTENDERS.items()}
    square = [torch.randn(PEAK_SIZE, PEAK_SIZE).to(DTYPES[dtype_name]) for _ in range(2)]
    repeats = max(1, int(3e9 / (3 * inputs.flops)))
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):  # the first is for warming up
        calls = {"peak": (lambda: torch.mm(square[0], square[1]), 1)}
        names = list(CONTENDERS)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            contender = CONTENDERS[name]
            calls[f"{name} forward"] = (lambda c=contender: c(inputs.tensors, inputs.offsets), repeats)
            calls[f"{name} both"] = (lambda c=contender: both(c, inputs), repeats)
        for key, (call, count) in calls.items():
            times.setdefault(key, []).append(timed(call, count))
    return summary(case, dtype_name, inputs, times, memory)


def summary(case: str, dtype_name: str, inputs: Inputs, times: dict, memory: dict) -> dict:
    """A row of the table and of the JSON; times by medians of all rounds but the first."""
    seconds = {
        key: [statistics.median(t[clock] for t in taken[1:]) for clock in (0, 1)] for key, taken in times.items()
    }
    peak = [2 * PEAK_SIZE**3 / value for value in seconds["peak"]]
    rows_bytes = inputs.tensors[0].numel() * inputs.tensors[0].element_size()

    def share(key: str, flops: int, clock: int = 0) -> float:
        return round(flops / seconds[key][clock] / peak[clock], 3)

    peers = [name for name in CONTENDERS if name != "ours"]
    contenders = {
        name: {
            "forward": share(f"{name} forward", inputs.flops),
            "both": share(f"{name} both", 3 * inputs.flops),
            "both_cpu": share(f"{name} both", 3 * inputs.flops, 1),
            "saved_x": round(memory[name][0] / rows_bytes, 2),
            "saved_bytes": memory[name][0],
            "peak_bytes": memory[name][1],
        }
        for name in CONTENDERS
    }
    return {
        "case": case,
        "dtype": dtype_name,
        "peak_gflops": round(peak[0] / 1e9, 1),
        "peak_share": contenders["ours"]["both"],
        "vs_best_peer": round(min(seconds[f"{name} both"][0] for name in peers) / seconds["ours both"][0], 2),
        "vs_best_peer_cpu": round(min(seconds[f"{name} both"][1] for name in peers) / seconds["ours both"][1], 2),
        "forward_vs_best_peer": round(min(seconds[f"{n} forward"][0] for n in peers) / seconds["ours forward"][0], 2),
        "saved_x": contenders["ours"]["saved_x"],
        "contenders": contenders,
    }


def show(row: dict) -> None:
    print(
        f"\n{row['case']}, {row['dtype']}: peak {row['peak_gflops']} GFLOP/s; ours is {row['vs_best_peer']} x the best "
        f"peer (forward {row['forward_vs_best_peer']} x; in processor time {row['vs_best_peer_cpu']} x)"
    )
    for name, found in row["contenders"].items():
        print(
            f"  {name:8} forward {found['forward']:.3f}  forward + backward {found['both']:.3f} (cpu "
            f"{found['both_cpu']:.3f})  saved {found['saved_bytes'] / 2**20:8.1f} MiB = {found['saved_x']:5.2f} x rows"
            f"  peak {found['peak_bytes'] / 2**20:8.1f} MiB"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for dtype in args.dtypes.split(","):
        for case in args.cases.split(","):
            rows.append(measure(case, dtype, args.rounds))
            show(rows[-1])
    print(json.dumps({"name": "fused_experts", "threads": args.threads, "rows": rows}))


if __name__ == "__main__":
    main()
