"""Optimizer groups below ZeRO-3 on another topology: where experts are split they have groups of their own.

[Note: expert groups]
`ruda_ds.initialize` (`_deepspeed.split_expert_groups`) takes the experts out of each optimizer group and puts them,
with the group's settings, into a new one behind all others; a group of nothing but experts stays where it is. So groups
are split, joined, or kept. Where experts are split

    neither before nor after, or both     the groups are the same
    only after                            they are split as there
    only before                           each expert group joins the earlier group that has its settings

For the last the checkpoint holds no record of who came from where, only that settings are the same and the order is
kept. Where this leaves more than one way, it is refused. An expert group with settings of its own was one from the
beginning. A load compares the names of every group, so a wrong guess would be refused there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ruda_ds.checkpoint.layout import Topology
from ruda_ds.checkpoint.layout_stage12 import dealt, undealt
from ruda_ds.checkpoint.rank_states import same
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.source import TrainingSource

# Keys that are not the user's settings: what `split_expert_groups` adds, and torch's own numbers.
_OWN_KEYS = ("params", "moe", "name")
# Lists of torch's schedulers with one entry for each optimizer group.
_PER_GROUP = frozenset(
    ["base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "_initial_lrs"]
)


@dataclass(frozen=True)
class GroupPlan:
    """An optimizer group of the target.

    Attributes:
        names: of its parameters, in the order that the optimizer was given them.
        flat: the same in the order of the flat tensor.
        origins: groups of the source that it is made of; the settings are the first one's.
        split: whether it is of experts that are each rank's own.
    """

    names: tuple[str, ...]
    flat: tuple[str, ...]
    origins: tuple[int, ...]
    split: bool


_Group = tuple[list[str], tuple[int, ...], bool]  # names, origins and split of a GroupPlan


def plan_groups(source: TrainingSource, target: Topology) -> list[GroupPlan]:
    """The optimizer groups of the target; see [Note: expert groups].

    Raises:
        CheckpointError: expert groups cannot be told apart, or joined in the order that the optimizer was given.
    """
    dealing = bool(source.zero_config.get("round_robin_gradients", False))
    groups: list[_Group] = []
    for names in source.groups:
        split = any(_is_split(source, source.topology, name) for name in names)
        ranks = len(source.topology.partition_ranks(split, 0))
        groups.append((undealt(names, ranks) if dealing else list(names), (len(groups),), split))
    if source.topology.ep_size > 1 and target.ep_size == 1:
        groups = _join(source, groups)
    elif source.topology.ep_size == 1 and target.ep_size > 1:
        groups = _split(source, groups, target)
    made = []
    for names, origins, split in groups:
        flat = dealt(names, len(target.partition_ranks(split, 0))) if dealing else names
        made.append(GroupPlan(tuple(names), tuple(flat), origins, split))
    return made


def _is_split(source: TrainingSource, topology: Topology, name: str) -> bool:
    return topology.is_split(source.known[name].logical)


def _split(source: TrainingSource, groups: Sequence[_Group], target: Topology) -> list[_Group]:
    kept: list[_Group] = []
    behind: list[_Group] = []
    for names, origins, _ in groups:
        experts = [name for name in names if _is_split(source, target, name)]
        rest = [name for name in names if not _is_split(source, target, name)]
        kept.append((rest, origins, False) if rest else (experts, origins, True))
        if rest and experts:
            behind.append((experts, origins, True))
    return kept + behind


def _join(source: TrainingSource, groups: Sequence[_Group]) -> list[_Group]:
    homes = _homes(source, [split for *_, split in groups])
    place = {name: index for index, name in enumerate(source.known)}
    made = []
    for index, (names, origins, _) in enumerate(groups):
        if index in homes:
            continue
        joining = [guest for guest, home in homes.items() if home == index]
        parts = [names, *(groups[guest][0] for guest in joining)]
        if joining and any([place[n] for n in part] != sorted(place[n] for n in part) for part in parts):
            wanted = "optimizer groups in the module's order, to join experts with the rest"
            raise damaged(source.folder, wanted, "another order")
        together = [name for part in parts for name in part]
        made.append((sorted(together, key=place.__getitem__) if joining else names, (*origins, *joining), False))
    return made


def _homes(source: TrainingSource, split: Sequence[bool]) -> dict[int, int]:
    """Expert group -> the group that it came from, for those that came from one.

    The first fitting assignment and the last, from the other end, are the same if there is one only.
    """
    settings = [_settings(group) for group in source.base_state(0)["param_groups"]]
    fitting = {}
    for guest, experts in enumerate(split):
        homes = [h for h in range(guest) if not split[h] and same(settings[h], settings[guest])]
        if experts and homes:
            fitting[guest] = homes
    first: dict[int, int] = {}
    for guest, homes in fitting.items():
        after = [home for home in homes if home > max(first.values(), default=-1)]
        first.update({guest: after[0]} if after else {})
    last: dict[int, int] = {}
    for guest, homes in reversed(fitting.items()):
        before = [home for home in homes if home < min(last.values(), default=len(split))]
        last.update({guest: before[-1]} if before else {})
    if first != last or len(first) != len(fitting):
        raise damaged(
            source.ranks[0].optim.path,
            "settings that tell which optimizer group each group of experts came from",
            f"expert groups {sorted(fitting)}, whose settings fit {list(fitting.values())}",
        )
    return first


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN_KEYS}


def param_groups(source: TrainingSource, plans: Sequence[GroupPlan], target: Topology) -> list[dict[str, Any]]:
    """What torch's optimizer says of the target's groups, each of one flat tensor."""
    found = source.base_state(0)["param_groups"]
    made = []
    for index, plan in enumerate(plans):
        group = {**found[plan.origins[0]], "params": [index]}
        if plan.split:
            group |= {"moe": True, "name": f"ep_size_{target.ep_size}"}
        elif group.pop("moe", False):
            group.pop("name", None)
        made.append(group)
    return made


def scheduler_state(state: Any, plans: Sequence[GroupPlan], before: int) -> Any:
    """A scheduler's state with its lists of one entry for each of ``before`` groups made those of the target."""
    if type(state) in (dict, OrderedDict):
        return type(state)(
            (key, type(value)(value[plan.origins[0]] for plan in plans))
            if key in _PER_GROUP and type(value) in (list, tuple) and len(value) == before
            else (key, scheduler_state(value, plans, before))
            for key, value in state.items()
        )
    if type(state) in (list, tuple):
        return type(state)(scheduler_state(item, plans, before) for item in state)
    return state
