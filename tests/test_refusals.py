"""Every refusal of the accumulator: the error names the thing, and the window is as it was, to the bit."""

import math

import pytest
import torch
from helpers import base_config, fill, make_engine, make_model, same, snapshot

from ruda_ds import AccumulationContract, AccumulationState, GradientAccumulator, attach
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import (
    BindingError,
    BrokenWindowError,
    CallingStyleError,
    CounterOverflowError,
    CountError,
    EmptyWindowError,
    LossError,
    PlacementError,
    RecordError,
    StateError,
)


def refused() -> list[str]:
    """Each bad call in the middle of a window; returns the problems found."""
    engine = make_engine(base_config())
    accumulator = engine.accumulator
    fill(engine, 0, 2)
    before = snapshot(accumulator)
    x = torch.ones(2, 7)
    good = lambda: engine(x).sum()  # noqa: E731
    shard = {p.name: torch.ones(p.shard_numel) for p in accumulator.placement if p.requires_grad}
    name = "first.weight"
    frozen = next(p for p in accumulator.placement if not p.requires_grad)
    state, placement = accumulator.state, accumulator.placement
    other = tuple(p if p.name != name else type(p)(**{**vars(p), "logical_shape": (14, 7)}) for p in placement)
    pending = {n: g.clone() for n, g in accumulator.pending().items()}
    restore = lambda *a: GradientAccumulator.from_contract(engine, AccumulationContract(*a[:2]), a[2])  # noqa: E731
    cases = [
        ("no count", CountError, lambda: accumulator.backward_sum(good())),
        ("both counts", CountError, lambda: accumulator.backward_sum(good(), 3, global_count=4)),
        ("negative", CountError, lambda: accumulator.backward_sum(good(), local_count=-1)),
        ("float count", CountError, lambda: accumulator.backward_sum(good(), local_count=3.0)),
        ("bool count", CountError, lambda: accumulator.backward_sum(good(), local_count=True)),
        ("huge count", CounterOverflowError, lambda: accumulator.backward_sum(good(), global_count=2**64)),
        ("overflow", CounterOverflowError, lambda: accumulator.backward_sum(good(), global_count=2**64 - 1)),
        ("vector loss", LossError, lambda: accumulator.backward_sum(engine(x), local_count=1)),
        ("constant loss", LossError, lambda: accumulator.backward_sum(torch.tensor(1.0), local_count=1)),
        ("number loss", LossError, lambda: accumulator.backward_sum(1.0, local_count=1)),
        ("integer loss", LossError, lambda: accumulator.backward_sum(torch.tensor(1), local_count=1)),
        ("unknown name", PlacementError, lambda: accumulator.accumulate_sum({"nobody": torch.ones(1)}, 1)),
        (
            "frozen",
            PlacementError,
            lambda: accumulator.accumulate_sum({frozen.name: torch.ones(frozen.shard_numel)}, 1),
        ),
        ("length", PlacementError, lambda: accumulator.accumulate_sum({name: torch.ones(shard[name].numel() + 1)}, 1)),
        ("integers", PlacementError, lambda: accumulator.accumulate_sum({name: shard[name].long()}, 1)),
        ("sum overflow", CounterOverflowError, lambda: accumulator.accumulate_sum(shard, 2**64 - 1)),
        ("mixed style", CallingStyleError, lambda: (accumulator.count(1), engine.backward(good()))),
        ("engine.step", CallingStyleError, lambda: engine.step()),
        ("boundary", CallingStyleError, lambda: engine.set_gradient_accumulation_boundary(True)),
        ("direct backward", CallingStyleError, lambda: good().backward()),
        ("bound twice", BindingError, lambda: attach(engine)),
        ("dtype", RecordError, lambda: restore(AccumulationState(torch.float64, 1.0, 5, 1), placement, pending)),
        ("scale", RecordError, lambda: restore(AccumulationState(torch.float32, 2.0, 5, 1), placement, pending)),
        ("placement", PlacementError, lambda: restore(state, other, pending)),
        ("missing", PlacementError, lambda: restore(state, placement[1:], pending)),
        ("no microbatch", RecordError, lambda: restore(state.cleared(), placement, pending)),
        ("shard dtype", PlacementError, lambda: restore(state, placement, {n: g.double() for n, g in pending.items()})),
    ]
    problems = []
    for label, error, call in cases:
        try:
            call()
        except error as found:
            if not str(found):
                problems.append(f"{label}: no message")
        except Exception as found:
            problems.append(f"{label}: {type(found).__name__}: {found}")
        else:
            problems.append(f"{label}: accepted")
        if not same(before, snapshot(accumulator)):
            problems.append(f"{label}: the window changed")
    # It still works, and gives what it would have given.
    accumulator.backward_sum(good() * 0, local_count=0)
    result = accumulator.step()
    if result.skipped or result.count != before[0].global_count:
        problems.append(f"afterwards: {result}")
    return problems


@pytest.mark.parametrize("world", [1, 2])
def test_refusals_leave_the_window_alone(world):
    assert run_ranks(refused, world) == [[]] * world


def emptied() -> None:
    accumulator = make_engine(base_config()).accumulator
    for call in (accumulator.step, accumulator.finish_mean, accumulator.finish_native_mean):
        with pytest.raises(EmptyWindowError):
            call()
    assert accumulator.finish_sums().gradients == {}


def test_a_window_without_a_microbatch_has_no_mean():
    run_ranks(emptied, 1)


class Breaks(torch.autograd.Function):
    """The identity, whose backward fails when it is told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise MemoryError("out of memory in the middle of a backward")
        return gradient, None


class Breaking(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = torch.nn.Linear(7, 9), torch.nn.Linear(9, 3)

    def forward(self, x, fails=False):
        return self.above(Breaks.apply(self.below(x), fails)).pow(2).sum()


def broken() -> None:
    torch.manual_seed(3)
    engine = make_engine(base_config(zero_optimization={"reduce_bucket_size": 1}), model=Breaking())
    accumulator, x = engine.accumulator, torch.ones(2, 7)
    accumulator.backward_sum(engine(x), local_count=2)
    with pytest.raises(MemoryError):
        accumulator.backward_sum(engine(x, fails=True), local_count=2)
    for call in (
        accumulator.step,
        accumulator.finish_sums,
        accumulator.contract,
        lambda: accumulator.backward_sum(engine(x), local_count=2),
    ):
        with pytest.raises(BrokenWindowError, match="out of memory"):
            call()
    accumulator.discard()
    accumulator.backward_sum(engine(x), local_count=2)
    first = {n: g.clone() for n, g in accumulator.finish_sums().gradients.items()}
    accumulator.backward_sum(engine(x), local_count=2)
    again = accumulator.finish_sums().gradients
    assert all(torch.equal(first[name], again[name]) for name in first)
    twin = torch.nn.Module.__new__(Breaking)
    torch.manual_seed(3)
    Breaking.__init__(twin)
    twin(x).backward()
    assert torch.allclose(first["below.bias"], twin.below.bias.grad, rtol=1e-6)


def test_a_failed_backward_breaks_the_window_until_it_is_discarded():
    run_ranks(broken, 1)


def closed() -> None:
    engine = make_engine(base_config(), model=make_model())
    engine.accumulator.close()
    assert "accumulator" not in vars(engine)
    again = attach(engine)
    fill(engine, 0, 2)
    assert not again.step().skipped


def test_close_gives_the_engine_back():
    run_ranks(closed, 2)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e-50, 1e39, True, "2"])
def test_loss_scales_that_float32_cannot_hold(scale):
    with pytest.raises(StateError, match="loss_scale"):
        AccumulationState(torch.float32, scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_work_dtypes(dtype):
    with pytest.raises(StateError, match="dtype"):
        AccumulationState(dtype, 1.0)
