"""The folder of a build at first use: what may stay in it, what comes out of it, and what its errors mean."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ruda_ds.ops import build_record
from ruda_ds.ops.build_lock import say


def import_binary(binary: Path) -> Any:
    """The module in a binary; None, with a word of why, if it does not load."""
    try:
        spec = importlib.util.spec_from_file_location(binary.stem, binary)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        say(f"not using {binary}: {error}")
        return None
    return module


def clean(folder: Path, record: dict[str, Any]) -> None:
    """Remove what a build must not reuse: all of it, or the objects of changed sources.

    ninja goes by time stamps and commands; a package installed over another has older stamps, and another compiler
    the same command.
    """
    for stale in ("record.json", "failed.json"):
        (folder / stale).unlink(missing_ok=True)
    # Only the holder of our lock builds here, so torch's own lock in this folder is a killed build's.
    if (folder / "lock").exists():
        say(f"removed {folder / 'lock'}: left by a build that was killed")
        (folder / "lock").unlink()
    built = build_record.read(folder / "building.json") or {}
    old, new = built.get(build_record.SOURCES, {}), record[build_record.SOURCES]
    same = {**built, build_record.SOURCES: None} == {**record, build_record.SOURCES: None}
    keep_objects = same and old.get("headers") == new["headers"]
    for path in folder.glob("*"):
        sources = [name for name in new if Path(name).stem == path.name.split(".")[0]]
        unchanged = keep_objects and sources and all(old.get(name) == new[name] for name in sources)
        if path.suffix == ".so" or (path.suffix == ".o" and not unchanged):
            path.unlink()


def first_error(error: BaseException, folder: Path) -> str:
    """The first line of a compiler's output that says what is wrong, and where all of it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    log = folder / "build.log"
    log.write_text(str(error))
    told = next((line for line in lines if "error:" in line or "fatal" in line or "not found" in line), lines[-1:])
    return f"{told if isinstance(told, str) else ''.join(told)} (all of it: {log})"
