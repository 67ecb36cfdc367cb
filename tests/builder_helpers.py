"""A tiny operator through the same builder, so that a build takes a second, and a compiler that counts its calls.

Run as a command it loads the operator and prints one JSON object: what `load_fused_experts` found, and its warnings.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import warnings
from pathlib import Path

import forked

ROOT = Path(__file__).resolve().parent.parent
BARE = """#include <Python.h>
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)(void) {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, nullptr};
  return PyModule_Create(&definition);
}
"""


def tiny_builder(folder: Path, operators: tuple[str, ...] = ()):
    """A builder of the sources in a folder, which register ``operators``."""
    from ruda_ds.ops.builder import CPUFusedExpertsBuilder

    class TinyBuilder(CPUFusedExpertsBuilder):
        NAME = f"ruda_tiny_{folder.name}"
        OPERATORS = operators
        DURATION = "a second"

        def sources(self):
            return [str(path) for path in sorted(folder.glob("*.cpp"))]

        def include_paths(self):
            return [str(folder)]

    return TinyBuilder()


def executable(path: Path, text: str) -> Path:
    """A shell script."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def counting_compiler(folder: Path, before: str = "") -> Path:
    """A compiler that writes a line for each file that it compiles; ``before``: shell commands before it does."""
    log = folder / "compiled"
    text = f'case "$*" in *" -c "*) echo compiled >> {log}; {before or ":"};; esac\nexec c++ "$@"\n'
    return executable(folder / "cxx-g++", text)


def compiled(folder: Path) -> int:
    """How often the counting compiler compiled."""
    log = folder / "compiled"
    return len(log.read_text().splitlines()) if log.exists() else 0


def command(folder: Path, explicit: bool = False) -> list[str]:
    """The Python program, with its arguments, that loads the operator of a folder in a process of its own."""
    return [__file__, str(folder), "explicit" if explicit else "auto"]


def load(folder: Path, environment: dict[str, str], explicit: bool = False) -> dict:
    """What loading in a process of its own gave: ready, reason, warnings, error; and what it printed."""
    code, said = forked.run(command(folder, explicit), environment, ROOT, 120)
    assert code == 0, said
    printed, _, result = said.rstrip().rpartition("\n")
    return {**json.loads(result), "printed": printed}


def main() -> None:
    """See the top."""
    from ruda_ds.errors import BuildError
    from ruda_ds.ops.builder import load_fused_experts

    result: dict = {"error": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            state = load_fused_experts(sys.argv[2] == "explicit", tiny_builder(Path(sys.argv[1])))
            result |= {"ready": state.ready, "reason": state.reason}
        except BuildError as error:
            result |= {"ready": False, "error": str(error)}
    result["warnings"] = [str(one.message) for one in caught if "ruda_ds" in str(one.message)]
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    main()
