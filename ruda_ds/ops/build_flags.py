"""Compiler flags for the CPU and the cards at hand."""

from __future__ import annotations

import os
import platform

import torch

from ruda_ds.errors import BuildError

CXX_FLAGS = ["-O3", "-std=c++20", "-fopenmp", "-Wno-unknown-pragmas"]
# Every name of a level must be there for it to be chosen; the first level that fits is.
CPU_LEVELS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"},
    "avx2": {"avx2", "fma", "f16c"},
    "default": set[str](),
}
# What torch's vector classes ask for.
LEVEL_FLAGS = {
    "avx512": ["-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"],
    "avx2": ["-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"],
    "default": ["-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"],
}
# For a level below the CPU's own: "native" would bring the wider instructions back.
LEVEL_TARGETS = {"avx512": [], "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"], "default": []}
# No --use_fast_math: its exp and division would cost the gates their accuracy. The kernels include no torch header.
NVCC_FLAGS = [
    "-O3",
    "-std=c++17",
    "-lineinfo",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]
OLDEST_ARCH = 80
DEFAULT_ARCHS = ["80", "90a"]


def cpu_level(features: list[str]) -> str:
    """The widest level of which a CPU has every instruction set."""
    return next(level for level, needed in CPU_LEVELS.items() if needed <= set(features))


def cpu_flags(features: list[str]) -> list[str]:
    """Flags for this CPU; RUDA_CPU_LEVEL (avx512, avx2, default) asks for a level that is lower than its own.

    Raises:
        BuildError: RUDA_CPU_LEVEL is unknown, or asks for what this CPU does not have.
    """
    own = cpu_level(features)
    asked = os.environ.get("RUDA_CPU_LEVEL") or own
    if asked not in CPU_LEVELS or not CPU_LEVELS[asked] <= set(features):
        raise BuildError(f"RUDA_CPU_LEVEL is {asked!r}; this CPU has {own!r}, known are {', '.join(CPU_LEVELS)}")
    native = "-mcpu=native" if platform.machine().startswith("ppc") else "-march=native"
    return [*CXX_FLAGS, *([native] if asked == own else LEVEL_TARGETS[asked]), *LEVEL_FLAGS[asked]]


def _arch(major: int, minor: int) -> str:
    # Hopper's own instructions are in "90a" only.
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def cuda_archs() -> list[str]:
    """Architectures to compile for: TORCH_CUDA_ARCH_LIST, else the visible cards, else Ampere and Hopper.

    Raises:
        BuildError: none of those named or visible is sm_80 or newer.
    """
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if listed:
        numbers = [tuple(map(int, entry.removesuffix("+PTX").rstrip("af").split("."))) for entry in listed]
    else:
        numbers = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    if not numbers:
        return DEFAULT_ARCHS
    fitting = sorted({(major, minor) for major, minor in numbers if major * 10 + minor >= OLDEST_ARCH})
    if not fitting:
        found = ", ".join(f"{major}.{minor}" for major, minor in sorted(set(numbers)))
        raise BuildError(f"the CUDA kernels need compute capability 8.0 or newer; found {found}")
    return [_arch(major, minor) for major, minor in fitting]


def gencode(archs: list[str]) -> list[str]:
    """nvcc flags for architectures; all in explicit form, since one such flag makes torch leave its own out."""
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
