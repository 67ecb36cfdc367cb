"""The placement that a live module and its ZeRO engine have, read from DeepSpeed, and the check of one against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ruda_ds import _deepspeed
from ruda_ds.accumulation.placement import ParameterPlacement, compare


def live_placement(module: torch.nn.Module, optimizer: object) -> tuple[ParameterPlacement, ...]:
    """The placement of every floating parameter of a module that a ZeRO optimizer holds, sorted by name."""
    stage3 = _deepspeed.is_stage3(optimizer)
    fragments = {} if stage3 else _deepspeed.flat_fragments(optimizer)
    found = []
    for name, parameter in module.named_parameters():
        if not parameter.dtype.is_floating_point:
            continue
        fragment = fragments.get(id(parameter))
        group = _deepspeed.partition_group(optimizer, parameter, fragment)
        shape, experts = tuple(_deepspeed.logical_shape(parameter)), _deepspeed.expert_range(parameter)
        none_owned = experts is not None and experts[0] == experts[1]
        held = fragment.held if fragment and not none_owned else (0, 0)
        found.append(
            ParameterPlacement(
                name=name,
                logical_shape=(0,) if none_owned else shape,
                rank=torch.distributed.get_rank(group),
                world_size=torch.distributed.get_world_size(group),
                dtype=parameter.dtype,
                requires_grad=parameter.requires_grad,
                fragment=None if stage3 else held,
                experts=experts,
            )
        )
    return tuple(sorted(found, key=lambda placement: placement.name))


def inspect(engine: Any, placement: Sequence[ParameterPlacement]) -> None:
    """Check the module of a live ZeRO engine against a placement.

    Raises:
        PlacementError: a parameter is missing or new, or its shape, rank, world size, storage dtype, requires_grad or
            fragment differs; the message says what was expected and what was found.
    """
    compare(placement, live_placement(engine.module, _deepspeed.zero_optimizer(engine)))
