"""What of a checkpoint is not split by elements: the order of groups, optimizer scalars, the user's own state.

All ranks must hold it alike; it is then copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ruda_ds.checkpoint.layout import Stage3Layout, Topology
from ruda_ds.checkpoint.pickles import StoredTensor
from ruda_ds.checkpoint.rank_states import same
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.source import TrainingSource
from ruda_ds.checkpoint.stock import RESERVED


@dataclass(frozen=True)
class State:
    """What the torch optimizer holds for an optimizer group.

    Attributes:
        moments: name -> dtype of those that are split as the parameters.
        common: name -> value of the others.
    """

    moments: dict[str, torch.dtype]
    common: dict[str, Any]


def original_groups(source: TrainingSource, target: Topology) -> list[list[str]]:
    """Names of the trained parameters by optimizer group, in the order that the optimizer was given them.

    Flat tensors keep that order but for one thing: experts of their own stand apart from the rest. Where the target
    does not set them apart, the order is that of the module.

    Raises:
        CheckpointError: the order cannot be told, since it was not that of the module.
    """
    if source.topology.ep_size == 1 or target.ep_size > 1:
        return source.groups
    place = {name: index for index, name in enumerate(source.known)}
    made = []
    for names in source.groups:
        for split in (False, True):
            part = [place[n] for n in names if source.topology.is_split(source.known[n].logical) is split]
            if part != sorted(part):
                raise damaged(
                    source.folder,
                    "optimizer groups in the module's order, to join experts with the rest",
                    "another order",
                )
        made.append(sorted(names, key=place.__getitem__))
    return made


def state_of(source: TrainingSource, optimizer_groups: Sequence[int]) -> State:
    """What all flat tensors of some optimizer groups have in common in the optimizer's state.

    Raises:
        CheckpointError: flat tensors, or ranks, that differ.
    """
    found: State | None = None
    for rank in range(source.world_size):
        base = source.base_state(rank)
        for index, group in enumerate(_groups_of_flats(source, rank)):
            if group not in optimizer_groups:
                continue
            entries = base["state"].get(index, {})
            state = _sort_out(entries, source.padded(rank, index))
            if found is None:
                found = state
            elif found.moments != state.moments or not _equal(found.common, state.common):
                raise damaged(
                    source.ranks[rank].optim.path,
                    f"optimizer state {_show(found)} for flat tensor {index}, as before it",
                    _show(state),
                )
    return found or State({}, {})


def _groups_of_flats(source: TrainingSource, rank: int) -> Sequence[int]:
    """The optimizer group of each flat tensor of a rank; below ZeRO-3 they are the same."""
    if isinstance(source.layout, Stage3Layout):
        return [group.optimizer_group for group in source.layout.groups(rank)]
    return range(len(source.flat(rank)))


def _sort_out(entries: Mapping[str, Any], numel: int) -> State:
    moments, common = {}, {}
    for key, value in entries.items():
        if isinstance(value, StoredTensor) and value.shape == (numel,):
            moments[key] = value.dtype
        else:
            common[key] = value.read() if isinstance(value, StoredTensor) else value
    return State(moments, common)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, StoredTensor) and isinstance(right, StoredTensor):
        return same(left, right) and torch.equal(left.read(), right.read())
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(type(left) is type(right) and left == right)


def _show(state: State) -> str:
    return f"moments {sorted(state.moments)}, {state.common}"


def client_state(source: TrainingSource) -> tuple[dict[str, Any], list[str]]:
    """(rank 0's client state, keys in which other ranks differ: none below ZeRO-3, where it is rank 0's alone)."""
    files = source.ranks if source.stage == 3 else source.ranks[:1]
    states = [{k: v for k, v in rank.state.items() if k not in RESERVED} for rank in files]
    differing = sorted(
        {
            key
            for state in states
            for key in states[0].keys() | state.keys()
            if not _equal(states[0].get(key), state.get(key))
        }
    )
    return states[0], differing
