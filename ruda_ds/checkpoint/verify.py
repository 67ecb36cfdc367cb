"""Is a folder whole: checksums, every element there once, shapes, finite values. Opens pickles as `pickles` does.

A check that fails does not end the others: the result is a list of what is wrong, each with the file or parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint import hf
from ruda_ds.checkpoint.from_hf import open_hf
from ruda_ds.checkpoint.manifest import MANIFEST, Manifest, sha256_of
from ruda_ds.checkpoint.recipes import CHUNK, Source
from ruda_ds.checkpoint.reshard_pending import PendingSource
from ruda_ds.checkpoint.source import WEIGHT, TrainingSource
from ruda_ds.checkpoint.weights import DESCRIPTION, WeightsSource
from ruda_ds.checkpoint.writer import LATEST, locate
from ruda_ds.errors import CheckpointError, RudaError
from ruda_ds.shapes import element_count

Advance = Callable[[int], None]


class Verification:
    """The checks of one folder, and what they found.

    Args:
        path: of the folder.
        tag: of a training checkpoint; None: the one that ``latest`` names.
        values: whether every value is looked at; else only what files say of themselves, and checksums.
    """

    def __init__(self, path: Path, tag: str | None = None, values: bool = True) -> None:
        self.path, self.tag, self.values = path, tag, values
        self.problems: list[str] = []
        self.checked: list[str] = []

    def run(self, advance: Advance) -> list[str]:
        """All checks; what is wrong, empty if nothing is. ``advance`` is told bytes as they are read."""
        if (self.path / DESCRIPTION).exists():
            self._weights(advance)
        elif not (self.path / LATEST).exists() and self.tag is None and any(self.path.glob("*.safetensors")):
            self._hf(advance)
        else:
            self._training(advance)
        return self.problems

    def _try(self, what: str, check: Callable[[], Any]) -> Any:
        """The check's result; None, and the problem noted, if it raises."""
        try:
            result = check()
        except (RudaError, OSError) as error:
            self.problems.append(str(error))
            return None
        self.checked.append(what)
        return result

    def _sums(self, folder: Path, files: dict[str, str], advance: Advance) -> None:
        for name, expected in files.items():

            def check(name: str = name, expected: str = expected) -> None:
                found = sha256_of(folder / name)
                advance((folder / name).stat().st_size)
                if found != expected:
                    raise CheckpointError(
                        f"checkpoint {folder / name}: found sha256 {found[:16]}..., expected {expected[:16]}..."
                    )

            self._try(f"checksum of {name}", check)

    def _weights(self, advance: Advance) -> None:
        source = self._try("files, shapes and coverage", lambda: WeightsSource(self.path))
        if source is not None:
            self._sums(self.path, {n: e["sha256"] for n, e in source.description.files.items()}, advance)
            self._finite(source, [(name, WEIGHT) for name in source.shapes()], advance)

    def _hf(self, advance: Advance) -> None:
        opened = self._try("files, shapes and experts", lambda: open_hf(self.path))
        source = opened.source if opened is not None else self._try("headers", lambda: hf.open_folder(self.path))
        if source is not None:
            self._finite(source, [(name, WEIGHT) for name in source.shapes()], advance)

    def _training(self, advance: Advance) -> None:
        folder = self._try("tag", lambda: locate(self.path, self.tag))
        if folder is None:
            return
        if (folder / MANIFEST).exists():
            manifest = self._try("manifest", lambda: Manifest.read(folder))
            if manifest is None or not self._complete(manifest, folder):
                return
            self._sums(folder, {name: entry.sha256 for name, entry in manifest.files.items()}, advance)
        source = self._try("pickles, ranks, shapes and partitions", lambda: TrainingSource(folder))
        if source is None:
            return
        for name in source.known:
            self._try(f"coverage of {name}", partial(source.segments_of, name))
        if source.manifest is not None:
            pending = self._try("pending shards", lambda: PendingSource(source))
            if pending is not None:
                self._finite(pending, [(name, WEIGHT) for name in pending.shapes()], advance, "pending shard of ")
        self._finite(source, list(kinds_of(source)), advance)

    def _complete(self, manifest: Manifest, folder: Path) -> bool:
        before = len(self.problems)
        self._try("presence and sizes of files", lambda: manifest.check_sizes(folder))
        return len(self.problems) == before

    def _finite(self, source: Source, tensors: list[tuple[str, str]], advance: Advance, what: str = "") -> None:
        if not self.values:
            return
        shapes = source.shapes()
        for name, kind in tensors:

            def check(name: str = name, kind: str = kind) -> None:
                for values in _pieces(source, name, element_count(shapes[name]), kind):
                    advance(values.numel() * values.dtype.itemsize)
                    bad = int((~torch.isfinite(values)).sum()) if values.is_floating_point() else 0
                    if bad:
                        raise CheckpointError(
                            f"checkpoint {self.path}: found {bad} values that are not finite in {what}{name} "
                            f"({kind}), expected none"
                        )

            self._try(f"values of {what}{name} ({kind})", check)


def _pieces(source: Any, name: str, count: int, kind: str) -> Iterator[torch.Tensor]:
    for start in range(0, count, CHUNK):
        length = min(CHUNK, count - start)
        values = source.read(name, start, length) if kind == WEIGHT else source.read(name, start, length, kind)
        yield values.float() if values.dtype.itemsize == 1 and values.is_floating_point() else values


def kinds_of(source: TrainingSource) -> Iterator[tuple[str, str]]:
    """(name, kind) of everything that is split over ranks: weights, and the moments of what is trained."""
    for name in source.shapes():
        yield name, WEIGHT
        known = source.known.get(name)
        if known is None or not known.trained or not known.logical.numel:
            continue
        first = source.layout.segments(name)[0]
        flat = source.flat(first.rank)[first.group]
        padded = source.padded(first.rank, first.group)
        entries = source.base_state(first.rank)["state"].get(first.group, {})
        for kind, value in entries.items():
            if getattr(value, "shape", None) in ((flat.numel,), (padded,)):
                yield name, kind


def bytes_to_read(path: Path, tag: str | None, values: bool) -> int:
    """About how many bytes a verification will read: every file once for its checksum, once for its values."""
    folder = path if (path / DESCRIPTION).exists() or not (path / LATEST).exists() else locate(path, tag)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    hashed = (folder / MANIFEST).exists() or (folder / DESCRIPTION).exists()
    return size * (hashed + values)
