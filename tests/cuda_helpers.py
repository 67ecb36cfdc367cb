"""The CUDA sources compiled for the CPU: the scheduling code as it is, the kernels under an emulator of a card."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ruda_ds.ops import build_flags, self_check

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "ruda_ds" / "ops" / "csrc"
EMULATOR = ROOT / "tests" / "gpu" / "emulator"
TYPES = {torch.float32: 0, torch.bfloat16: 1}
# Cases that end in the middle of a tile in every direction: (rows of each expert, H, F, rows of a tile).
GUARDED = [((0, 35), 40, 72, None), ((40, 97), 40, 24, 128), ((3, 5), 33, 7, None)]
INT64, INT, POINTER = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p


def compile_library(source: Path, target: Path, csrc: Path = CSRC) -> ctypes.CDLL:
    """A C++ file of tests/gpu as a loaded library."""
    folders = [f"-I{folder}" for folder in (csrc, csrc / "cuda", EMULATOR)]
    flags = ["-std=c++17", "-O2", "-DRUDA_EMULATE", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-shared", "-fPIC"]
    done = subprocess.run(["c++", *flags, *folders, str(source), "-o", str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


def spills(source: Path, target: Path, arch: str) -> list[str]:
    """Compiles a .cu file for an architecture; the kernels that spill registers or use a stack, with the reason."""
    command = ["nvcc", "-c", *build_flags.NVCC_FLAGS, *build_flags.gencode([arch]), "-Xptxas", "-v", f"-I{CSRC}"]
    done = subprocess.run([*command, str(source), "-o", str(target)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    kernel, found, seen = "", [], set()
    for line in done.stderr.splitlines():
        if "Compiling entry function" in line:
            kernel, _, name = line.split("'")[1:4]
            seen.add(name)
        if "stack frame" in line and set(re.findall(r"(\d+) bytes", line)) != {"0"}:
            found.append(f"{kernel}: {line.strip()}")
    assert seen == {f"sm_{arch}"}, done.stderr
    return found


class Plain(ctypes.Structure):
    """`Plain` of tests/gpu/emulator/kernels.cpp."""

    _fields_ = (
        ("type", INT),
        ("rows", INT64),
        ("experts", INT),
        ("hidden", INT64),
        ("inner", INT64),
        ("offsets", POINTER),
        ("starts", POINTER),
        ("tile_rows", INT64),
        ("vector", INT),
    )


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """A tensor's address; null for none."""
    return POINTER(None if tensor is None else tensor.data_ptr())


def at_the_end_of_a_page(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last one before a page that may not be touched; it is never given back."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return tensor
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(POINTER(begin + room), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    placed = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=room - size).view(tensor.shape)
    return placed.copy_(tensor)


class Emulated:
    """The launchers on CPU tensors, in the order in which glue.cpp calls them.

    Args:
        tile_rows, vector: as glue.cpp would choose them, unless given.
        place: moves every tensor to where it is to lie.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        counts: tuple[int, ...],
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        tile_rows: int | None = None,
        vector: bool | None = None,
        place: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self.library, self.dtype, self.place = library, dtype, place
        drawn, offsets, gradient = self_check._inputs(counts, hidden, inner, dtype, torch.device("cpu"))
        self.tensors, self.offsets, self.gradient = list(map(place, drawn)), place(offsets), place(gradient)
        self.sizes = (sum(counts), len(counts), hidden, inner)
        chunk = 16 // dtype.itemsize
        self.vector = hidden % chunk == 0 and inner % chunk == 0 if vector is None else vector
        library.ruda_rows_of_a_tile.restype = INT64
        chosen = library.ruda_rows_of_a_tile(TYPES[dtype], INT64(sum(counts)), len(counts), int(self.vector))
        self.starts = place(torch.full((len(counts) + 1,), -7, dtype=torch.int32))
        places = (self.offsets.data_ptr(), self.starts.data_ptr())
        sizes = (TYPES[dtype], *self.sizes)
        self.plain = Plain(*sizes, *places, tile_rows or chosen, int(self.vector))

    def poisoned(self, *shape: int) -> torch.Tensor:
        """NaN everywhere."""
        return self.place(torch.full(shape, torch.nan, dtype=self.dtype))

    def call(self, name: str, *arguments: torch.Tensor | None) -> None:
        """One launcher; its error is one of the emulator's (what it is stands on standard error)."""
        status = getattr(self.library, f"ruda_{name}")(ctypes.byref(self.plain), *map(pointer, arguments))
        assert status == 0, f"{name} failed under the emulator"

    def run(self, buffers: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Output and gradients; weight gradients are added to the buffers where these are given."""
        rows, gate, up, down = self.tensors
        count, _, hidden, inner = self.sizes
        preactivation, product, output = (self.poisoned(count, width) for width in (2 * inner, inner, hidden))
        self.call("plan")
        self.call("gate_up", rows, gate, up, preactivation, product)
        self.call("down", product, down, output)
        inner_gradient, product, rows_gradient = (self.poisoned(count, width) for width in (2 * inner, inner, hidden))
        made = [
            self.poisoned(*weight.shape) if b is None else None
            for weight, b in zip((gate, up, down), buffers, strict=True)
        ]
        self.call("hidden_gradient", self.gradient, down, preactivation, inner_gradient, product)
        self.call("rows_gradient", inner_gradient, gate, up, rows_gradient)
        self.call("gate_up_gradient", inner_gradient, rows, buffers[0], made[0], buffers[1], made[1])
        self.call("down_gradient", self.gradient, product, buffers[2], made[2])
        found = {"output": output, "rows": rows_gradient}
        return found | dict(zip(("gate", "up", "down"), made, strict=True))

    def errors(self, found: dict[str, torch.Tensor | None]) -> dict[str, float]:
        """Relative errors against float64."""
        output, gradients = self_check._wanted(self.tensors, self.offsets, self.gradient)
        wanted = {"output": output, **dict(zip(self_check.NAMES, gradients, strict=True))}
        return {n: self_check.relative_error(t, wanted[n]) for n, t in found.items() if t is not None}


def main() -> None:
    """With a compiled library as argument: runs cases in guarded memory; a step outside ends the process."""
    for dtype in (torch.float32, torch.bfloat16):
        for counts, hidden, inner, tile_rows in GUARDED:
            rows = tile_rows if dtype == torch.bfloat16 else None
            case = Emulated(ctypes.CDLL(sys.argv[1]), counts, hidden, inner, dtype, rows, place=at_the_end_of_a_page)
            buffers = [at_the_end_of_a_page(torch.zeros(weight.shape)) for weight in case.tensors[1:]]
            for given in ([None] * 3, buffers):
                errors = case.errors(case.run(given))
                assert max(errors.values()) <= self_check.LIMITS[dtype], errors
    print("stayed inside")


if __name__ == "__main__":
    main()
