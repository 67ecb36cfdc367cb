"""Chain the exchanges of a whole model's forward, so that no rank's loss can leave one out. See [Note: why a chain]."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ruda_ds.comm.scope import CollectiveScope
from ruda_ds.moe.layer import ExpertParallelMoE


def chain_exchanges(model: torch.nn.Module) -> bool:
    """Give each forward of ``model`` a scope, and tie it to every output; whether the model has an expert layer.

    Doing it again, for a second accumulator, changes nothing: nested scopes would leave one behind.

    A loss made of any output then runs the backward of every exchange of that forward, on every rank.
    """
    layers = [module for module in model.modules() if isinstance(module, ExpertParallelMoE)]
    if not layers:
        return False
    for number, layer in enumerate(layers):
        layer.number = number
    if getattr(model, "exchanges_are_chained", False):
        return True
    model.exchanges_are_chained = True  # type: ignore[assignment]
    scopes: list[CollectiveScope] = []

    def begin(module: torch.nn.Module, args: Any) -> None:
        scopes.append(CollectiveScope().__enter__())

    def end(module: torch.nn.Module, args: Any, output: Any) -> Any:
        scope = scopes.pop()
        scope.__exit__(None, None, None)

        def tie(value: Any) -> Any:
            tracked = isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad
            return scope.complete(value) if tracked else value

        return tree_map(tie, output)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)
    return True
