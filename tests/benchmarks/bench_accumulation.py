"""Windows of a 25 M parameter model through ours and through stock ZeRO-3, in turn, in the same processes.

    python tests/benchmarks/bench_accumulation.py

Two gloo ranks, one thread each, float32, AdamW, three micro-batches a window, gradient clipping on (it makes our
divisor a float64 one, which is our slower division). Every pair of windows gives one ratio of times (ours / stock);
which one goes first alternates. A window's time is that of the slower rank, from a barrier on. The ratio of processor
times is taken beside it: on a machine that others use too it scatters less.

Before anything is timed, both are checked: with equal counts they give the same parameters, and with unequal ones ours
gives the updates, and the gradient norm, of one process, which stock does not.

Memory is measured in processes of their own: the bytes of all live tensors after a window, the difference of which is
in what DeepSpeed's optimizer, its buckets and our hook keep. Wire buffers that live only inside a reduction are not in
it.
"""

from __future__ import annotations

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
# Below the norms that the model has: clipping takes place in every window.
MAX_NORM = 0.01


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
        "gradient_clipping": MAX_NORM,
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


def batches(window: int, uneven: bool = False) -> list[torch.Tensor]:
    """This rank's micro-batches."""
    return [batch(window, microbatch, dist.get_rank(), uneven) for microbatch in range(MICROBATCHES)]


def run_window(engine, kind: str, microbatches: list[torch.Tensor]) -> None:
    for x in microbatches:
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


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor], origin: list[torch.Tensor] | None = None) -> float:
    """The largest relative difference by norm: of parameters, or of their changes since ``origin``."""
    scales = wanted if origin is None else [a - b for a, b in zip(wanted, origin, strict=True)]
    return max(((a - b).norm() / s.norm()).item() for a, b, s in zip(found, wanted, scales, strict=True))


def check_even(engines: dict) -> None:
    error = worst(*(parameters(engines[kind]) for kind in ("ours", "stock")))
    assert error < 1e-5, f"ours and stock differ by {error} where every count is the same"


def uneven_windows(kind: str) -> tuple[list[torch.Tensor], float]:
    """(parameters after two uneven windows, the gradient norm of the first)."""
    engine = make_engine(kind)
    run_window(engine, kind, batches(0, uneven=True))
    norm = float(engine.get_global_grad_norm())
    run_window(engine, kind, batches(1, uneven=True))
    return parameters(engine), norm


def uneven_windows_of_one_process() -> tuple[list[torch.Tensor], float]:
    single = model()
    optimizer = torch.optim.AdamW(single.parameters(), lr=1e-3)
    norms = []
    for window in range(2):
        ranks = range(dist.get_world_size())
        x = torch.cat([batch(window, microbatch, rank, True) for microbatch in range(MICROBATCHES) for rank in ranks])
        optimizer.zero_grad()
        single(x).mean().backward()
        # In float64: torch's own float32 norm of so many elements is off by 1.5e-5.
        norm = torch.stack([p.grad.double().norm() for p in single.parameters()]).norm()
        torch.nn.utils.clip_grads_with_norm_(single.parameters(), MAX_NORM, norm)
        norms.append(norm.item())
        optimizer.step()
    return list(single.parameters()), norms[0]


def check_uneven() -> None:
    """AdamW's step hardly sees a common factor of the gradients: the norm is compared too."""
    wanted, norm = uneven_windows_of_one_process()
    ours, our_norm = uneven_windows("ours")
    start = list(model().parameters())
    assert worst(ours, wanted) < 1e-5, f"after uneven windows the parameters are off by {worst(ours, wanted)}"
    changes = worst(ours, wanted, start)
    assert changes < 1e-4, f"after uneven windows the changes of the parameters are off by {changes}"
    assert norm > MAX_NORM, f"the gradient norm is {norm}: nothing is clipped"
    assert abs(our_norm / norm - 1) < 1e-6, f"the gradient norm is {our_norm}, that of one process {norm}"
    stock, _ = uneven_windows("stock")
    assert worst(stock, wanted) > 1e-3, "stock DeepSpeed passes this check: it could not find a wrong mean"


def peak_gflops() -> float:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = min(_time(lambda: a @ b) for _ in range(10))
    return 2 * 1024**3 / best / 1e9


def _time(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def timed(engine, kind: str, microbatches: list[torch.Tensor]) -> tuple[float, float]:
    """(seconds of a window, processor seconds of all threads), each of the rank that needed most."""
    dist.barrier()
    began = time.process_time()
    wall = _time(lambda: run_window(engine, kind, microbatches))
    seconds = torch.tensor([wall, time.process_time() - began])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds[0].item(), seconds[1].item()


def race() -> dict:
    check_uneven()
    engines = {kind: make_engine(kind) for kind in ("ours", "stock")}
    for window in range(WARM_UP):
        for kind, engine in engines.items():
            run_window(engine, kind, batches(window))
    check_even(engines)
    gc.collect()
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "stock": []}
    for number in range(ROUNDS):
        microbatches = batches(WARM_UP + number)
        for kind in ["ours", "stock"] if number % 2 else ["stock", "ours"]:
            times[kind].append(timed(engines[kind], kind, microbatches))
    check_even(engines)
    return {**times, "peak_gflops": peak_gflops()}


def kept_bytes(kind: str) -> int:
    """Bytes of all live tensors' storages after two windows; parameters and optimizer states are the same for both."""
    engine = make_engine(kind)
    for window in range(2):
        run_window(engine, kind, batches(window))
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
    pairs = list(zip(result["ours"], result["stock"], strict=True))
    ratios = [ours[0] / stock[0] for ours, stock in pairs]
    processor = statistics.median(ours[1] / stock[1] for ours, stock in pairs)
    ours, stock = (statistics.median(wall for wall, _ in result[kind]) for kind in ("ours", "stock"))
    memory = {kind: max(run_ranks(kept_bytes, 2, kind, timeout_s=300)) for kind in ("ours", "stock")}
    size = sum(p.numel() for p in model().parameters())
    flops = 6 * size * ROWS * MICROBATCHES
    print(f"{size:,} parameters, 2 ranks, {MICROBATCHES} micro-batches of {ROWS} rows, {ROUNDS} pairs of windows")
    print(
        f"ours  {ours:.3f} s a window, {flops / ours / 1e9 / result['peak_gflops']:.0%} of the same run's peak matmul"
    )
    print(f"stock {stock:.3f} s a window, {flops / stock / 1e9 / result['peak_gflops']:.0%}")
    print(f"ratio of times: median {statistics.median(ratios):.3f}, {min(ratios):.3f} .. {max(ratios):.3f}")
    print(f"ratio of processor times: median {processor:.3f}")
    print(f"tensors kept after a window: ours {memory['ours']:,} bytes a rank, stock {memory['stock']:,}")
    print(
        json.dumps(
            {
                "name": "accumulation",
                "time_ratio": round(statistics.median(ratios), 4),
                "extra_bytes": memory["ours"] - memory["stock"],
                "time_ratio_min": round(min(ratios), 4),
                "time_ratio_max": round(max(ratios), 4),
                "processor_time_ratio": round(processor, 4),
                "seconds_a_window": round(ours, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
