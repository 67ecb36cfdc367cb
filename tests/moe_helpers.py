"""Layers of experts for the tests: full cubes from a seed, one-process references, and rows dealt unevenly."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ruda_ds.moe import ExpertOwnership, ExpertParallelMoE, ExpertParallelSwiGLUExperts, MoEOptions


def cubes(experts: int, hidden: int, inner: int, dtype: torch.dtype, seed: int = 7) -> tuple[torch.Tensor, ...]:
    """Full gate, up [E, F, H], down [E, H, F] and router [E, H]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner), (experts, hidden)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.4).to(dtype) for shape in shapes)


def make_layer(
    prefix: list[int],
    rank: int,
    options: MoEOptions,
    group=None,
    dtype: torch.dtype = torch.float32,
    hidden: int = 12,
    inner: int = 9,
    bias: torch.Tensor | None = None,
) -> ExpertParallelMoE:
    """The layer of one rank; with prefix [0, E] and rank 0 it is the one-process reference."""
    ownership = ExpertOwnership(prefix)
    gate, up, down, router_weight = cubes(ownership.num_experts, hidden, inner, dtype)
    router = torch.nn.Linear(hidden, ownership.num_experts, bias=False, dtype=dtype)
    router.weight.data.copy_(router_weight)
    sources = [torch.nn.Parameter(cube) for cube in (gate, up, down)]
    experts = ExpertParallelSwiGLUExperts.from_full(*sources, ownership, rank)
    return ExpertParallelMoE(router, experts, bias, options, group=group)


def alone():
    """A process group of this rank only; every rank must call it."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def tokens(counts: list[int], hidden: int, dtype: torch.dtype, seed: int = 11) -> list[torch.Tensor]:
    """One batch [T_r, H] for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, hidden, generator=generator, dtype=torch.float64).to(dtype) for count in counts]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error by norm; absolute where nothing is wanted."""
    scale = wanted.double().norm().item()
    return (found.double() - wanted.double()).norm().item() / (scale or 1.0)
