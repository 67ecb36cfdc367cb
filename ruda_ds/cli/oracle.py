"""What the self-test measures: gradients of one window by ours and by stock DeepSpeed, against one process in float64.

The functions run on real ranks. Letters: M micro-batches of the window, W ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

FEATURES = 7
# Divides evenly over 1, 2, 3, 4, 6, 9 and 12 shares.
ROWS = 36


class Probe(torch.nn.Module):
    """Odd shapes (7x15, 15x33, 33, 1); one loss a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = torch.nn.Linear(FEATURES, 15)
        self.outlet = torch.nn.Linear(15, 33)
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, 7] -> [n]."""
        return (self.outlet(torch.tanh(self.inlet(x))) * self.scale + 1).pow(2).mean(-1).float()


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        split: "even" (as many tokens on every rank in every micro-batch), "uneven", or "empty" (uneven, and one rank
            and one micro-batch have no tokens).
        microbatches: M.
        model: "float32" or "bfloat16".
        work: "float32" or "float64".
    """

    split: str
    microbatches: int
    model: str
    work: str


def shares(case: Case, world: int) -> list[list[list[int]]]:
    """[M][W] lists of row numbers."""
    table: list[list[list[int]]] = [[[] for _ in range(world)] for _ in range(case.microbatches)]
    for row in range(ROWS):
        slot = row if case.split == "even" else row * row // 3
        microbatch, rank = slot % case.microbatches, slot // case.microbatches % world
        if case.split == "empty":
            microbatch = min(microbatch, max(case.microbatches - 2, 0))
            rank = min(rank, max(world - 2, 0))
        table[microbatch][rank].append(row)
    return table


def data(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """x [36, 7], and [36] bool: which rows carry a token; all of them in an even split."""
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    counted = torch.rand(ROWS, generator=generator) > (0.0 if case.split == "even" else 0.3)
    return x.to(getattr(torch, case.model)), counted


def local_batch(case: Case, share: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a share; one row that carries no token if it is empty, so that every rank has a graph."""
    x, counted = data(case)
    return (x[share], counted[share]) if share else (x[:1], torch.zeros(1, dtype=torch.bool))


def probe(dtype: torch.dtype) -> Probe:
    """The same weights on every rank and in every run."""
    torch.manual_seed(4)
    return Probe().to(dtype)


def reference(case: Case) -> dict[str, torch.Tensor]:
    """Gradient of the token mean over the window: one process, float64, from weights and rows as the case's model
    dtype rounds them."""
    model = copy.deepcopy(probe(getattr(torch, case.model))).double()
    x, counted = data(case)
    losses = model.outlet(torch.tanh(model.inlet(x.double()))) * model.scale + 1
    (losses.pow(2).mean(-1) * counted).sum().div(counted.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def config(case: Case) -> dict:
    """The settings of ours and of stock alike."""
    result: dict = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.microbatches,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 400},
        "gradient_clipping": 0.0,
    }
    if case.model == "bfloat16":
        result["bf16"] = {"enabled": True}
        result["communication_data_type"] = "fp32"
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result


def worst(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of a parameter's gradient, by norm; NaN if any of them is."""
    # torch's maximum, not Python's: that one passes over a NaN which does not come first.
    return (
        torch.stack([(found[name].double() - want).norm() / want.norm() for name, want in wanted.items()]).max().item()
    )


def measure_ours(cases: list[Case]) -> list[dict[str, float]]:
    """For each case: ``gradient``, the error of the mean against `reference`, and ``reduction``, that of the sums
    against the float64 sum of the very same local gradients."""
    import ruda_ds

    report = []
    for case in cases:
        dtype = getattr(torch, case.model)
        model = probe(dtype)
        settings = {**config(case), "ruda": {"accumulation": {"dtype": case.work}}}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, *_ = ruda_ds.initialize(model=model, optimizer=optimizer, config=settings)
        sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in probe(dtype).named_parameters()}
        for table in shares(case, dist.get_world_size()):
            x, counted = local_batch(case, table[dist.get_rank()])
            engine.accumulator.backward_sum((engine(x) * counted).sum(), local_count=int(counted.sum()))
            twin = probe(dtype)  # the same bits as the engine's model, in the same arithmetic: the same local gradients
            (twin(x) * counted).sum().backward()
            for name, parameter in twin.named_parameters():
                local = parameter.grad.double() if parameter.grad is not None else torch.zeros_like(sums[name])
                dist.all_reduce(local)
                sums[name] += local
        reduction = worst(_whole(engine, engine.accumulator.pending()), sums)
        mean = _whole(engine, engine.accumulator.finish_mean().gradients)
        report.append({"gradient": worst(mean, reference(case)), "reduction": reduction})
    return report


def measure_stock(cases: list[Case]) -> list[float]:
    """For each case: the error of stock DeepSpeed ZeRO-3, fed each micro-batch's local mean as people do.

    The gradient is read before the step that ends the window.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    report = []
    for case in cases:
        model = probe(getattr(torch, case.model))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(case))
        for number, table in enumerate(shares(case, dist.get_world_size())):
            x, counted = local_batch(case, table[dist.get_rank()])
            engine.backward((engine(x) * counted).sum() / counted.sum().clamp(min=1))
            if number + 1 < case.microbatches:
                engine.step()
        gradients = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
        report.append(worst(gradients, reference(case)))
    return report


def _whole(engine: object, shards: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole gradients out of every rank's shards, in float64."""
    placement = engine.accumulator.placement  # type: ignore[attr-defined]
    parts = [(p.name, p.logical_shape, p.shard, shards[p.name].double()) for p in placement]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    whole: dict[str, torch.Tensor] = {}
    for name, shape, (start, stop), values in (part for rank_parts in everyone for part in rank_parts):
        whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64)).view(-1)[start:stop] = values
    return whole
