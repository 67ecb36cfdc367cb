"""The compiled sums of rows against their compositions in torch, and against float64."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ruda_ds.ops.rows import combine_rows, combine_rows_backward, fresh_rows, is_compiled, sum_rows


def problem(tokens, top_k, hidden, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = tokens * top_k + 3  # some rows that no slot names
    rows, gradient = torch.randn(count, hidden, generator=generator), torch.randn(tokens, hidden, generator=generator)
    slots = torch.randperm(count, generator=generator)[: tokens * top_k].view(tokens, top_k)
    return rows.to(dtype), torch.rand(tokens, top_k, generator=generator), slots, gradient.to(dtype)


def derivatives(gradient, rows, weights, slots, compiled, split, room):
    """(of the rows that slots name, of the weights)."""
    first, second, of_weights = combine_rows_backward(
        gradient, rows, weights, slots, compiled=compiled, split=split, room=room
    )
    assert (len(first), len(second)) == (split + room, len(rows) - split)
    return torch.cat([first[:split], second])[slots.flatten()], of_weights


def relative(found, wanted):
    return (found.double() - wanted.double()).norm().item() / (wanted.double().norm().item() or 1.0)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 9),
    hidden=st.sampled_from([1, 7, 16, 33, 64, 200]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_compiled_sums_are_those_of_float64(tokens, top_k, hidden, dtype, seed):
    rows, weights, slots, gradient = problem(tokens, top_k, hidden, dtype, seed)
    assert is_compiled("cpu", rows)
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    wide, wide_gradient = rows.double(), gradient.double()
    assert relative(sum_rows(rows, slots, compiled=True), sum_rows(wide, slots)) <= limit
    split = seed % (len(rows) + 1)
    first, second = rows[:split].clone(), rows[split:].clone()
    for compiled in (True, False):
        apart = sum_rows(first, slots, compiled, more=second)
        assert torch.equal(apart, sum_rows(rows, slots, compiled))
    combined = combine_rows(rows, weights, slots, compiled=True)
    assert combined.dtype == dtype
    assert relative(combined, combine_rows(wide, weights.double(), slots)) <= limit
    wanted, wanted_weights = derivatives(wide_gradient, wide, weights.double(), slots, False, len(rows), 0)
    for compiled, room in ((True, 0), (True, 2), (False, 2)):
        found, found_weights = derivatives(gradient, rows, weights, slots, compiled, split, room)
        assert relative(found, wanted) <= limit
        assert relative(found_weights, wanted_weights) <= 1e-6 * max(1, hidden)  # cancellation in a dot product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["avx512_bf16", "avx512", "avx2", "portable"])
def test_every_instruction_set_gives_the_same_answer(kernels, dtype):
    assert is_compiled("cpu", torch.zeros(1, 1))
    best = torch.ops.ruda.cpu_kernels()
    try:
        torch.ops.ruda.cpu_kernels(kernels)
    except ValueError:
        pytest.skip("not on this CPU")
    try:
        for tokens, top_k, hidden in ((9, 3, 64), (5, 2, 201), (4, 1, 5)):
            test_the_compiled_sums_are_those_of_float64.hypothesis.inner_test(tokens, top_k, hidden, dtype, 1)
    finally:
        torch.ops.ruda.cpu_kernels(best)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_sum_does_not_depend_on_the_others_or_on_threads(dtype):
    rows, weights, slots, gradient = problem(300, 4, 100, dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(
                (
                    combine_rows(rows, weights, slots, True),
                    *derivatives(gradient, rows, weights, slots, True, 500, 3),
                )
            )
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][2], results[1][2])
    assert torch.equal(combine_rows(rows, weights[37:38], slots[37:38], True), results[0][0][37:38])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_keep_torchs_contract(dtype):
    rows, weights, slots, gradient = problem(9, 3, 24, dtype)
    assert is_compiled("cpu", rows)
    for factors in (weights, None):
        torch.library.opcheck(torch.ops.ruda.combine_rows, (rows, None, factors, slots))
        torch.library.opcheck(torch.ops.ruda.combine_rows, (rows[:11].clone(), rows[11:].clone(), factors, slots))
    every = torch.arange(27).view(9, 3)  # rows that no slot names are not written
    for split in (0, 20, 27):
        torch.library.opcheck(
            torch.ops.ruda.combine_rows_backward, (gradient, rows[:27].clone(), weights, every, split, 0)
        )


def test_what_does_not_fit_is_refused():
    rows, weights, slots, gradient = problem(5, 2, 8, torch.float32)
    assert not is_compiled("reference", rows)
    assert not is_compiled("auto", rows.double())
    with pytest.raises(ValueError, match="expected float32 or bfloat16"):
        combine_rows(rows.double(), weights, slots, compiled=True)
    with pytest.raises(ValueError, match="the gradient is"):
        combine_rows_backward(gradient[:3], rows, weights, slots, compiled=True, split=0, room=0)
    with pytest.raises(ValueError, match="split is 14"):
        combine_rows_backward(gradient, rows, weights, slots, compiled=True, split=14, room=0)
    with pytest.raises(ValueError, match="more rows are"):
        sum_rows(rows, slots, compiled=True, more=rows[:, :7].contiguous())
    with pytest.raises(ValueError, match="count -1"):
        fresh_rows(rows, -1, compiled=True)
    with pytest.raises(ValueError, match="int64"):
        sum_rows(rows, slots.int(), compiled=True)
    with pytest.raises(IndexError, match="a slot is 13, expected a row of 13"):
        sum_rows(rows, slots.where(slots != 0, 13), compiled=True)
    with pytest.raises(IndexError, match="a slot is -1"):
        sum_rows(rows, slots.where(slots != 0, -1), compiled=True)


def test_fresh_rows_take_memory_that_was_given_back():
    like = torch.zeros(1, 1 << 16)
    assert is_compiled("cpu", like)
    for compiled in (True, False):
        made = fresh_rows(like, 16, compiled)
        assert (tuple(made.shape), made.dtype, made.is_contiguous()) == ((16, 1 << 16), torch.float32, True)
    place = fresh_rows(like, 16, True).data_ptr()
    assert fresh_rows(like, 16, True).data_ptr() == place


def test_what_lies_ready_is_no_more_than_one_call_has_asked_for():
    code = """
import psutil, torch
from ruda_ds.ops.rows import fresh_rows, is_compiled
like = torch.zeros(1, 1 << 18)
assert is_compiled("cpu", like)
resident = lambda: psutil.Process().memory_info().rss / 2**20
before = resident()
blocks = [fresh_rows(like, 16, True).fill_(1) for _ in range(20)]
assert resident() - before > 19 * 16, resident() - before
del blocks
assert resident() - before < 3 * 16, resident() - before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
