"""The flat partitions of ZeRO-1 and 2 that are to be written, and optimizer groups that are split or joined: pure."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import jobs

from ruda_ds.checkpoint.layout import Logical, Topology, covers
from ruda_ds.checkpoint.layout_stage12 import dealt, stage12_layout, undealt
from ruda_ds.checkpoint.reshard_groups import param_groups, plan_groups, scheduler_state
from ruda_ds.checkpoint.source import Known
from ruda_ds.errors import CheckpointError


@settings(max_examples=120, deadline=None)
@given(jobs(), st.sampled_from([1, 4, 8]))
def test_runs_fill_every_partition_and_agree_with_the_segments(job, multiple):
    groups, topology = job
    parts = [[p for p in group if topology.is_split(p) is split] for group in groups for split in (False, True)]
    parts = [part for part in parts if part]
    layout = stage12_layout(parts, topology, [multiple] * len(parts))
    held = {p.name: [] for part in parts for p in part}
    for rank in range(topology.world_size):
        for group, part in enumerate(parts):
            place, size = 0, layout.partitions[rank][group]
            assert size % 2 == 0
            assert size == layout.partitions[layout.ranks(group, rank)[0]][group]
            for run in layout.runs(rank, group):
                assert (run.start, run.count > 0) == (place, True)
                place += run.count
                if run.logical is not None:
                    held[run.name].append((rank, group, run.start, run.logical, run.count))
                    assert layout.held(run.name, rank) == (run.logical, run.logical + run.count)
            assert place == size
            length = sum(torch.Size(topology.local_shape(p, rank)).numel() for p in part)
            assert size * len(layout.ranks(group, rank)) >= length
            if multiple == 1:
                last = layout.ranks(group, rank)[-1]
                assert layout.padding(last, group) == min(size, size * len(layout.ranks(group, rank)) - length)
    for name, runs in held.items():
        segments = layout.segments(name)
        assert covers(segments, layout.parameters[name].numel)
        assert sorted(runs) == sorted((s.rank, s.group, s.start, s.logical, s.count) for s in segments)


@given(st.integers(0, 20), st.integers(1, 7))
def test_dealing_and_its_inverse(count, ranks):
    items = list(range(count))
    assert undealt(dealt(items, ranks), ranks) == items
    assert dealt([0, 1, 2, 3, 4], 2) == [0, 2, 4, 1, 3]


# --- optimizer groups -----------------------------------------------------------------------------------------------

BEFORE, AFTER = Topology(2, 2, {"moe": (0, 2, 6)}), Topology(3, 1, {"moe": (0, 6)})


def source_of(groups, decays, topology, **config):
    """What `plan_groups` asks of a checkpoint; parameters are letters, capitals are experts."""
    names = sorted("".join(groups), key=str.lower)
    known = {n: Known(Logical(n, (6, 2), "moe" if n.isupper() else None), torch.float32, True) for n in names}
    found = [
        {"lr": 0.1, "weight_decay": decay, "params": [index]} | ({"moe": True, "name": "ep_size_2"} if split else {})
        for index, (decay, split) in enumerate(
            zip(decays, [g.isupper() and topology.ep_size > 1 for g in groups], strict=True)
        )
    ]
    return SimpleNamespace(
        groups=[list(group) for group in groups],
        known=known,
        topology=topology,
        zero_config=config,
        folder=Path("tag"),
        ranks=[SimpleNamespace(optim=SimpleNamespace(path=Path("optim")))],
        base_state=lambda rank: {"param_groups": found},
    )


def names_of(plans):
    return ["".join(plan.names) for plan in plans]


@pytest.mark.parametrize(
    ("groups", "decays", "joined", "origins"),
    [
        (["ac", "eg", "BD", "FH"], [0, 1, 0, 1], ["aBcD", "eFgH"], [(0, 2), (1, 3)]),
        (["ac", "eg", "BD", "FH"], [1, 1, 1, 1], ["aBcD", "eFgH"], [(0, 2), (1, 3)]),  # the order is kept
        (["ac", "eg", "FH"], [0, 1, 1], ["ac", "eFgH"], [(0,), (1, 2)]),
        (["ac", "BD"], [0, 1], ["ac", "BD"], [(0,), (1,)]),  # experts with settings of their own
        (["BD", "ac", "FH"], [0, 0, 0], ["BD", "acFH"], [(0,), (1, 2)]),  # nothing before it that it could come from
    ],
)
def test_experts_join_the_group_that_they_came_from(groups, decays, joined, origins):
    source = source_of(groups, decays, BEFORE)
    plans = plan_groups(source, AFTER)
    assert (names_of(plans), [plan.origins for plan in plans]) == (joined, origins)
    found = param_groups(source, plans, AFTER)
    assert [group["params"] for group in found] == [[index] for index in range(len(plans))]
    assert not any({"moe", "name"} & group.keys() for group in found)
    if len(joined) < len(groups):  # and back again; a group of experts alone stays one
        again = source_of(joined, [decays[first] for first, *_ in origins], AFTER)
        assert names_of(plan_groups(again, BEFORE)) == groups
        split = param_groups(again, plan_groups(again, BEFORE), BEFORE)
        assert [group.get("name") for group in split] == ["ep_size_2" if names.isupper() else None for names in groups]


def test_experts_that_could_come_from_several_groups_are_refused():
    for groups in (["ac", "eg", "BD"], ["ac", "BD", "FH"]):
        with pytest.raises(CheckpointError, match="optim: found expert groups"):
            plan_groups(source_of(groups, [0, 0, 0], BEFORE), AFTER)
    with pytest.raises(CheckpointError, match="tag: found another order"):
        plan_groups(source_of(["ca", "BD"], [0, 0], BEFORE), AFTER)


def test_dealt_parameters_are_dealt_to_the_new_ranks():
    source = source_of(["adbec"], [0], Topology(2), round_robin_gradients=True)
    (plan,) = plan_groups(source, Topology(3))
    assert list(plan.names) == undealt(list("adbec"), 2)
    assert list(plan.flat) == dealt(plan.names, 3)


def test_schedulers_get_an_entry_for_each_group():
    plans = plan_groups(source_of(["ac", "eg", "BD", "FH"], [0, 1, 0, 1], BEFORE), AFTER)
    state = {"base_lrs": [1, 2, 1, 2], "_milestones": [4, 5, 6, 7], "inner": [{"_last_lr": (1, 2, 1, 2)}]}
    wanted = {"base_lrs": [1, 2], "_milestones": [4, 5, 6, 7], "inner": [{"_last_lr": (1, 2)}]}
    assert scheduler_state(state, plans, 4) == wanted
    assert scheduler_state(None, plans, 4) is None
