"""Weights split by owner, without any training state: what ``ruda-convert from-hf`` writes and ``to-hf`` takes back.

    OUT/ruda_weights.json                                what is in it; written last
    OUT/ruda_dense[-NNNNN-of-NNNNN].safetensors          every tensor that is not an expert's
    OUT/ruda_experts_RRRRR-of-PPPPP.safetensors          of EP rank R: its experts' cubes; absent if it owns none
    OUT/config.json, tokenizer files                     as they were

Tensors have the names of a model whose blocks `moe.replace_moe_blocks` has replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint.hf import Entry, SafetensorsSource, read_header
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.shapes import element_count

FORMAT, VERSION = "ruda_ds weights", 1
DESCRIPTION = "ruda_weights.json"


def experts_file(rank: int, ep_size: int) -> str:
    """Name of the file of an EP rank's experts."""
    return f"ruda_experts_{rank:05d}-of-{ep_size:05d}.safetensors"


@dataclass(frozen=True)
class Description:
    """The content of ``ruda_weights.json``.

    Attributes:
        ownership: prefix of the experts of every layer.
        layout: of the folder that it was made from.
        experts: names of the cubes, which the files hold in parts.
        files: name -> {"bytes", "sha256"}; every file but this one.
    """

    ownership: tuple[int, ...]
    layout: str
    experts: tuple[str, ...]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def dumps(self) -> str:
        """As JSON text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **vars(self)}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Description:
        """That of a folder.

        Raises:
            CheckpointError: not a valid one, or a file that it names is missing or has another size.
        """
        path = folder / DESCRIPTION
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if (raw["format"], raw["version"]) != (FORMAT, VERSION):
                raise damaged(path, f"{FORMAT!r} version {VERSION}", f"{raw['format']!r} version {raw['version']}")
            made = cls(tuple(raw["ownership"]), raw["layout"], tuple(raw["experts"]), raw["files"])
            sizes = {name: int(entry["bytes"]) for name, entry in made.files.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path, "a description of weights", f"{type(error).__name__}: {error}") from error
        for name, size in sizes.items():
            if "/" in name or not (folder / name).is_file():
                raise damaged(folder / name, f"a file of {size} bytes", "none")
            if (folder / name).stat().st_size != size:
                raise damaged(folder / name, f"{size} bytes", str((folder / name).stat().st_size))
        return made


class WeightsSource:
    """Such a folder as a Source; cubes appear whole, of all experts.

    Args:
        folder: of the weights.

    Raises:
        CheckpointError: files that are missing or damaged, or experts that the ranks do not have all of.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.description = Description.read(folder)
        dense: dict[str, Entry] = {}
        for name in sorted(self.description.files):
            if name.startswith("ruda_dense"):
                dense.update(read_header(folder / name)[0])
        self.dense = SafetensorsSource(dense)
        prefix = self.description.ownership
        self.parts: dict[str, list[tuple[int, int, Entry]]] = {name: [] for name in self.description.experts}
        for rank, (start, stop) in enumerate(pairwise(prefix)):
            if stop > start:
                path = folder / experts_file(rank, len(prefix) - 1)
                self._add(path, read_header(path)[0], start, stop)

    def _add(self, path: Path, entries: Mapping[str, Entry], start: int, stop: int) -> None:
        if set(entries) != set(self.parts):
            raise damaged(path, "the cubes of every layer", ", ".join(sorted(set(entries) ^ set(self.parts))[:8]))
        for name, entry in entries.items():
            known = self.parts[name][0][2].shape[1:] if self.parts[name] else entry.shape[1:]
            if entry.shape[:1] != (stop - start,) or entry.shape[1:] != known:
                raise damaged(path, f"{name} of shape {(stop - start, *known)}", str(entry.shape))
            self.parts[name].append((start, stop, entry))

    @property
    def paths(self) -> set[Path]:
        """The files that they are in."""
        return self.dense.paths | {entry.path for parts in self.parts.values() for _, _, entry in parts}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See Source."""
        cubes = {name: (parts[-1][1], *parts[0][2].shape[1:]) for name, parts in self.parts.items()}
        return self.dense.shapes() | cubes

    def dtype(self, name: str) -> torch.dtype:
        """See Source."""
        return self.parts[name][0][2].dtype if name in self.parts else self.dense.dtype(name)

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """See Source."""
        if name not in self.parts:
            return self.dense.read(name, start, count)
        row = element_count(self.parts[name][0][2].shape[1:])
        found = []
        for first, last, entry in self.parts[name]:
            begin, end = max(start, first * row), min(start + count, last * row)
            if end > begin:
                found.append(SafetensorsSource({name: entry}).read(name, begin - first * row, end - begin))
        return found[0] if len(found) == 1 else torch.cat(found)
