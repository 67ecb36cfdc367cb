"""The CUDA kernels without a card.

They compile without spills, their schedule is right, and they compute the right thing under an emulator of a card's
threads, copies and matrix instructions. Nothing here says that they run on a card.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from cuda_helpers import CSRC, EMULATOR, INT64, ROOT, TYPES, Emulated, compile_library, pointer, spills
from hypothesis import example, given
from hypothesis import strategies as st

from ruda_ds.ops import self_check

KERNELS = sorted((CSRC / "cuda").glob("*.cu"))
CUDA_HEADERS = Path("/usr/local/cuda/include")


FAULTS = {
    "a wait that is one group short": ("mma_kernel.cuh", "await_copies<kStages - 2>()", "await_copies<kStages - 1>()"),
    "no barrier before a tile is read": ("mma_kernel.cuh", "    sync_threads();  // this", "    // this"),
}


@pytest.fixture(scope="module")
def compiling(tmp_path_factory):
    """Name -> the future of what is compiled, two at a time, while other tests run; the kernels by architecture."""
    folder, jobs = tmp_path_factory.mktemp("compiled"), {}
    with ThreadPoolExecutor(2) as pool:
        jobs["emulator"] = pool.submit(compile_library, EMULATOR / "kernels.cpp", folder / "kernels.so")
        for place, fault in enumerate(FAULTS):
            jobs[fault] = pool.submit(compile_with_a_fault, folder / str(place), *FAULTS[fault])
        if shutil.which("nvcc"):
            for path, arch in product(KERNELS, ("80", "90a")):
                jobs[path, arch] = pool.submit(spills, path, folder / f"{path.stem}_{arch}.o", arch)
        if (CUDA_HEADERS / "cuda_runtime_api.h").exists():
            jobs["glue"] = pool.submit(compile_glue)
        yield jobs


def compile_with_a_fault(folder: Path, name: str, right: str, wrong: str):
    """The emulated kernels, with a change in one header."""
    copy = folder / "csrc"
    shutil.copytree(CSRC, copy)
    text = (copy / "cuda" / name).read_text()
    assert text.count(right) == 1
    (copy / "cuda" / name).write_text(text.replace(right, wrong))
    return compile_library(EMULATOR / "kernels.cpp", folder / "kernels.so", copy)


def compile_glue() -> subprocess.CompletedProcess:
    torch_headers = Path(torch.__file__).parent / "include"
    folders = [CSRC, torch_headers, CUDA_HEADERS]
    if not (torch_headers / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h").exists():
        folders.append(ROOT / "tests" / "gpu" / "headers")  # a wheel without CUDA
    command = ["c++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wno-unknown-pragmas"]
    command += [f"-isystem{folder}" if folder == torch_headers else f"-I{folder}" for folder in folders]
    return subprocess.run([*command, str(CSRC / "cuda" / "glue.cpp")], capture_output=True, text=True, timeout=300)


def test_nothing_waits_for_the_card_or_knows_torch():
    for path in (CSRC / "cuda").iterdir():
        text = re.sub(r"//.*", "", path.read_text())
        assert not re.search(r"Synchronize|\.item\(|cudaMemcpy", text), path.name
        if path.name != "glue.cpp":
            assert not re.search(r"#include <(torch|ATen|c10)", text), path.name


# --- schedule -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    library = compile_library(ROOT / "tests" / "gpu" / "schedule.cpp", tmp_path_factory.mktemp("common") / "common.so")
    library.ruda_tile_bound.restype = INT64
    return library


def tiles_in_python(counts: list[int], tile_rows: int) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of every tile."""
    offsets = [sum(counts[:expert]) for expert in range(len(counts) + 1)]
    return [
        (expert, begin, min(begin + tile_rows, end))
        for expert, (start, end) in enumerate(pairwise(offsets))
        for begin in range(start, end, tile_rows)
    ]


@given(st.lists(st.one_of(st.just(0), st.integers(0, 300)), max_size=40), st.sampled_from([1, 32, 128]))
@example([], 128)
@example([0], 128)
@example([0, 0, 128, 0, 129, 0], 128)
@example([5000] + [0] * 30 + [1] * 9, 32)
def test_the_schedule_is_that_of_the_python_model(common, counts, tile_rows):
    offsets = torch.tensor([0, *counts]).cumsum(0)
    starts = torch.full((len(counts) + 1,), -1, dtype=torch.int32)
    common.ruda_fill_starts(pointer(offsets), len(counts), INT64(tile_rows), pointer(starts))
    wanted = tiles_in_python(counts, tile_rows)
    assert starts.tolist() == [sum(e < expert for e, _, _ in wanted) for expert in range(len(counts) + 1)]
    bound = common.ruda_tile_bound(INT64(sum(counts)), INT64(len(counts)), INT64(tile_rows))
    assert len(wanted) <= bound
    found = torch.zeros(3, dtype=torch.int64)
    for tile in range(bound + 2):
        common.ruda_locate(
            pointer(offsets), pointer(starts), len(counts), INT64(tile_rows), INT64(tile), pointer(found)
        )
        assert tuple(found.tolist()) == (wanted[tile] if tile < len(wanted) else (-1, 0, 0))


@given(st.integers(0, 9), st.integers(0, 4), st.integers(1, 4))
def test_the_bound_on_tiles_is_reached(common, rows, experts, tile_rows):
    if experts == 0:
        rows = 0
    splits = [c for c in product(range(rows + 1), repeat=experts) if sum(c) == rows]
    most = max((len(tiles_in_python(list(counts), tile_rows)) for counts in splits), default=0)
    assert common.ruda_tile_bound(INT64(rows), INT64(experts), INT64(tile_rows)) == most


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
def test_the_order_of_tiles_visits_each_once_band_by_band(common, row_tiles, column_tiles, band):
    found = torch.zeros(2, dtype=torch.int64)
    visited = []
    for index in range(row_tiles * column_tiles):
        common.ruda_place(INT64(index), INT64(row_tiles), INT64(column_tiles), INT64(band), pointer(found))
        visited.append(tuple(found.tolist()))
    assert sorted(visited) == list(product(range(row_tiles), range(column_tiles)))
    bands = [row // band for row, _ in visited]
    assert bands == sorted(bands)


def test_the_layouts_give_every_chunk_a_place_of_its_own(common):
    for width in (32, 128):
        places = {common.ruda_k_major(row, chunk) for row in range(width) for chunk in range(4)}
        assert places == set(range(0, width * 32, 8))
    places = {common.ruda_mn_major(k, chunk, 128) for k in range(32) for chunk in range(16)}
    assert places == set(range(0, 32 * 128, 8))


@pytest.mark.parametrize("width", [16, 64])
def test_gate_and_up_columns_alternate_and_each_occurs_once(common, width):
    found = torch.zeros(2, dtype=torch.int32)
    pairs = []
    for j in range(128):
        common.ruda_pair_column(j, width, pointer(found))
        pairs.append(tuple(found.tolist()))
    assert sorted(pairs) == list(product((0, 1), range(64)))


# --- kernels under the emulator -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulated(compiling):
    return compiling["emulator"].result()


CASES = [
    # counts, H, F, rows of a tile (None: the launcher's choice)
    ((40, 0, 15), 40, 72, None),
    ((40, 0, 150), 40, 72, 128),
    ((0, 257), 136, 72, None),
    ((0, 0, 3, 1, 0), 33, 7, None),
    ((1,), 1, 1, None),
    ((9, 3), 8, 264, 32),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("counts", "hidden", "inner", "tile_rows"), CASES)
def test_the_kernels_are_right_under_the_emulator(emulated, dtype, counts, hidden, inner, tile_rows):
    if dtype == torch.float32:
        tile_rows = None
    case = Emulated(emulated, counts, hidden, inner, dtype, tile_rows)
    found = case.run([None, None, None])
    errors = case.errors(found)
    assert len(errors) == 5
    # The error of a single value is not averaged over others.
    limit = self_check.LIMITS[dtype] * (2 if hidden * inner == 1 else 1)
    assert max(errors.values()) <= limit, errors
    assert emulated.ruda_conflicts() == 0


def test_no_access_goes_past_the_end_of_a_tensor(emulated):
    command = [sys.executable, str(ROOT / "tests" / "cuda_helpers.py"), emulated._name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr or f"signal {-done.returncode}"
    assert done.stdout.strip() == "stayed inside"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_weight_gradients_are_added_to_float32_buffers(emulated, dtype):
    case = Emulated(emulated, (40, 0, 15), 40, 72, dtype)
    plain = [torch.zeros(weight.shape) for weight in case.tensors[1:]]
    case.run(plain)
    for buffers in ([torch.ones(w.shape) for w in case.tensors[1:]], [None, torch.ones(plain[1].shape), None]):
        given = [buffer is not None for buffer in buffers]
        case.run(buffers)
        for buffer, exact in ((b, p) for b, p, there in zip(buffers, plain, given, strict=True) if there):
            assert torch.equal(buffer, 1 + exact)
    assert max(case.errors(dict(zip(("gate", "up", "down"), plain, strict=True))).values()) < 4e-3


@pytest.mark.parametrize("wanted", ["gate", "up"])
def test_one_of_gate_and_up_alone_gets_the_same_gradient(emulated, wanted):
    case = Emulated(emulated, (40, 0, 15), 40, 72, torch.bfloat16)
    rows = case.tensors[0]
    inner_gradient = torch.randn(55, 144).bfloat16()
    both = [torch.full(case.tensors[1].shape, torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    case.call("gate_up_gradient", inner_gradient, rows, None, both[0], None, both[1])
    alone = torch.full_like(both[0], torch.nan)
    pair = (alone, None) if wanted == "gate" else (None, alone)
    case.call("gate_up_gradient", inner_gradient, rows, None, pair[0], None, pair[1])
    assert torch.equal(alone, both[wanted == "up"])


@pytest.mark.parametrize("counts", [(), (0,), (0, 0)])
def test_no_rows_and_no_experts(emulated, counts):
    case = Emulated(emulated, counts, 8, 16, torch.bfloat16)
    found = case.run([None, None, None])
    assert found["output"].shape == (0, 8)
    assert all(not found[name].any() for name in ("gate", "up", "down"))


def test_the_schedule_kernel_counts_more_experts_than_a_block_has_threads(emulated):
    counts = [(expert * 7919) % 300 if expert % 3 else 0 for expert in range(700)]
    case = Emulated(emulated, counts, 1, 1, torch.bfloat16)
    case.call("plan")
    tiles = torch.tensor([-(-count // 32) for count in counts]).cumsum(0)
    assert case.starts.tolist() == [0, *tiles.tolist()]


def test_results_do_not_depend_on_the_order_of_threads(emulated):
    case = Emulated(emulated, (40, 0, 15), 40, 72, torch.bfloat16)
    first = case.run([None] * 3)
    emulated.ruda_seed(12345)
    again = case.run([None] * 3)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("elements", [0, 1, 77, 4096])
def test_swiglu_alone(emulated, dtype, elements):
    kind, generator = TYPES[dtype], torch.Generator().manual_seed(3)
    gate, up, gradient = (torch.randn(elements, generator=generator).to(dtype) for _ in range(3))
    value, again, gates, ups = (torch.full((elements,), torch.nan, dtype=dtype) for _ in range(4))
    assert emulated.ruda_swiglu(kind, *map(pointer, (gate, up, value)), INT64(elements)) == 0
    tensors = (gradient, gate, up, gates, ups, again)
    assert emulated.ruda_swiglu_gradient(kind, *map(pointer, tensors), INT64(elements)) == 0
    exact = [tensor.double().requires_grad_() for tensor in (gate, up)]
    wanted = torch.nn.functional.silu(exact[0]) * exact[1]
    wanted.backward(gradient.double())
    assert torch.equal(value, again)
    for found, right in ((value, wanted.detach()), (gates, exact[0].grad), (ups, exact[1].grad)):
        assert self_check.relative_error(found, right) <= self_check.LIMITS[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees_a_fault(compiling, fault):
    case = Emulated(compiling[fault].result(), (40, 0, 15), 136, 72, torch.bfloat16)
    assert max(case.errors(case.run([None] * 3)).values()) > self_check.LIMITS[torch.bfloat16]


# --- what the CUDA toolkit says: last, for it takes longest ---------------------------------------------------------


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_kernels_compile_and_spill_nothing(compiling):
    found = {job: compiling[job].result() for job in product(KERNELS, ("80", "90a"))}
    assert found
    assert not any(found.values()), found


@pytest.mark.skipif(not (CUDA_HEADERS / "cuda_runtime_api.h").exists(), reason="no headers of the CUDA runtime")
def test_the_glue_compiles(compiling):
    done = compiling["glue"].result()
    assert done.returncode == 0, done.stderr
    assert "glue.cpp" not in done.stderr
