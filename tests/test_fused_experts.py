"""The compiled experts against the float64 reference, and what they promise beside numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ruda_ds.errors import OwnershipError, SecondDerivativeError
from ruda_ds.ops import RowLayout, fused_experts
from ruda_ds.ops.builder import load_fused_experts

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("output", "rows", "gate", "up", "down")
DTYPES = [torch.float32, torch.bfloat16]
# Relative error by norm. Where rows, H or F are few, the roundings to bfloat16 do not average out (pre-activation,
# activation and result are rounded, each to 2^-9), and a sum may nearly cancel: the error is then measured against the
# norm of the same sum of absolute values.
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
FEW = 16
LIMITS_OF_FEW = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}
CASES = [
    ((5, 0, 7), 33, 7),
    ((0, 3, 0), 7, 33),
    ((1,), 1, 1),
    ((0, 0, 90), 1000, 33),
    ((60, 0, 0, 30), 33, 1000),
    ((130, 13), 64, 128),
    ((0, 500, 0), 40, 96),  # one expert has all
    ((2, 1), 1, 1000),
    ((16,) * 8, 256, 128),
    ((7,), 2500, 1300),  # sums longer than one packed panel
    ((2300, 1), 48, 40),
    ((0,), 8, 16),
    ((0, 0), 1, 1),
    ((), 16, 8),
]


@pytest.fixture(autouse=True, scope="module")
def compiled():
    load_fused_experts(explicit=True)


@pytest.fixture
def threads():
    """Set torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make(counts, hidden, inner, dtype, seed=0):
    """([rows, gate, up, down] as leaves, offsets, gradient of the output)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    experts = len(counts)
    tensors = [draw(sum(counts), hidden), *(draw(experts, inner, hidden, scale=hidden**-0.5) for _ in range(2))]
    tensors.append(draw(experts, hidden, inner, scale=inner**-0.5))
    offsets = torch.tensor([0, *counts]).cumsum(0)
    return [tensor.requires_grad_() for tensor in tensors], offsets, draw(sum(counts), hidden)


def compute(tensors, offsets, gradient, backend="cpu", **named):
    """[output, the gradients of all that need one]."""
    output = fused_experts(tensors[0], offsets, *tensors[1:], backend=backend, **named)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, wanted, gradient)]


def exact(tensors, offsets, gradient):
    double = [tensor.detach().double().requires_grad_() for tensor in tensors]
    return compute(double, offsets, gradient.double(), backend="reference")


def assert_close(found, drawn):
    """``found``, the results of compute(*drawn), are those of the reference."""
    tensors, offsets, gradient = drawn
    wanted = exact(*drawn)
    absolute = exact([tensor.detach().abs() for tensor in tensors], offsets, gradient.abs())
    dtype = tensors[0].dtype
    for name, value, right, sizes in zip(NAMES, found, wanted, absolute, strict=True):
        assert value.dtype == dtype
        assert value.shape == right.shape
        few = min(*tensors[0].shape, tensors[1].shape[1]) <= FEW
        limit, norm = (LIMITS_OF_FEW if few else LIMITS)[dtype], (sizes if few else right).norm().item()
        error = (value.double() - right).norm().item()
        assert error <= limit * norm, f"{name}: {error / norm:.2e}"


def assert_same_bits(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("counts", "hidden", "inner"), CASES, ids=str)
def test_output_and_gradients_are_those_of_the_reference(counts, hidden, inner, dtype):
    for seed in range(2):
        drawn = make(counts, hidden, inner, dtype, seed)
        assert_close(compute(*drawn), drawn)


def scattered(count, extra, seed):
    """A layout of ``count`` rows by expert among ``count + extra`` given ones, and as many results."""
    generator = torch.Generator().manual_seed(seed)
    order, places = (torch.randperm(count + extra, generator=generator)[:count] for _ in range(2))
    return RowLayout(order=order, places=places, size=count + extra)


def in_layout(tensors, gradient, layout):
    """Inputs of which ``layout`` makes the given ones; NaN where no row of an expert lies."""
    rows, other = (torch.full((layout.size, tensors[0].shape[1]), torch.nan, dtype=gradient.dtype) for _ in range(2))
    rows[layout.order], other[layout.places] = tensors[0].detach(), gradient
    return [rows.requires_grad_(), *tensors[1:]], other


@pytest.mark.parametrize("backend", ["cpu", "reference", "grouped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_results_may_lie_anywhere(dtype, backend):
    cases = CASES if backend != "grouped" else [((130, 13), 64, 128), ((16,) * 8, 256, 128)]
    for seed, (counts, hidden, inner) in enumerate(cases):
        tensors, offsets, gradient = make(counts, hidden, inner, dtype)
        for extra in (0, 3):
            layout = scattered(sum(counts), extra, seed)
            moved, upstream = in_layout(tensors, gradient, layout)
            found = compute(moved, offsets, upstream, backend, layout=layout)
            for which, index in ((0, layout.places), (1, layout.order)):
                left_over = torch.ones(layout.size, dtype=torch.bool)
                left_over[index] = False
                assert found[which].shape == moved[0].shape
                assert not found[which][left_over].any()
                found[which] = found[which][index]
            assert_same_bits(found, compute(tensors, offsets, gradient, backend))


def test_rows_may_lie_sorted_and_their_results_elsewhere():
    tensors, offsets, _ = make((3, 0, 20), 40, 24, torch.float32)
    layout = RowLayout(order=None, places=torch.arange(23).flip(0) + 1, size=25)
    for backend in ("cpu", "reference"):
        found = fused_experts(tensors[0], offsets, *tensors[1:], backend=backend, layout=layout)
        assert torch.equal(found[1:24].flip(0), fused_experts(tensors[0], offsets, *tensors[1:], backend=backend))
        assert not found[0].any()
        assert not found[24].any()


@pytest.mark.parametrize("which", ["order", "places"])
@pytest.mark.parametrize("wrong", [[0, 1, 1], [0, 1, 3], [0, 1, -1], [0, 1]], ids=str)
def test_a_layout_that_cannot_be_is_refused(which, wrong):
    tensors, offsets, _ = make((2, 1), 8, 16, torch.float32)
    right = {"order": torch.arange(3), "places": torch.arange(3)}
    layout = RowLayout(**right | {which: torch.tensor(wrong)}, size=3)
    with pytest.raises(ValueError, match=r"fused_experts: (order|places|offsets)"):
        fused_experts(tensors[0], offsets, *tensors[1:], backend="cpu", layout=layout)


def test_without_gradients_nothing_is_kept():
    tensors, offsets, _ = make((20, 3), 64, 128, torch.float32)
    with_gradients = fused_experts(tensors[0], offsets, *tensors[1:], backend="cpu")
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        output = fused_experts(tensors[0], offsets, *tensors[1:], backend="cpu")
    assert torch.equal(output, with_gradients)
    events = profile.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert 4 * 23 * 64 in sizes
    assert 4 * 23 * 2 * 128 not in sizes


def address_space():
    """Bytes that this process has mapped."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmSize:\s+(\d+) kB", status).group(1))


def test_large_results_take_memory_that_earlier_ones_gave_back():
    drawn = make((300, 0, 700), 512, 640, torch.float32)
    wanted = [value.clone() for value in compute(*drawn)]
    places = [{value.data_ptr() for value in compute(*drawn)} for _ in range(2)]
    assert places[0] == places[1]
    first, second = compute(*drawn), compute(*drawn)  # both alive
    assert not {value.data_ptr() for value in first} & {value.data_ptr() for value in second}
    assert_same_bits(first, wanted)
    assert_same_bits(second, wanted)
    grown = first[0].resize_(2000, 600)
    assert grown.numel() == 1200000


def test_what_is_kept_of_many_results_is_what_one_pass_needs():
    drawn = make((300, 700), 512, 640, torch.float32)
    results = sum(value.nbytes for value in compute(*drawn))
    before = address_space()
    many = [compute(*drawn) for _ in range(20)]
    assert address_space() - before > 15 * results
    del many
    assert address_space() - before < 4 * results


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 5, 6, 7, 13, 40]), max_size=5),
    hidden=st.integers(1, 150),
    inner=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**30),
)
def test_any_shape(counts, hidden, inner, dtype, seed):
    drawn = make(counts, hidden, inner, dtype, seed)
    assert_close(compute(*drawn), drawn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", ["avx512_bf16", "avx512", "avx2", "portable"])
def test_every_instruction_set_gives_the_same_answer(kernels, dtype):
    best = torch.ops.ruda.cpu_kernels()
    try:
        chosen = torch.ops.ruda.cpu_kernels(kernels)
    except ValueError:
        pytest.skip("not on this CPU")
    try:
        assert chosen == kernels
        for counts, hidden, inner in (((5, 0, 50), 33, 71), ((20, 3), 64, 128), ((9,), 2100, 5)):
            drawn = make(counts, hidden, inner, dtype)
            assert_close(compute(*drawn), drawn)
    finally:
        torch.ops.ruda.cpu_kernels(best)
    with pytest.raises(ValueError, match="cannot run the kernels none"):
        torch.ops.ruda.cpu_kernels("none")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_may_have_any_strides(dtype):
    tensors, offsets, gradient = make((20, 0, 33), 24, 40, dtype)
    strided = [torch.stack([t.detach()] * 2, -1)[..., 0].requires_grad_() for t in tensors]
    strided[3] = tensors[3].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert not any(tensor.is_contiguous() for tensor in strided)
    wanted = compute(tensors, offsets, gradient)
    columns = torch.stack([offsets] * 2, -1)[:, 0]
    assert_same_bits(compute(strided, columns, torch.stack([gradient] * 2, -1)[..., 0]), wanted)
    spread = torch.ones((), dtype=dtype).expand(gradient.shape)  # as sum() gives
    assert_same_bits(compute(tensors, offsets, spread), compute(tensors, offsets, torch.ones_like(gradient)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("counts", "hidden", "inner"), [((5, 0, 7), 33, 7), ((0, 70, 0), 64, 96)], ids=str)
def test_every_element_of_a_result_is_written(counts, hidden, inner, dtype):
    drawn = make(counts, hidden, inner, dtype)
    wanted = compute(*drawn)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
        assert_same_bits(compute(*drawn), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_threads_changes_no_bit(dtype, threads):
    for counts, hidden, inner in (((70, 0, 9, 300), 72, 40), ((4000,), 40, 24), ((40,), 1100, 600)):
        drawn = make(counts, hidden, inner, dtype)
        found = []
        for number in (1, 2, 3, 2):
            threads(number)
            found.append(compute(*drawn))
        for other in found[1:]:
            assert_same_bits(other, found[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_expert_sees_the_others(dtype):
    """Any grouping of experts into calls, hence any ownership, gives the same bits."""
    counts = (1, 0, 7, 130, 16, 5)
    tensors, offsets, gradient = make(counts, 72, 41, dtype)
    whole = compute(tensors, offsets, gradient)
    for first, last in ((0, 1), (1, 2), (2, 4), (3, 4), (1, 6), (5, 6)):
        begin, end = offsets[first].item(), offsets[last].item()
        part = [tensors[0].detach()[begin:end], *(cube.detach()[first:last] for cube in tensors[1:])]
        part = [tensor.clone().requires_grad_() for tensor in part]
        found = compute(part, offsets[first : last + 1] - begin, gradient[begin:end])
        wanted = [*(value[begin:end] for value in whole[:2]), *(value[first:last] for value in whole[2:])]
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_row_sees_the_others(dtype):
    tensors, offsets, gradient = make((140,), 72, 41, dtype)
    whole = compute(tensors, offsets, gradient)
    for begin, end in ((0, 1), (139, 140), (3, 16), (5, 103)):
        rows = tensors[0].detach()[begin:end].clone().requires_grad_()
        found = compute([rows, *tensors[1:]], torch.tensor([0, end - begin]), gradient[begin:end])
        assert_same_bits(found[:2], [value[begin:end] for value in whole[:2]])


def test_a_row_that_is_not_finite_spoils_no_other_row():
    tensors, offsets, gradient = make((20,), 33, 17, torch.float32)
    wanted = compute(tensors, offsets, gradient)[:2]
    rows = tensors[0].detach().clone()
    rows[3], rows[4] = float("nan"), float("inf")
    found = compute([rows.requires_grad_(), *tensors[1:]], offsets, gradient)[:2]
    others = [row for row in range(20) if row not in (3, 4)]
    assert_same_bits([value[others] for value in found], [value[others] for value in wanted])
    assert not found[0][3:5].isfinite().any()


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_gates_far_from_zero(scale):
    tensors, offsets, gradient = make((50, 20), 16, 24, torch.float32)
    with torch.no_grad():
        tensors[0].mul_(scale)
    drawn = (tensors, offsets, gradient)
    assert_close(compute(*drawn), drawn)


@pytest.mark.parametrize("backend", ["cpu", "reference", "grouped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_gradients_are_added_to_buffers(dtype, backend):
    tensors, offsets, gradient = make((20, 0, 33), 24, 40, dtype)
    wanted = exact(tensors, offsets, gradient)
    plain = compute(tensors, offsets, gradient, backend)
    buffers = [torch.full(weight.shape, 0.5) for weight in tensors[1:]]
    for _ in range(2):
        output = fused_experts(tensors[0], offsets, *tensors[1:], backend=backend, weight_gradients=buffers)
        output.backward(gradient)
    assert all(weight.grad is None for weight in tensors[1:])
    for buffer, right in zip(buffers, wanted[2:], strict=True):
        error = (buffer.double() - 0.5 - 2 * right).norm() / (2 * right).norm()
        assert error < LIMITS[dtype] * 4  # a buffer begins with 0.5, and its rounding counts
    mixed = [None, torch.zeros_like(buffers[1]), None]
    output = fused_experts(tensors[0], offsets, *tensors[1:], backend=backend, weight_gradients=mixed)
    found = torch.autograd.grad(output, tensors, gradient, allow_unused=True)
    assert found[2] is None
    assert_same_bits([found[0], found[1], found[3]], [plain[1], plain[2], plain[4]])
    assert torch.equal(mixed[1].to(dtype), plain[3])


def test_a_buffer_gets_float32_sums():
    """Not sums that were rounded to bfloat16 first: its error is that of the operands' rounding, far below 2^-9."""
    tensors, offsets, gradient = make((64,), 32, 16, torch.bfloat16)
    buffers = [torch.zeros(weight.shape) for weight in tensors[1:]]
    fused_experts(tensors[0], offsets, *tensors[1:], backend="cpu", weight_gradients=buffers).backward(gradient)
    plain = compute(tensors, offsets, gradient)[2:]
    assert_same_bits([buffer.bfloat16() for buffer in buffers], plain)
    assert not any(torch.equal(buffer, value.float()) for buffer, value in zip(buffers, plain, strict=True))


@pytest.mark.parametrize("needs", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0), (1, 0, 1, 1)])
def test_only_what_is_asked_for_is_computed(needs):
    counts, hidden, inner = (9, 0, 30), 24, 40
    tensors, offsets, gradient = make(counts, hidden, inner, torch.float32)
    whole = compute(tensors, offsets, gradient)
    for tensor, needed in zip(tensors, needs, strict=True):
        tensor.requires_grad_(bool(needed))
    with FlopCounterMode(display=False) as counter:
        found = compute(tensors, offsets, gradient)
    assert_same_bits(found[1:], [value for value, needed in zip(whole[1:], needs, strict=True) if needed])
    products = 3 + any(needs[:3]) + 2 * needs[0] + sum(needs[1:])
    assert counter.get_total_flops() == products * 2 * sum(counts) * hidden * inner


def test_a_second_derivative_is_refused_by_name():
    tensors, offsets, _ = make((9, 4), 12, 20, torch.float32)
    output = fused_experts(tensors[0], offsets, *tensors[1:], backend="cpu")
    plain = torch.autograd.grad(output.sum(), tensors, retain_graph=True)
    found = torch.autograd.grad(output.sum(), tensors, create_graph=True)
    assert_same_bits([value.detach() for value in found], plain)
    for value in found:
        with pytest.raises(SecondDerivativeError, match="fused_experts"):
            torch.autograd.grad(value.sum(), tensors[0], retain_graph=True)


def saved_bytes(tensors, offsets, **named):
    """Bytes that a forward pass keeps for its backward, beyond its inputs."""
    kept = {}
    inputs = {tensor.data_ptr() for tensor in (*tensors, offsets)}

    def pack(tensor):
        if tensor.data_ptr() not in inputs:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = fused_experts(tensors[0], offsets, *tensors[1:], **named)
    assert output.shape == tensors[0].shape
    return sum(kept.values())


@pytest.mark.parametrize(("inner", "most"), [(64, 2.0), (32, 1.0)])
def test_what_is_saved_for_backward(inner, most):
    tensors, offsets, _ = make((30, 34), 64, inner, torch.bfloat16)
    rows = tensors[0].numel() * tensors[0].element_size()
    assert saved_bytes(tensors, offsets, backend="cpu") == most * rows
    with torch.no_grad():
        assert saved_bytes(tensors, offsets, backend="cpu") == 0
        assert not fused_experts(tensors[0], offsets, *tensors[1:], backend="cpu").requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_checkpointing_changes_no_bit(reentrant, dtype):
    tensors, offsets, gradient = make((20, 0, 33), 24, 40, dtype)
    wanted = compute(tensors, offsets, gradient)

    def layer(rows):
        return fused_experts(rows, offsets, *tensors[1:], backend="cpu")

    output = checkpoint(layer, tensors[0], use_reentrant=reentrant)
    output.backward(gradient)
    assert_same_bits([output.detach(), *(tensor.grad for tensor in tensors)], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operators_keep_torchs_contract(dtype):
    tensors, offsets, gradient = make((20, 0, 33), 24, 40, dtype)
    rows, *weights = (tensor.detach() for tensor in tensors)
    layout = scattered(53, 2, 0)
    placed = (layout.order, layout.places, layout.size)
    moved = torch.zeros(layout.size, 24, dtype=dtype)
    for inputs in ((rows,), (moved, layout.order), (rows, None, layout.places, 55, False)):
        torch.library.opcheck(torch.ops.ruda.fused_experts, (inputs[0], offsets, *weights, *inputs[1:]))
    preactivation = torch.ops.ruda.fused_experts(rows, offsets, *weights)[1]
    saved = (gradient, rows, offsets, *weights, preactivation)
    buffers = [torch.zeros(weight.shape) for weight in weights]
    for needs in ([True] * 4, [True, False, True, False], [False] * 4):
        for chosen in ([None] * 3, buffers, [None, buffers[1], None]):
            torch.library.opcheck(torch.ops.ruda.fused_experts_backward, (*saved, needs, *chosen))
    saved = (torch.zeros_like(moved), moved, *saved[2:])
    torch.library.opcheck(torch.ops.ruda.fused_experts_backward, (*saved, [True] * 4, *buffers, *placed[:2]))


@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_torch_compile_takes_it_in_one_graph(backend):
    def layer(rows, offsets, gate, up, down):
        return fused_experts(rows * 2, offsets, gate, up, down, backend=backend) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for counts in ((20, 0, 33), (7, 8, 9), (0, 1, 50)):  # the later ones with dynamic shapes
        tensors, offsets, gradient = make(counts, 24, 40, torch.float32)
        inputs = (tensors[0], offsets, *tensors[1:])
        found, wanted = compiled(*inputs), layer(*inputs)
        assert_same_bits([found.detach()], [wanted.detach()])
        assert_same_bits(torch.autograd.grad(found, tensors, gradient), torch.autograd.grad(wanted, tensors, gradient))


def test_auto_takes_the_compiled_operator_where_it_fits():
    tensors, offsets, gradient = make((20, 33), 24, 40, torch.float32)
    assert_same_bits(compute(tensors, offsets, gradient, "auto"), compute(tensors, offsets, gradient))
    double = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = compute(double, offsets, gradient.double(), "auto")
    assert_same_bits(found, compute(double, offsets, gradient.double(), "reference"))


def test_what_does_not_belong_together_is_refused():
    (rows, *weights), offsets, _ = make((20, 33), 24, 40, torch.float32)
    with pytest.raises(OwnershipError, match="backend 'cpu' does not take torch.float64 rows on cpu"):
        fused_experts(rows.double(), offsets, *(weight.double() for weight in weights), backend="cpu")
    with pytest.raises(OwnershipError, match="backend 'cuda' does not take torch.float32 rows on cpu"):
        fused_experts(rows, offsets, *weights, backend="cuda")
    with pytest.raises(OwnershipError, match="backend is 'fast'"):
        fused_experts(rows, offsets, *weights, backend="fast")
    for bad in (torch.zeros(2, 40, 24, dtype=torch.float64), torch.zeros(2, 24, 40), torch.zeros(2, 24, 40).mT):
        with pytest.raises(OwnershipError, match="weight_gradients of gate"):
            fused_experts(rows, offsets, *weights, weight_gradients=[bad, None, None])
    with pytest.raises(OwnershipError, match="has 2 entries"):
        fused_experts(rows, offsets, *weights, weight_gradients=[None, None])
    for bounds in ([1, 20, 53], [0, 20, 52], [0, 60, 53]):
        with pytest.raises(ValueError, match="offsets go from"):
            fused_experts(rows, torch.tensor(bounds), *weights, backend="cpu")
    with pytest.raises(ValueError, match="offsets is Int"):
        fused_experts(rows, offsets.int(), *weights, backend="cpu")


WITHOUT_COMPILER = """
import warnings, torch
from ruda_ds.ops import fused_experts
from ruda_ds.errors import BuildError
rows, offsets, weight = torch.randn(5, 8), torch.tensor([0, 5]), torch.randn(1, 8, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        found = fused_experts(rows, offsets, weight, weight, weight)
torch.testing.assert_close(found, fused_experts(rows, offsets, weight, weight, weight, backend="reference"))
print([str(one.message) for one in caught if "ruda_ds" in str(one.message)])
try:
    fused_experts(rows, offsets, weight, weight, weight, backend="cpu")
except BuildError as error:
    print("BuildError:", error)
"""


def test_without_a_compiler_auto_warns_once_and_a_named_backend_raises(tmp_path):
    environment = {**os.environ, "CXX": str(tmp_path / "no-compiler"), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert "BuildError: " in lines[-1]
    assert "no-compiler" in lines[-1]
    assert lines[-2].count("runs without its compiled operator") == 1
