"""What the distributed tests share: an odd little model, rows dealt unevenly to ranks, and a float64 oracle.

The functions here run on the ranks too, so they are importable by name and take plain data.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

import ruda_ds

FEATURES = 7


class Odd(torch.nn.Module):
    """Odd shapes (7x15, 33, 1), a tied weight, a frozen one, and a branch that a batch may leave out.

    ``forward(x [n, 7], use_branch)`` gives one loss for each row, [n].
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 15)
        self.wide = torch.nn.Linear(15, 33)
        self.tied = torch.nn.Linear(15, 33)
        self.tied.weight = self.wide.weight
        self.frozen = torch.nn.Linear(33, 33)
        self.frozen.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.tensor([1.3]))
        self.branch = torch.nn.Linear(33, 5)

    def forward(self, x: torch.Tensor, use_branch: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.wide(hidden) * self.scale + torch.sin(self.tied(hidden)) + self.frozen(torch.tanh(self.wide(hidden)))
        loss = out.float().pow(2).mean(-1)
        if use_branch:
            loss = loss + torch.tanh(self.branch(out)).float().sum(-1)
        return loss.to(torch.float32) if x.dtype != torch.float64 else loss


def make_model(seed: int = 1, dtype: torch.dtype = torch.float32) -> Odd:
    """A model with weights that depend on the seed only."""
    torch.manual_seed(seed)
    return Odd().to(dtype)


def base_config(**changes: object) -> dict:
    """A ZeRO-3 config without clipping and with tiny buckets, so that several are in flight."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 600, "stage3_param_persistence_threshold": 10},
        "gradient_clipping": 0.0,
    }
    zero = changes.pop("zero_optimization", None)
    config["zero_optimization"].update(zero or {})
    config.update(changes)
    return config


def make_engine(
    config: dict, model: torch.nn.Module | None = None, lr: float = 0.05, optimizer: type = torch.optim.SGD
):
    """An engine of ours over ``model`` (the odd one if None), with plain SGD unless another optimizer is named."""
    model = make_model() if model is None else model
    engine, *_ = ruda_ds.initialize(
        model=model, optimizer=optimizer([p for p in model.parameters() if p.requires_grad], lr=lr), config=config
    )
    return engine


def rows(window: int, count: int = 23) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [count, 7], mask [count]): the rows of a window; about a third of them carry no token."""
    generator = torch.Generator().manual_seed(100 + window)
    return torch.randn(count, FEATURES, generator=generator), torch.rand(count, generator=generator) > 0.35


def deal(count: int, microbatches: int, world: int) -> list[list[list[int]]]:
    """[microbatches][world] lists of row numbers: uneven, the last rank empty in every second micro-batch."""
    table: list[list[list[int]]] = [[[] for _ in range(world)] for _ in range(microbatches)]
    for row in range(count):
        microbatch = (row * row) % microbatches
        seats = world - 1 if microbatch % 2 and world > 1 else world
        table[microbatch][(row * 5 + row // 3) % seats].append(row)
    return table


def local_batch(window: int, share: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of ``share``; one row without a token if it is empty, so that every rank has a graph."""
    x, mask = rows(window)
    if not share:
        return x[:1].to(dtype), torch.zeros(1, dtype=torch.bool)
    return x[share].to(dtype), mask[share]


def oracle_mean(model: torch.nn.Module, window: int) -> tuple[dict[str, torch.Tensor], float, int]:
    """(gradients, loss, count) of the token mean over a whole window, in one process and the model's dtype."""
    x, mask = rows(window)
    model.zero_grad()
    losses = model(x.to(next(model.parameters()).dtype))
    total = (losses * mask).sum()
    count = int(mask.sum())
    (total / count).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}, (total / count).item(), count


def oracle(model: torch.nn.Module) -> torch.nn.Module:
    """A float64 copy."""
    return copy.deepcopy(model).double()


def gather(accumulator: ruda_ds.GradientAccumulator, shards: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole float64 gradients out of every rank's shards, by each rank's own placement."""
    parts = [
        (p.name, p.logical_shape, p.shard, shards[p.name].double().cpu())
        for p in accumulator.placement
        if p.name in shards
    ]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    whole: dict[str, torch.Tensor] = {}
    for rank_parts in everyone:
        for name, shape, (start, stop), values in rank_parts:
            full = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            full.view(-1)[start:stop] = values
    return whole


def full_parameters(engine) -> dict[str, torch.Tensor]:
    """Float64 copies of the trained parameters (DeepSpeed's float32 masters)."""
    return {
        name: safe_get_full_fp32_param(parameter).double().reshape(-1)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error by norm; the absolute one where nothing is wanted."""
    wanted, found = wanted.double().reshape(-1), found.double().reshape(-1)
    scale = wanted.norm().item()
    return (found - wanted).norm().item() / (scale if scale else 1.0)


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest relative error; the names must be the same."""
    assert sorted(found) == sorted(wanted), (sorted(found), sorted(wanted))
    return max(relative(found[name], wanted[name]) for name in wanted)


def fill(engine, window: int, microbatches: int, dtype: torch.dtype = torch.float32) -> None:
    """Put a window's micro-batches into the accumulator, this rank's share of each."""
    for shares in deal(len(rows(window)[1]), microbatches, dist.get_world_size()):
        x, mask = local_batch(window, shares[dist.get_rank()], dtype)
        loss = (engine(x) * mask).sum()
        engine.accumulator.backward_sum(loss, local_count=int(mask.sum()))


def snapshot(accumulator: ruda_ds.GradientAccumulator) -> tuple:
    """State and pending bytes, to show that a refused call changed neither."""
    return accumulator.state, {n: g.clone() for n, g in accumulator.pending().items()}


def same(before: tuple, after: tuple) -> bool:
    """Whether two snapshots are equal to the bit."""
    return (
        before[0] == after[0]
        and before[1].keys() == after[1].keys()
        and all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    )
