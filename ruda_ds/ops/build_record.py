"""What a binary was built with and from, so that one made elsewhere or by something else is never loaded."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import uuid
from pathlib import Path
from typing import Any

import torch

# Fields whose difference a rebuild of single files mends, and fields that a machine may be without.
SOURCES = "sources"
OPTIONAL = ("compiler", "nvcc")
HEADERS = (".h", ".hpp", ".cuh")


def cpu_features() -> list[str]:
    """Instruction sets of this CPU, sorted; only the architecture where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return [platform.machine(), *sorted(set(values.split()))]
    return [platform.machine(), platform.processor()]


def digests(sources: list[str], include_paths: list[str]) -> dict[str, str]:
    """SHA-256 of every source, and of all headers below the include folders together (key "headers")."""
    found = {os.path.basename(path): hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in sources}
    headers = hashlib.sha256()
    for folder in include_paths:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in HEADERS:
                headers.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return {**found, "headers": headers.hexdigest()}


def collect(name: str, flags: list[str], archs: list[str], tools: dict[str, str | None]) -> dict[str, Any]:
    """The record of a build made here and now, without its sources.

    Args:
        name: the operator.
        flags: compiler flags.
        archs: CUDA architectures ("80", "90a"); empty without CUDA.
        tools: versions of "compiler" and "nvcc"; None for one that is absent.
    """
    return {
        "operator": name,
        "python": sys.implementation.cache_tag,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if archs else None,
        "archs": archs,
        "flags": flags,
        "cpu": cpu_features(),
        **tools,
    }


def key(record: dict[str, Any]) -> str:
    """Ten digits that name the folder of a build: machines that cannot share a binary do not share a folder."""
    kept = {field: value for field, value in record.items() if field not in (*OPTIONAL, SOURCES)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:10]


def _covers(built: list[str], wanted: list[str]) -> bool:
    """Whether code for the built architectures runs on the wanted ones: the same, or an older one of its generation."""
    plain = [int(arch) for arch in built if arch.isdigit()]
    return all(
        arch in built or any(p // 10 == int(arch.rstrip("a")) // 10 and p <= int(arch.rstrip("a")) for p in plain)
        for arch in wanted
    )


def difference(built: dict[str, Any] | None, wanted: dict[str, Any]) -> str | None:
    """Why a binary with one record must not be used where another is wanted; None if it may."""
    if built is None:
        return "it has no build record"
    for field, value in wanted.items():
        found = built.get(field)
        if found == value or (field in OPTIONAL and value is None):
            continue
        if field == "archs" and found and _covers(found, value):
            continue
        if field == "cpu" and isinstance(found, list):
            missing, added = sorted(set(found) - set(value)), sorted(set(value) - set(found))
            return f"it was built on another kind of CPU (only there: {_some(missing)}; only here: {_some(added)})"
        if field == SOURCES:
            changed = sorted(name for name, digest in value.items() if (found or {}).get(name) != digest)
            return f"its sources have changed ({_some(changed or ['a file was removed'])})"
        return f"its {field} is {_short(found)}, here it is {_short(value)}"
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (" ..." if len(names) > 6 else "") if names else "nothing"


def _short(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def read(path: Path) -> dict[str, Any] | None:
    """A record; None if there is none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record whole or not at all."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    draft.write_text(json.dumps(record, indent=1))
    os.replace(draft, path)
