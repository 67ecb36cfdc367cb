"""How evenly the experts of a model are used: exact global counts, and the selection bias that follows from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ruda_ds.moe.layer import ExpertParallelMoE


def expert_layers(model: torch.nn.Module) -> list[ExpertParallelMoE]:
    """The expert layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, ExpertParallelMoE)]


def take_expert_counts(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Rows of each expert since the last call, summed over the ranks of ``group``; the counting begins anew.

    Every rank calls it, at the end of a window. Forwards under ``torch.no_grad``, in eval mode, and those that
    activation checkpointing repeats are not counted.

    Returns:
        [layers, E] int64, the same on every rank.

    Raises:
        ValueError: the model has no expert layer.
    """
    layers = expert_layers(model)
    if not layers:
        raise ValueError("the model has no ExpertParallelMoE, expected at least one")
    counts = torch.stack([layer.expert_counts for layer in layers])
    dist.all_reduce(counts, group=group)
    for layer in layers:
        layer.expert_counts.zero_()
    return counts


@contextlib.contextmanager
def uncounted(model: torch.nn.Module) -> Iterator[None]:
    """Forwards whose tokens are not to be counted: of a rank that has none and runs a stand-in for its collectives."""
    layers = expert_layers(model)
    for layer in layers:
        layer.counting = False
    try:
        yield
    finally:
        for layer in layers:
            layer.counting = True


def update_correction_biases(model: torch.nn.Module, counts: torch.Tensor, rate: float = 1e-3) -> None:
    """Move each layer's selection bias by ``rate`` towards an even use, without an auxiliary loss.

    bias += rate * sign(mean count - count) (arXiv:2408.15664, algorithm 1). Exact counts make it the same on every
    rank and for every split into micro-batches.

    Args:
        counts: [layers, E], of `take_expert_counts`.

    Raises:
        ValueError: a layer without a bias.
    """
    for number, (layer, row) in enumerate(zip(expert_layers(model), counts, strict=True)):
        if layer.correction_bias is None:
            raise ValueError(f"expert layer {number} has no correction_bias, expected one to update")
        layer.correction_bias += rate * torch.sign(row.double().mean() - row).to(layer.correction_bias)
