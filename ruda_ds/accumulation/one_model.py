"""Whether all ranks hold one model, its parameters sorted into the same optimizer groups.

Ranks that differ would wait for each other inside DeepSpeed's start, end in the middle of a backward, or train on and
save what cannot be loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from ruda_ds import _deepspeed
from ruda_ds.accumulation.placement import text_hash
from ruda_ds.comm.lost import naming_lost_ranks
from ruda_ds.errors import RankDisagreementError

ABSENT = "no such parameter"


def describe_model(module: torch.nn.Module, groups: Sequence[Iterable[torch.nn.Parameter]] = ()) -> dict[str, str]:
    """Name -> shape, dtype, whether trained, and optimizer group of every parameter, in the module's order.

    Experts of our layers have no shape in it: each rank owns as many as it does.

    Args:
        groups: the optimizer's, if it is made; a parameter stands in one of them at most.
    """
    home = {id(parameter): index for index, group in enumerate(groups) for parameter in group}
    owned = tuple(f"{name}." for name, part in module.named_modules() if hasattr(part, "ownership"))
    found = {}
    for name, parameter in module.named_parameters():
        shape = "experts" if name.startswith(owned) else str(tuple(_deepspeed.logical_shape(parameter)))
        trained = "trained" if parameter.requires_grad else "frozen"
        group = f", optimizer group {home[id(parameter)]}" if id(parameter) in home else ""
        found[name] = f"{shape} {parameter.dtype} {trained}{group}"
    return found


def require_one_model(
    module: torch.nn.Module, groups: Sequence[Iterable[torch.nn.Parameter]], group: dist.ProcessGroup
) -> None:
    """Compare `describe_model` over the ranks of a group. A collective; the model's size travels only if they differ.

    Raises:
        RankDisagreementError: on every rank, naming the first rank and parameter that differ from the group's first
            rank, and how.
    """
    own = describe_model(module, groups)
    with naming_lost_ranks(group, "the comparison of models"):
        hashes: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(hashes, text_hash(repr(list(own.items()))), group=group)
        if len(set(hashes)) == 1:
            return
        first: list = [own]
        dist.broadcast_object_list(first, dist.get_global_rank(group, 0), group=group)
        differences: list = [None] * len(hashes)
        dist.all_gather_object(differences, _difference(own, first[0]), group=group)
    for rank, difference in enumerate(differences):
        if difference is not None:
            raise RankDisagreementError(difference[0], rank, difference[1], difference[2])


def _difference(own: dict[str, str], first: dict[str, str]) -> tuple[str, str, str] | None:
    """(field, what this rank has, what the first has) of the first parameter that differs; None for none."""
    for name in [*first, *own]:
        if own.get(name) != first.get(name):
            return f"the parameter {name}", own.get(name, ABSENT), first.get(name, ABSENT)
    return None if list(own) == list(first) else ("the order of the parameters", str(list(own)), str(list(first)))
