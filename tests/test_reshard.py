"""Shards of any topology cut into those of any other: the same elements, counters copied, gaps and doubles refused."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import Mixture
from helpers import base_config
from hypothesis import given, settings
from hypothesis import strategies as st

import ruda_ds
from ruda_ds import AccumulationState, ParameterPlacement
from ruda_ds.accumulation import PendingGradientsRecord
from ruda_ds.accumulation.record import RECORD_VERSION
from ruda_ds.accumulation.reshard import (
    LogicalParameter,
    Piece,
    ShardMap,
    held_range,
    logical_parameters,
    reshard,
    zero3_placement,
    zero3_placements,
)
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import RecordError

STATE = AccumulationState(torch.float32, 2.0, 2**63 + 1, 3)
MODEL = {
    "bias": LogicalParameter("bias", (1,), torch.float32, True),
    "cube": LogicalParameter("cube", (8, 3, 5), torch.bfloat16, True),
    "frozen": LogicalParameter("frozen", (4, 4), torch.bfloat16, False),
    "scalar": LogicalParameter("scalar", (), torch.float32, True),
    "unused": LogicalParameter("unused", (9,), torch.float32, True),
    "weight": LogicalParameter("weight", (7, 11), torch.bfloat16, True),
}
TOUCHED = ("bias", "cube", "scalar", "weight")
WHOLE = {name: torch.arange(float(torch.Size(MODEL[name].shape).numel())) + 0.5 for name in TOUCHED}


def records(placements, state=STATE, loss=1.25):
    """The records of all ranks that hold parts of WHOLE."""
    return [
        PendingGradientsRecord(
            RECORD_VERSION,
            {p.name: WHOLE[p.name][slice(*held_range(p))].clone() for p in places if p.name in TOUCHED},
            state,
            tuple(places),
            loss,
        )
        for places in placements
    ]


def equal(found, wanted):
    return all(
        a.placement == b.placement
        and (a.state, a.loss, a.gradients.keys()) == (b.state, b.loss, b.gradients.keys())
        and all(torch.equal(a.gradients[n], b.gradients[n]) for n in a.gradients)
        for a, b in zip(found, wanted, strict=True)
    )


def topology(world, prefix):
    return zero3_placements(MODEL, world, {"cube": prefix})


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, [0, 3, 8]), (1, [0, 8])),
        ((2, [0, 3, 8]), (3, [0, 2, 2, 8])),
        ((2, [0, 3, 8]), (4, [0, 3, 8])),
        ((2, [0, 8]), (4, [0, 0, 1, 8, 8])),
        ((6, [0, 0, 8]), (4, [0, 8])),
        ((1, [0, 8]), (96, [0, 8])),
    ],
)
def test_there_and_back_is_the_same_to_the_bit(source, target):
    there = reshard(records(topology(*source)), topology(*target))
    assert equal(there, records(topology(*target)))
    assert equal(reshard(there, topology(*source)), records(topology(*source)))


@st.composite
def topologies(draw):
    owners = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, 8), min_size=owners - 1, max_size=owners - 1)))
    return owners * draw(st.integers(1, 4)), [0, *cuts, 8]


@settings(max_examples=60)
@given(topologies(), topologies(), st.randoms(use_true_random=False))
def test_any_topology_to_any_other(source, target, order):
    given_records = records(topology(*source))
    order.shuffle(given_records)
    assert equal(reshard(given_records, topology(*target)), records(topology(*target)))


def test_parts_of_flat_groups_go_to_shards_and_back():
    """ZeRO-1/2: a parameter lies across a boundary, wholly on one rank, or not at all."""
    fragments = [{"weight": (0, 70), "bias": (0, 0)}, {"weight": (70, 77), "bias": (0, 1)}]
    model = {name: MODEL[name] for name in ("weight", "bias")}
    flat = [
        tuple(ParameterPlacement(n, m.shape, r, 2, m.dtype, True, part[n]) for n, m in sorted(model.items()))
        for r, part in enumerate(fragments)
    ]
    made = records(flat)
    del made[0].gradients["bias"]  # as Stage12Reduction leaves it: no element, no entry
    target = zero3_placements(model, 3)
    assert equal(reshard(made, target), records(target))
    assert equal(reshard(records(target), flat), records(flat))


def test_the_source_of_each_element():
    held = [(0, 4), (4, 8), (8, 8), (8, 10)]
    table = ShardMap("w", held, 10)
    assert table.pieces(2, 9) == [Piece(0, 2, 4, 0), Piece(1, 0, 4, 2), Piece(3, 0, 1, 6)]
    assert table.pieces(4, 4) == []
    assert table.pieces(0, 10)[-1] == Piece(3, 0, 2, 8)
    with pytest.raises(RecordError, match=r"elements 10\.\.11 lie outside"):
        table.pieces(9, 11)
    for wrong, message in (
        ([(0, 4), (5, 10)], "rank 1 begins at element 5, expected 4"),
        ([(0, 4), (0, 4), (4, 10)], "rank 1 begins at element 0, expected 4"),
        ([(0, 4)], "the shards end at element 4, expected 10"),
    ):
        with pytest.raises(RecordError, match=message):
            ShardMap("w", wrong, 10)


def test_a_cube_of_512_ranks_is_found_without_looking_at_all():
    parameter = LogicalParameter("cube", (1024, 64, 64), torch.float32, True)
    places = [zero3_placement(parameter, rank, 512, list(range(0, 1025, 16))) for rank in range(512)]
    table = ShardMap("cube", [held_range(place) for place in places], 1024 * 64 * 64)
    generator = random.Random(3)
    for _ in range(200):
        start = generator.randrange(1024 * 64 * 64 - 5)
        assert len(table.pieces(start, start + 5)) <= 2
    assert len(table.pieces(0, 1024 * 64 * 64)) == 512


def drop(name):
    return lambda made: made[1].gradients.pop(name) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made[:1], r"records of ranks \[1\] are missing, expected one of each of 2 ranks"),
        (lambda made: [made[0], made[0]], "rank 0 of 2 stands twice"),
        (lambda made: [*made, made[1]], "rank 1 of 2 stands twice"),
        (lambda made: [made[0], records(topology(3, [0, 8]))[1]], "rank 1 is of 3 ranks"),
        (lambda made: [made[0], replace(made[1], state=replace(STATE, global_count=4))], "disagree on global_count"),
        (lambda made: [made[0], replace(made[1], state=replace(STATE, microbatches=4))], "disagree on microbatches"),
        (lambda made: [made[0], replace(made[1], state=replace(STATE, loss_scale=4.0))], "disagree on loss_scale"),
        (lambda made: [made[0], replace(made[1], loss=1.5)], "disagree on loss"),
        (drop("weight"), r"'weight': ranks \[1\] have no pending gradient"),
        (drop("cube"), r"'cube': ranks \[1\] have no pending gradient"),
        (lambda made: [], "no record was given"),
        (
            lambda made: [made[0], replace(made[1], placement=records(topology(2, [0, 8]))[1].placement)],
            "gradient shape",
        ),
    ],
)
def test_an_incomplete_or_disagreeing_set_is_refused(change, message):
    made = records(topology(2, [0, 3, 8]))
    changed = change(made)
    with pytest.raises((RecordError, ValueError), match=message):
        reshard(made if isinstance(changed, bool) else changed, topology(3, [0, 8]))


def test_other_models_and_ownerships_that_do_not_fit_are_refused():
    smaller = {name: MODEL[name] for name in ("bias", "weight")}
    with pytest.raises(RecordError, match="another model"):
        reshard(records(topology(2, [0, 3, 8])), zero3_placements(smaller, 2))
    with pytest.raises(RecordError, match="other parameters than rank 0"):
        logical_parameters([topology(2, [0, 8])[0], zero3_placements(smaller, 2)[1]])
    wrong = {**MODEL, "weight": replace(MODEL["weight"], shape=(7, 12))}
    with pytest.raises(RecordError, match="rank 1 has .*expected"):
        logical_parameters([topology(2, [0, 8])[0], zero3_placements(wrong, 2)[1]])
    for world, prefix in ((3, [0, 3, 8]), (2, [0, 3, 9])):
        with pytest.raises(RecordError, match="does not fit 8 experts on"):
            topology(world, prefix)


# --- on real ranks ----------------------------------------------------------------------------------------------


def half_a_window(prefix):
    """Each rank's record of the same rows, however they are dealt; the placement must be the live one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Mixture(prefix, rank % (len(prefix) - 1), torch.float32)
    engine, *_ = ruda_ds.initialize(
        model=model.eval(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=base_config()
    )
    for number in range(2):
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(number))[rank::world]
        engine.accumulator.backward_sum(engine(x).sum(), local_count=len(x))
    return engine.accumulator.record()


def test_records_of_two_ranks_are_those_of_other_topologies():
    two = run_ranks(half_a_window, 2, [0, 3, 8])
    for world, prefix in ((1, [0, 8]), (3, [0, 2, 2, 8]), (4, [0, 5, 8])):
        live = run_ranks(half_a_window, world, prefix)
        model = logical_parameters([record.placement for record in two])
        cubes = {name: prefix for name in model if ".experts." in name}
        made = reshard(two, zero3_placements(model, world, cubes))
        for found, wanted in zip(made, live, strict=True):
            assert (found.placement, found.state) == (wanted.placement, wanted.state)
            assert found.gradients.keys() == wanted.gradients.keys()
            assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
            for name, shard in wanted.gradients.items():
                torch.testing.assert_close(found.gradients[name], shard, rtol=1e-5, atol=1e-5)
