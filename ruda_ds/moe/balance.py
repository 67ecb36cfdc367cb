"""How evenly the experts of a model are used: exact global counts, and the selection bias that follows from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ruda_ds.moe.layer import ExpertParallelMoE


def expert_layers(model: torch.nn.Module) -> list[ExpertParallelMoE]:
    """The expert layers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, ExpertParallelMoE)]


def take_expert_counts(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Rows of each expert since the last call, summed over the ranks of ``group``; the counting begins anew.

    Every rank calls it, at the end of a window. A token counts when its gradients have entered the window: forwards
    without a backward or in eval mode do not, and those that activation checkpointing repeats count once.

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


@dataclass(frozen=True)
class RouterReport:
    """The router's losses of a window, one of each for every layer, in order; without their coefficients.

    Attributes:
        balance: E * sum over experts of rows by token * mean probability; K where the load is even.
        z: mean over tokens of logsumexp(logits)^2.
    """

    balance: tuple[float, ...]
    z: tuple[float, ...]


def take_router_losses(
    model: torch.nn.Module, counts: torch.Tensor, group: dist.ProcessGroup | None = None
) -> RouterReport:
    """The losses that the layers have added in the window, over the ranks of ``group``; the next window's begin.

    Every rank calls it at the end of each window, if a layer has a `balance_loss`: the counts become the shares of the
    next window. See [Note: losses from global counts] in losses.py.

    Args:
        counts: [layers, E], of `take_expert_counts` for the same window.
        group: as for the counts.
    """
    layers = expert_layers(model)
    sums = torch.stack([layer.router_sums for layer in layers])
    dist.all_reduce(sums, group=group)
    balance, z = [], []
    for layer, row, of_layer in zip(layers, counts, sums, strict=True):
        layer.router_sums.zero_()
        tokens = max(int(row.sum()) // layer.options.top_k, 1)
        shares = row.double() / tokens
        if layer.expert_shares is not None and row.any():
            layer.expert_shares.copy_(shares)
        balance.append(len(row) * float(shares @ (of_layer[:-1] / tokens)))
        z.append(float(of_layer[-1]) / tokens)
    return RouterReport(tuple(balance), tuple(z))


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
