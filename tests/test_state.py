"""The pure parts: counters, placements, shards, the division and the norm's arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ruda_ds.accumulation.buffers import PendingShards
from ruda_ds.accumulation.division import divide_
from ruda_ds.accumulation.norm import GradientNorm, clip_gradient_norm, combine_moments, local_moments
from ruda_ds.accumulation.placement import ParameterPlacement, compare, digest
from ruda_ds.accumulation.state import MAX_COUNTER, AccumulationState
from ruda_ds.accumulation.style import CallingStyle, StyleTracker
from ruda_ds.comm.agreement import join_counter, split_counter
from ruda_ds.errors import CallingStyleError, CounterOverflowError, PlacementError, StateError
from ruda_ds.shapes import padded_shard_length, shard_range

counters = st.integers(0, MAX_COUNTER)


@given(counters, counters)
def test_counters_are_exact_or_overflow(first, second):
    state = AccumulationState(torch.float32, 1.0).advanced(first)
    if first + second > MAX_COUNTER:
        with pytest.raises(CounterOverflowError, match="2\\^64-1"):
            state.advanced(second)
    else:
        assert state.advanced(second).global_count == first + second
        assert state.advanced(second).microbatches == 2
    assert state.cleared() == AccumulationState(torch.float32, 1.0)


def test_a_count_without_a_microbatch_is_no_state():
    with pytest.raises(StateError, match="without a micro-batch"):
        AccumulationState(torch.float32, 1.0, global_count=3)


def test_the_scale_in_the_divisor_is_the_one_that_the_backward_multiplies_by():
    state = AccumulationState(torch.float32, 0.1, 3, 1)
    assert state.work_scale == np.float32(0.1)
    assert state.divisor == float(np.float32(0.1)) * 3
    assert AccumulationState(torch.float64, 0.1, 3, 1).divisor == 0.1 * 3
    assert AccumulationState(torch.float64, 8.0, 0, 1).divisor == 8.0


@given(st.lists(counters, min_size=1, max_size=9))
def test_split_counters_sum_exactly_in_float64(values):
    low, high = (sum(map(float, part)) for part in zip(*map(split_counter, values), strict=True))
    assert join_counter(int(low), int(high)) == sum(values)


@given(st.integers(-(2**63), 2**64 - 1))
def test_split_counters_join_again(value):
    assert join_counter(*split_counter(value)) == value


@given(st.integers(0, 200), st.integers(1, 9))
def test_shards_cover_a_parameter_once(elements, world):
    ranges = [shard_range(elements, world, rank) for rank in range(world)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(elements))
    assert all(stop - start <= padded_shard_length(elements, world) for start, stop in ranges)


def placement(**changes):
    values = {
        "name": "w",
        "logical_shape": (7, 15),
        "rank": 1,
        "world_size": 4,
        "dtype": torch.float32,
        "requires_grad": True,
    }
    return ParameterPlacement(**{**values, **changes})


def test_placements_compare_field_by_field():
    assert (placement().numel, placement().shard, placement().padded_numel) == (105, (27, 54), 27)
    assert placement(rank=3).shard_numel == 24
    assert placement(fragment=(3, 9)).shard_numel == 6
    compare([placement()], [placement()])
    for field, value in {
        "logical_shape": (15, 7),
        "rank": 0,
        "world_size": 5,
        "dtype": torch.bfloat16,
        "requires_grad": False,
        "fragment": (0, 1),
    }.items():
        with pytest.raises(PlacementError, match=f"parameter 'w': {field} is .*expected") as caught:
            compare([placement()], [placement(**{field: value})])
        assert caught.value.found == value
    for one, other in (([placement()], []), ([], [placement()])):
        with pytest.raises(PlacementError, match="presence"):
            compare(one, other)


def test_digests_ignore_what_differs_between_ranks_only():
    assert digest([placement()]) == digest([placement(rank=3, fragment=(1, 2))])
    assert digest([placement()]) != digest([placement(dtype=torch.bfloat16)])
    assert 0 <= digest([placement()]) < 2**63


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=300)
@given(finite32, st.one_of(st.integers(1, 2**64 - 1), st.floats(1e-3, 1e12)))
def test_division_is_correctly_rounded(value, divisor):
    divided = divide_(torch.tensor([value], dtype=torch.float32), float(divisor)).item()
    exact = Fraction(value) / Fraction(float(divisor))
    # The neighbours of the result in float32: none may be nearer to the exact quotient.
    if math.isinf(divided):
        assert abs(exact) > Fraction(float(np.finfo(np.float32).max))
        return
    error = abs(Fraction(divided) - exact)
    for side in (-np.inf, np.inf):
        with np.errstate(over="ignore"):  # the neighbour of the largest float32 is infinite
            neighbour = float(np.nextafter(np.float32(divided), np.float32(side)))
        if math.isfinite(neighbour):
            # A float64 quotient is rounded twice: allow what its own last bit is worth.
            assert error <= abs(Fraction(neighbour) - exact) + abs(exact) * Fraction(1, 2**52)


def test_division_by_a_power_of_two_and_by_infinity():
    values = torch.tensor([3.0, -5.0, 0.0])
    assert torch.equal(divide_(values.clone(), 8.0), values / 8)
    assert torch.equal(divide_(values.clone(), math.inf).abs(), torch.zeros(3))


def test_a_large_tensor_divides_as_a_small_one():
    values = torch.randn(200_003)
    divisor = 16777217.0  # 2^24 + 1, not a float32
    assert torch.equal(divide_(values.clone(), divisor), (values.double() / divisor).float())


@given(st.lists(st.lists(finite32, max_size=5), max_size=4))
def test_moments_of_float32_neither_overflow_nor_underflow(parts):
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    norm = combine_moments([tuple(local_moments([tensor]).tolist()) for tensor in tensors])
    exact = math.sqrt(sum(Fraction(float(x)) ** 2 for part in parts for x in part))
    assert norm.value == pytest.approx(exact, rel=1e-12)
    assert combine_moments([tuple(local_moments(tensors).tolist())]).value == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_moments_of_float64_use_the_maximum(scale):
    norm = combine_moments([tuple(local_moments([torch.tensor([3.0, 4.0], dtype=torch.float64) * scale]).tolist())])
    assert norm.value == pytest.approx(5 * scale, rel=1e-15)


def test_clipping_is_right_where_the_norm_overflows():
    norm = combine_moments([tuple(local_moments([torch.full((4,), 1.5e308, dtype=torch.float64)]).tolist())])
    assert math.isinf(norm.value)
    shard = torch.full((4,), 1.5e308, dtype=torch.float64)
    coefficient = clip_gradient_norm({"w": shard}, norm, max_norm=3e300)
    assert coefficient == pytest.approx(1e-8, rel=1e-12)
    assert shard.tolist() == pytest.approx([1.5e300] * 4, rel=1e-12)


def test_clipping_coefficients():
    assert GradientNorm(1.0, 4.0).coefficient(2.0, epsilon=0.0) == 0.5
    assert GradientNorm(1.0, 4.0).coefficient(8.0) == 1.0
    assert GradientNorm(1.0, 4.0).coefficient(0.0) == 1.0
    assert GradientNorm(1.0, 0.0).coefficient(1.0) == 1.0
    assert GradientNorm(1.0, 4.0).divided(8.0).value == 0.5


def test_pending_shards_copy_first_add_later_and_zero_the_rest():
    flat = torch.full((7,), 9.0)
    shards = PendingShards(flat, {"a": flat[:3], "b": flat[3:5], "c": flat[5:7]})
    shards.add(["a"], [torch.ones(3)])
    shards.add(["a", "b"], [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)])
    shards.zero_untouched()
    assert flat.tolist() == [2, 2, 2, 1, 1, 0, 0]
    shards.clear()
    shards.add(["c"], [torch.full((2,), 4.0)])
    shards.zero_untouched()
    assert flat.tolist() == [0, 0, 0, 0, 0, 4, 4]


def test_style_tracker():
    tracker = StyleTracker(steps_per_window=3)
    assert not tracker.next_step_ends_window()
    tracker.restart(microbatches=2)
    assert tracker.next_step_ends_window()
    tracker.announce(False)
    assert not tracker.next_step_ends_window()
    with pytest.raises(CallingStyleError, match=CallingStyle.SUM.value.replace("+", "\\+")):
        tracker.enter(CallingStyle.SUM)
