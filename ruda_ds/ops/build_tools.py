"""What a build needs of the machine, each thing tried before it is relied on."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path


def put_ninja_on_path() -> None:
    """Let torch find the ninja that was installed beside this Python, when the environment is not activated."""
    folder = Path(sys.executable).parent
    if shutil.which("ninja") is None and (folder / "ninja").exists():
        os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{folder}"


def compiler_command() -> list[str]:
    """The C++ compiler that torch will call: CXX, or c++."""
    return shlex.split(os.environ.get("CXX") or "c++")


def _run(command: list[str], text: str = "") -> tuple[int, str]:
    """(exit status, output) of a command; 127 if it cannot be started."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout + done.stderr


def compiler_version() -> str | None:
    """First line of the compiler's version; None if there is none."""
    status, output = _run([*compiler_command(), "--version"])
    return None if status else next(iter(output.splitlines()), "")


def nvcc_path() -> str | None:
    """The nvcc that torch will call; None if there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    nvcc = Path(CUDA_HOME) / "bin" / "nvcc" if CUDA_HOME else None
    return str(nvcc) if nvcc and nvcc.exists() else None


def cuda_release() -> str | None:
    """Version of nvcc, such as "13.0"; None if it is missing or does not run."""
    nvcc = nvcc_path()
    if nvcc is None:
        return None
    status, output = _run([nvcc, "-V"])
    return None if status or "release " not in output else output.split("release ")[1].split(",")[0]


def compiler_problem() -> str | None:
    """Why C++20 cannot be compiled; None if it can."""
    command = compiler_command()
    if shutil.which(command[0]) is None:
        return f"no C++ compiler: {command[0]!r} is not on the PATH (install g++, or set CXX)"
    status, output = _run(
        [*command, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"], "#include <span>\nint main() {}\n"
    )
    if status:
        lines = output.strip().splitlines() or [f"exit status {status}"]
        return f"the C++ compiler {shutil.which(command[0])} does not compile an empty C++20 program: {lines[-1]}"
    return None


def ninja_problem() -> str | None:
    """Why ninja cannot be run; None if it can."""
    put_ninja_on_path()
    status, output = _run(["ninja", "--version"])
    if status == 0:
        return None
    return "ninja is missing (pip install ninja)" if status == 127 else f"ninja does not run: {output.strip()}"


def nvcc_problem() -> str | None:
    """Why CUDA sources cannot be compiled for this torch; None if they can."""
    import torch

    if torch.version.hip is not None:
        return "this is a ROCm build of torch; the CUDA kernels are for NVIDIA cards"
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    release = cuda_release()
    if release is None:
        return f"nvcc is missing (install the CUDA {torch.version.cuda} toolkit, or set CUDA_HOME)"
    if release.split(".")[0] != torch.version.cuda.split(".")[0] and os.environ.get("DS_SKIP_CUDA_CHECK") != "1":
        return f"nvcc is of CUDA {release}, torch of CUDA {torch.version.cuda}; the major versions must agree"
    return None
