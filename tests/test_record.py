"""Records: a window copied out, refused where it does not fit, and put back to the bit; the JSON form of its state."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import base_config, deal, full_parameters, local_batch, make_engine, rows, same, snapshot
from hypothesis import given
from hypothesis import strategies as st

from ruda_ds import AccumulationState, ParameterPlacement, WeightedGradientAccumulator
from ruda_ds.accumulation import PendingGradientsRecord, WeightedAccumulationState
from ruda_ds.accumulation.record import RECORD_VERSION, check_record, read_window, window_fields
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import BindingError, BrokenWindowError, PlacementError, RecordError

PLACE = ParameterPlacement("w", (5,), 0, 2, torch.bfloat16, True)
STATE = AccumulationState(torch.float32, 1.0, 7, 2)
RECORD = PendingGradientsRecord(RECORD_VERSION, {"w": torch.ones(3)}, STATE, (PLACE,), 2.5)
EMPTY = replace(STATE, global_count=0, microbatches=0)


def test_a_whole_record_passes_and_an_empty_one():
    check_record(RECORD)
    check_record(replace(RECORD, gradients={}, state=EMPTY, loss=0.0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"version": 2}, RecordError, "version of the record is 2, expected 1"),
        ({"state": EMPTY, "loss": 0.0}, RecordError, r"gradients for \['w'\] in a record without a micro-batch"),
        ({"state": EMPTY, "gradients": {}}, RecordError, "the loss sum 2.5 in a record without a micro-batch"),
        ({"gradients": {"w": torch.ones(2)}}, PlacementError, r"'w': gradient shape is \(2,\), expected \(3,\)"),
        ({"gradients": {"w": torch.ones(3).double()}}, PlacementError, "gradient dtype is torch.float64"),
        ({"gradients": {"v": torch.ones(3)}}, PlacementError, "'v': presence is unknown"),
        ({"placement": (replace(PLACE, requires_grad=False),)}, PlacementError, "'w': requires_grad"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        check_record(replace(RECORD, **change))


COUNTS = st.integers(0, 2**64 - 1)
LOSSES = st.one_of(st.none(), st.floats(), st.sampled_from([math.nan, math.inf, -0.0, 5e-324]))
SCALES = st.floats(1e-20, 1e20)


@given(COUNTS, st.integers(1, 2**64 - 1), SCALES, LOSSES, st.one_of(st.none(), st.floats(0, 1e300)))
def test_a_state_survives_json_to_the_bit(count, microbatches, scale, loss, weight):
    state = AccumulationState(torch.float64, scale, count, microbatches)
    if weight is not None:
        state = WeightedAccumulationState(torch.float64, scale, count, microbatches, weight)
    found, found_loss = read_window(json.loads(json.dumps(window_fields(state, loss))))
    assert found == state
    assert type(found) is type(state)
    assert (found_loss is None) == (loss is None)
    assert loss is None or found_loss.hex() == float(loss).hex()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Other"}, "kind is 'Other', expected one of AccumulationState, WeightedAccumulationState"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', expected float32 or float64"),
        ({"microbatches": 0}, "global_count is 7 in a window without a micro-batch"),
        ({"global_count": -1}, "global_count is -1"),
        ({"global_count": 2**64}, "expected at most 2"),
        ({"global_count": 1.0}, "expected an integer count"),
        ({"more": 1}, "unexpected keyword"),
        ({"loss": "soon"}, "hexadecimal"),
    ],
)
def test_an_impossible_state_is_refused(change, message):
    with pytest.raises(RecordError, match=message):
        read_window({**window_fields(STATE, 1.0), **change})


def batches(microbatches=4):
    return deal(len(rows(0)[1]), microbatches, dist.get_world_size())


def feed(engine, tables, weighted):
    for table in tables:
        x, mask = local_batch(0, table[dist.get_rank()], torch.float32)
        count = int(mask.sum())
        keywords = {"local_weight": count * 0.3} if weighted else {}
        engine.accumulator.backward_sum((engine(x) * mask).sum(), local_count=count, **keywords)


def start(stage, dtype, weighted):
    settings = {"accumulation": {"dtype": dtype, "loss_scale": 4.0}}
    engine = make_engine(base_config(zero_optimization={"stage": stage}, ruda=settings))
    if weighted:
        WeightedGradientAccumulator(engine)
    return engine


def moved(stage, dtype, weighted):
    """A window's result and parameters: run through, and moved by a record after each micro-batch."""
    whole = start(stage, dtype, weighted)
    feed(whole, batches(), weighted)
    wanted = whole.accumulator.step(), full_parameters(whole)
    outcomes = []
    for cut in (0, 1, 3, 4):
        first, second = start(stage, dtype, weighted), start(stage, dtype, weighted)
        feed(first, batches()[:cut], weighted)
        before = snapshot(first.accumulator)
        record = first.accumulator.record()
        assert same(before, snapshot(first.accumulator))
        feed(first, batches()[cut : cut + 1], weighted)  # must not show in the record
        feed(second, batches()[:1], weighted)  # must be gone
        second.accumulator.load_record(record)
        feed(second, batches()[cut:], weighted)
        found = second.accumulator.step(), full_parameters(second)
        outcomes.append(found[0] == wanted[0] and all(torch.equal(found[1][n], v) for n, v in wanted[1].items()))
    return outcomes


@pytest.mark.parametrize(
    ("world", "stage", "dtype", "weighted"),
    [(2, 3, "float32", False), (2, 3, "float64", True), (2, 2, "float32", True), (1, 1, "float64", False)],
)
def test_a_record_goes_on_in_another_engine_with_the_same_loss_to_the_bit(world, stage, dtype, weighted):
    assert run_ranks(moved, world, stage, dtype, weighted) == [[True] * 4] * world


def refused():
    engine = start(3, "float32", False)
    accumulator = engine.accumulator
    feed(engine, batches()[:2], False)
    record, before = accumulator.record(), snapshot(accumulator)
    other = tuple(replace(p, world_size=3) if p.name == "scale" else p for p in record.placement)
    shard = record.gradients["scale"]
    cases = {
        "version of the record is 0": replace(record, version=0),
        "loss_scale is 8.0, expected 4.0": replace(record, state=replace(record.state, loss_scale=8.0)),
        "dtype is torch.float64, expected torch.float32": replace(
            record,
            state=replace(record.state, dtype=torch.float64),
            gradients={n: g.double() for n, g in record.gradients.items()},
        ),
        "state is a WeightedAccumulationState": replace(
            record, state=WeightedAccumulationState(torch.float32, 4.0, 7, 2, 1.0)
        ),
        "'scale': world_size is 3, expected 2": replace(record, placement=other, gradients={}),
        "without a micro-batch": replace(record, state=accumulator.state.cleared(), loss=0.0),
        "'scale': gradient shape": replace(record, gradients={"scale": torch.cat([shard, shard, torch.ones(1)])}),
    }
    for message, wrong in cases.items():
        with pytest.raises((RecordError, PlacementError), match=message):
            accumulator.check_record(wrong)
        with pytest.raises((RecordError, PlacementError), match=message):
            accumulator.load_record(wrong)
        assert same(before, snapshot(accumulator))
    accumulator._failure = "as after a backward that failed"
    with pytest.raises(BrokenWindowError):
        accumulator.record()
    accumulator.load_record(record)
    assert same(before, snapshot(accumulator))
    accumulator.close()
    with pytest.raises(BindingError, match="was closed"):
        accumulator.load_record(record)
    return len(cases)


def test_a_record_that_does_not_fit_leaves_the_window_as_it_was():
    assert run_ranks(refused, 2) == [7, 7]
