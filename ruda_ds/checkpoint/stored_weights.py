"""The model's own weights below ZeRO-3, in their storage dtype: rank 0's module, and experts that are split.

DeepSpeed writes the module of rank 0 for all. Experts that are a rank's own lie in files of ours, see
[Note: a tag on disk] in manifest.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint import hf, rank_files
from ruda_ds.checkpoint.layout import Logical, Topology
from ruda_ds.checkpoint.pickles import StoredTensor
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.shapes import element_count


class StoredWeights:
    """Whole weights that are read by range; a Source.

    Args:
        folder: of a tag.
        model: the model's file of rank 0, for what errors say.
        module: its "module": name -> StoredTensor.
        topology: of the checkpoint.
        parameters: by name.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        module: Mapping[str, Any],
        topology: Topology,
        parameters: Mapping[str, Logical],
    ) -> None:
        self.folder, self.model, self.module = folder, model, module
        self.topology, self.parameters = topology, parameters
        self._files: list[dict[str, hf.Entry]] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See Source."""
        return {name: logical.shape for name, logical in self.parameters.items()}

    def dtype(self, name: str) -> torch.dtype:
        """See Source."""
        if self.topology.is_split(self.parameters[name]):
            return self._parts(name)[0][2].dtype
        return self._stored(name).dtype

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """See Source."""
        if not self.topology.is_split(self.parameters[name]):
            return self._stored(name).read(start, count)
        found = []
        for first, last, entry in self._parts(name):
            begin, end = max(start, first), min(start + count, last)
            if end > begin:
                found.append(hf.SafetensorsSource({name: entry}).read(name, begin - first, end - begin))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _stored(self, name: str) -> StoredTensor:
        stored = self.module.get(name)
        wanted = self.parameters[name].numel
        if not isinstance(stored, StoredTensor) or stored.numel != wanted:
            found = f"{stored.numel}" if isinstance(stored, StoredTensor) else "nothing"
            raise damaged(self.model, f"{wanted} elements of {name} in the module", found)
        return stored

    def _parts(self, name: str) -> list[tuple[int, int, hf.Entry]]:
        """(first element of the whole, last, where) of a parameter that is split, owner by owner."""
        logical, world = self.parameters[name], self.topology.world_size
        if self._files is None:
            paths = [self.folder / rank_files.experts_name(p, world) for p in range(self.topology.ep_size)]
            self._files = [hf.read_header(path)[0] for path in paths]
        row, found = element_count(logical.shape[1:]), []
        for owner, entries in enumerate(self._files):
            start, stop = self.topology.owned(logical, owner)
            if stop == start:
                continue
            path, shape = self.folder / rank_files.experts_name(owner, world), (stop - start, *logical.shape[1:])
            if name not in entries or entries[name].shape != shape:
                have = entries[name].shape if name in entries else "nothing"
                raise damaged(path, f"{name} of {shape}", str(have))
            found.append((start * row, stop * row, entries[name]))
        return found
