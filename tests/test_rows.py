"""The compiled sums of rows against their compositions in torch, and against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ruda_ds.ops.rows import combine_rows, combine_rows_backward, is_compiled, sum_rows


def problem(tokens, top_k, hidden, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = tokens * top_k + 3  # some rows that no slot names
    rows, gradient = torch.randn(count, hidden, generator=generator), torch.randn(tokens, hidden, generator=generator)
    slots = torch.randperm(count, generator=generator)[: tokens * top_k].view(tokens, top_k)
    return rows.to(dtype), torch.rand(tokens, top_k, generator=generator), slots, gradient.to(dtype)


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
    combined = combine_rows(rows, weights, slots, compiled=True)
    assert combined.dtype == dtype
    assert relative(combined, combine_rows(wide, weights.double(), slots)) <= limit
    found = combine_rows_backward(gradient, rows, weights, slots, compiled=True)
    wanted = combine_rows_backward(wide_gradient, wide, weights.double(), slots)
    named = slots.flatten()
    assert relative(found[0][named], wanted[0][named]) <= limit
    assert relative(found[1], wanted[1]) <= 1e-6 * max(1, hidden)  # cancellation in a dot product


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
                (combine_rows(rows, weights, slots, True), *combine_rows_backward(gradient, rows, weights, slots, True))
            )
    finally:
        torch.set_num_threads(threads)
    named = slots.flatten()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1][named], results[1][1][named])
    assert torch.equal(results[0][2], results[1][2])
    assert torch.equal(combine_rows(rows, weights[37:38], slots[37:38], True), results[0][0][37:38])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_keep_torchs_contract(dtype):
    rows, weights, slots, gradient = problem(9, 3, 24, dtype)
    assert is_compiled("cpu", rows)
    for factors in (weights, None):
        torch.library.opcheck(torch.ops.ruda.combine_rows, (rows, factors, slots))
    every = torch.arange(27).view(9, 3)  # rows that no slot names are not written
    torch.library.opcheck(torch.ops.ruda.combine_rows_backward, (gradient, rows[:27].clone(), weights, every))


def test_what_does_not_fit_is_refused():
    rows, weights, slots, gradient = problem(5, 2, 8, torch.float32)
    assert not is_compiled("reference", rows)
    assert not is_compiled("auto", rows.double())
    with pytest.raises(ValueError, match="expected float32 or bfloat16"):
        combine_rows(rows.double(), weights, slots, compiled=True)
    with pytest.raises(ValueError, match="the gradient is"):
        combine_rows_backward(gradient[:3], rows, weights, slots, compiled=True)
    with pytest.raises(ValueError, match="int64"):
        sum_rows(rows, slots.int(), compiled=True)
    with pytest.raises(IndexError, match="a slot is 13, expected a row of 13"):
        sum_rows(rows, slots.where(slots != 0, 13), compiled=True)
    with pytest.raises(IndexError, match="a slot is -1"):
        sum_rows(rows, slots.where(slots != 0, -1), compiled=True)
