"""Windows of a 25 M parameter model through ours and through stock ZeRO-3, in turn, in the same processes.

    python tests/benchmarks/bench_accumulation.py

Two gloo ranks, one thread each, float32, AdamW, three micro-batches a window. Every pair of windows gives one ratio of
times (ours / stock); which one goes first alternates. Before anything is timed, both are checked: with equal counts
they give the same parameters, and with unequal ones ours gives those of one process. Memory is measured in processes
of their own: the bytes of all tensors that DeepSpeed's optimizer, its buckets and our hook keep after a window.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from ruda_ds.cli.ranks import run_ranks

WIDTH, LAYERS, ROWS, MICROBATCHES = 1024, 24, 192, 3
ROUNDS, WARM_UP = 16, 2


class Model(torch.nn.Module):
    """24 residual layers of 1024 x 1024; one loss a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.1
        return x.pow(2).mean(-1)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def settings() -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 4_000_000},
        "gradient_clipping": 1.0,
    }


def make_engine(kind: str):
    import deepspeed

    import ruda_ds

    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    start = ruda_ds.initialize if kind == "ours" else deepspeed.initialize
    return start(model=made, optimizer=optimizer, config=settings())[0]


def batch(window: int, microbatch: int, rank: int, uneven: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * window + 10 * microbatch + rank)
    count = ROWS if not uneven else 1 + (37 * (microbatch + 1) * (rank + 1)) % ROWS
    return torch.randn(count, WIDTH, generator=generator)


def run_window(engine, kind: str, window: int, uneven: bool = False) -> None:
    for microbatch in range(MICROBATCHES):
        x = batch(window, microbatch, dist.get_rank(), uneven)
        losses = engine(x)
        if kind == "ours":
            engine.accumulator.backward_sum(losses.sum(), local_count=len(x))
        else:
            engine.backward(losses.mean())
            engine.step()
    if kind == "ours":
        engine.accumulator.step()


def parameters(engine) -> list[torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]


def check_even(engines: dict) -> None:
    both = [parameters(engines[kind]) for kind in ("ours", "stock")]
    error = max(((a - b).norm() / b.norm()).item() for a, b in zip(*both, strict=True))
    assert error < 1e-5, f"ours and stock differ by {error} where every count is the same"


def check_uneven() -> None:
    engine = make_engine("ours")
    run_window(engine, "ours", 0, uneven=True)
    single = model()
    optimizer = torch.optim.AdamW(single.parameters(), lr=1e-3)
    parts = [batch(0, m, r, True) for m in range(MICROBATCHES) for r in range(dist.get_world_size())]
    x = torch.cat(parts)
    single(x).mean().backward()
    torch.nn.utils.clip_grad_norm_(single.parameters(), 1.0)
    optimizer.step()
    pairs = zip(parameters(engine), single.parameters(), strict=True)
    error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    assert error < 1e-5, f"an uneven window differs from one process by {error}"


def peak_gflops() -> float:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = min(_time(lambda: a @ b) for _ in range(10))
    return 2 * 1024**3 / best / 1e9


def _time(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def timed(engine, kind: str, window: int) -> float:
    dist.barrier()
    seconds = torch.tensor([_time(lambda: run_window(engine, kind, window))])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def race() -> dict:
    engines = {kind: make_engine(kind) for kind in ("ours", "stock")}
    for window in range(WARM_UP):
        for kind, engine in engines.items():
            run_window(engine, kind, window)
    check_even(engines)
    check_uneven()
    times: dict[str, list[float]] = {"ours": [], "stock": []}
    for number in range(ROUNDS):
        order = ["ours", "stock"] if number % 2 else ["stock", "ours"]
        for kind in order:
            times[kind].append(timed(engines[kind], kind, WARM_UP + number))
    return {**times, "peak_gflops": peak_gflops()}


def kept_bytes(kind: str) -> int:
    """Bytes of all live tensors' storages after two windows; parameters and optimizer states are the same for both."""
    engine = make_engine(kind)
    for window in range(2):
        run_window(engine, kind, window)
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        try:
            if isinstance(item, torch.Tensor) and item.device.type == "cpu":
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        except (ReferenceError, RuntimeError):
            continue
    del engine
    return sum(storages.values())


def main() -> None:
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    result = run_ranks(race, 2, timeout_s=900)[0]
    ratios = [ours / stock for ours, stock in zip(result["ours"], result["stock"], strict=True)]
    ours, stock = statistics.median(result["ours"]), statistics.median(result["stock"])
    memory = {kind: max(run_ranks(kept_bytes, 2, kind, timeout_s=300)) for kind in ("ours", "stock")}
    size = sum(p.numel() for p in copy.copy(model()).parameters())
    flops = 6 * size * ROWS * MICROBATCHES
    print(f"{size:,} parameters, 2 ranks, {MICROBATCHES} micro-batches of {ROWS} rows, {ROUNDS} pairs of windows")
    print(
        f"ours  {ours:.3f} s a window, {flops / ours / 1e9 / result['peak_gflops']:.0%} of the same run's peak matmul"
    )
    print(f"stock {stock:.3f} s a window, {flops / stock / 1e9 / result['peak_gflops']:.0%}")
    print(f"ratio of times: median {statistics.median(ratios):.3f}, {min(ratios):.3f} .. {max(ratios):.3f}")
    print(f"tensors kept after a window: ours {memory['ours']:,} bytes a rank, stock {memory['stock']:,}")
    print(
        json.dumps(
            {
                "name": "accumulation",
                "time_ratio": round(statistics.median(ratios), 4),
                "extra_bytes": memory["ours"] - memory["stock"],
            }
        )
    )


if __name__ == "__main__":
    main()
