"""The rank files of ours for other ranks: pending shards of the window, and the expert layers' tallies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from ruda_ds.checkpoint import hf, rank_files
from ruda_ds.checkpoint.layout import Topology
from ruda_ds.checkpoint.layout_stage12 import Stage12Layout
from ruda_ds.checkpoint.manifest import FileEntry, sha256_of
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.recipes import Part, Recipe, Slice
from ruda_ds.checkpoint.source import TrainingSource
from ruda_ds.checkpoint.writer import sync_file


class Holding(Protocol):
    """Which elements each rank of the target holds."""

    topology: Topology

    def held(self, name: str, rank: int) -> tuple[int, int]:
        """Half-open range of a flattened whole parameter that is in a rank's partition; (n, n) if nothing is."""

    def fragments(self, rank: int) -> Mapping[str, tuple[int, int]] | None:
        """Below ZeRO-3 what a rank's file says of it, see rank_files.py; else None."""


class PendingSource:
    """The pending shards of all ranks as whole tensors of the parameters that the window has touched.

    Args:
        source: the checkpoint; with a manifest.

    Raises:
        CheckpointError: a file that is missing or of another rank or window, a shard that only some owners have, or
            fragments other than those of the flat partitions.
    """

    def __init__(self, source: TrainingSource) -> None:
        self.source = source
        self.metadata: dict[str, str] = {}
        self.parts: dict[str, list[tuple[int, int, hf.Entry]]] = {}
        lacking: dict[str, Path] = {}
        assert source.manifest is not None
        for rank in range(source.world_size):
            path = source.folder / rank_files.pending_name(rank, source.world_size)
            entries, metadata = hf.read_header(path)
            rank_files.check_pending(path, metadata, rank, source.world_size, source.manifest.window)
            self.metadata = metadata
            _check_fragments(source, rank)
            for name in entries:
                if name not in source.known:
                    raise damaged(path, "shards of the model's parameters", name)
            for name, known in source.known.items():
                begin, end = source.held(name, rank)
                if end == begin or not known.trained:
                    continue
                if name not in entries:
                    lacking[name] = path
                    continue
                if entries[name].shape != (end - begin,):
                    raise damaged(path, f"{end - begin} elements of {name}", str(entries[name].shape))
                self.parts.setdefault(name, []).append((begin, end, entries[name]))
        for name in self.parts:
            if name in lacking:
                raise damaged(lacking[name], f"a pending shard of {name}, as other owners have", "none")
            self.parts[name].sort(key=lambda part: part[0])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See Source."""
        return {name: (parts[-1][1],) for name, parts in self.parts.items()}

    def dtype(self, name: str) -> torch.dtype:
        """See Source."""
        return self.parts[name][0][2].dtype

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """See Source."""
        found = []
        for first, last, entry in self.parts[name]:
            begin, end = max(start, first), min(start + count, last)
            if end > begin:
                found.append(hf.SafetensorsSource({name: entry}).read(name, begin - first, end - begin))
        return found[0] if len(found) == 1 else torch.cat(found)


def _check_fragments(source: TrainingSource, rank: int) -> None:
    """Compare what a rank's own file says that it holds with what follows from the flat partitions."""
    if not isinstance(source.layout, Stage12Layout):
        return
    path = source.folder / rank_files.rank_name(rank, source.world_size)
    found = rank_files.read_rank(path, rank, source.world_size)["fragments"] or {}
    for name in source.known:
        wanted = source.layout.fragment(name, rank)
        if tuple(found.get(name, ())) != wanted:
            raise damaged(path, f"the fragment {wanted} of {name}", str(found.get(name)))


def shard(pending: PendingSource, target: Holding, rank: int) -> hf.Shard:
    """A target rank's file of pending shards; shards of nothing are in it under ZeRO-3 alone, as when it is saved."""
    tensors = []
    for name in pending.parts:
        begin, end = target.held(name, rank)
        if end == begin and pending.source.stage < 3:
            continue
        parts = (Part((Slice(name, begin, end - begin),)),) if end > begin else ()
        tensors.append((Recipe(name, (end - begin,), parts), pending.dtype(name)))
    return hf.Shard(rank_files.pending_name(rank, target.topology.world_size), tuple(tensors))


def files(source: TrainingSource, target: Holding) -> list[tuple[str, int, int]]:
    """(name, bytes of tensors, tensors) of the files of pending shards; none without a manifest."""
    if source.manifest is None:
        return []
    pending = PendingSource(source)
    shards = [shard(pending, target, rank) for rank in range(target.topology.world_size)]
    return [(made.name, made.nbytes, len(made.tensors)) for made in shards]


def write(
    folder: Path, source: TrainingSource, target: Holding, advance: Callable[[int], None]
) -> dict[str, FileEntry]:
    """Write the rank files of ours for the target; their sizes and checksums."""
    pending = PendingSource(source)
    tallies = {kind: _sums(source, kind) for kind in rank_files.TALLIES}
    shares = _shares(source)
    paths, world_size = [], target.topology.world_size
    for rank in range(world_size):
        made = shard(pending, target, rank)
        metadata = {**pending.metadata, "rank": str(rank), "world_size": str(world_size)}
        hf.write_shard(folder, made, pending, metadata, advance, allow_empty=True)
        other = folder / rank_files.rank_name(rank, world_size)
        own = {
            kind: sums if rank == 0 else {name: [0] * len(row) for name, row in sums.items()}
            for kind, sums in tallies.items()
        }
        content = {"rng": None, "fragments": target.fragments(rank), "expert_shares": shares, **own}
        rank_files.write_rank(other, rank, world_size, content)
        sync_file(other)
        paths += [folder / made.name, other]
    return {path.name: FileEntry(path.stat().st_size, sha256_of(path)) for path in paths}


def _shares(source: TrainingSource) -> dict[str, list[float] | None]:
    """The first rank's, which every rank has alike."""
    path = source.folder / rank_files.rank_name(0, source.world_size)
    return rank_files.read_rank(path, 0, source.world_size)["expert_shares"] if path.exists() else {}


def _sums(source: TrainingSource, kind: str) -> dict[str, list[Any]]:
    """One of the tallies, by layer, over all ranks."""
    total: dict[str, list[Any]] = {}
    for rank in range(source.world_size):
        path = source.folder / rank_files.rank_name(rank, source.world_size)
        if not path.exists():
            continue
        content: dict[str, Any] = rank_files.read_rank(path, rank, source.world_size)
        for name, row in content[kind].items():
            before = total.get(name, [0] * len(row))
            total[name] = [a + b for a, b in zip(before, row, strict=True)]
    return total
