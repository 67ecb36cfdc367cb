"""A ZeRO checkpoint for other ranks: parameters, moments, scheduler, frozen parameters and the pending window.

Which element goes where follows from two layouts, that of the source and that of the target; files are then written
one after another, each flat tensor in pieces that are read where they lie. Counters and whatever else is not split are
copied after all ranks have been found to say the same. The ZeRO stage stays what it was: DeepSpeed's own files are made
by reshard_stage3.py or reshard_stage12.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from ruda_ds.checkpoint import hf, reshard_pending
from ruda_ds.checkpoint.journal import Identity, identity_of
from ruda_ds.checkpoint.layout import Topology
from ruda_ds.checkpoint.manifest import FileEntry
from ruda_ds.checkpoint.parallel import in_parallel, one_at_a_time
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.reshard_stage3 import Stage3Target
from ruda_ds.checkpoint.reshard_stage12 import Stage12Target
from ruda_ds.checkpoint.reshard_values import Advance, TargetFile
from ruda_ds.checkpoint.resume import Growing, Note, growing, silent
from ruda_ds.checkpoint.source import TrainingSource
from ruda_ds.checkpoint.writer import LATEST, locate
from ruda_ds.errors import OwnershipError
from ruda_ds.moe.ownership import ownership_of


class Target(reshard_pending.Holding, Protocol):
    """DeepSpeed's part of the target; see Stage3Target and Stage12Target."""

    groups: tuple[tuple[str, ...], ...]
    differing: list[str]

    def files(self) -> list[TargetFile]:
        """All of DeepSpeed's files, and ours that hold weights."""


@dataclass(frozen=True)
class Reshard:
    """A conversion that has been checked and not yet run.

    Attributes:
        source: the checkpoint.
        target: what DeepSpeed's files will hold.
        notes: what the user should know.
    """

    source: TrainingSource
    target: Target
    notes: list[str] = field(default_factory=list)

    @property
    def topology(self) -> Topology:
        """Of the target."""
        return self.target.topology

    @cached_property
    def _states(self) -> list[TargetFile]:
        return self.target.files()

    def files(self) -> list[tuple[str, int, int]]:
        """(name, bytes of tensors, tensors) of what will be written."""
        return self._files

    @cached_property
    def _files(self) -> list[tuple[str, int, int]]:
        made = [(file.name, file.nbytes, file.tensors) for file in self._states]
        return made + reshard_pending.files(self.source, self.target)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that will be written."""
        return sum(nbytes for _, nbytes, _ in self.files())

    def run(self, target: Path, advance: Advance, note: Note = silent) -> None:
        """Write the folder, or what an interrupted run has left to be written.

        Args:
            advance: told bytes as they are written, or taken over.
            note: told what is taken over, or why it is not.

        Raises:
            CheckpointError: the target is there already, or a source file is damaged; nothing is left then.
            UnfinishedError: see `resume.growing`.
        """
        tag, root = self.source.folder.name, self.source.folder.parent
        with growing(target, self._identity(), len(self._states), note) as result:
            folder = result.folder
            (folder / tag).mkdir(exist_ok=True)
            entries = self._write_states(result, one_at_a_time(advance))
            if self.source.manifest is not None:
                entries |= reshard_pending.write(folder / tag, self.source, self.target, advance)
                replace(
                    self.source.manifest,
                    tag=tag,
                    world_size=self.topology.world_size,
                    groups=self.target.groups,
                    experts=self._experts(),
                    files=dict(sorted(entries.items())),
                ).write(folder / tag)
            for script in root.glob("zero_to_*.py"):
                shutil.copy(script, folder / script.name)
            hf.copy_side_files(root, folder)
            hf.write_text(folder / LATEST, tag, end="")

    def _identity(self) -> Identity:
        plan = {
            "tag": self.source.folder.name,
            "world": self.topology.world_size,
            "ep_size": self.topology.ep_size,
            "ownership": {layer: list(prefix) for layer, prefix in sorted(self.topology.ownership.items())},
        }
        return identity_of("reshard", plan, filter(Path.is_file, self.source.folder.iterdir()))

    def _write_states(self, result: Growing, advance: Advance) -> dict[str, FileEntry]:
        tag = self.source.folder.name

        def write(file: TargetFile) -> FileEntry:
            name = f"{tag}/{file.name}"
            if name in result.complete:
                advance(file.nbytes)
                return FileEntry(**result.complete[name])
            entry = file.write(result.folder / tag, advance)
            result.add(name, entry.sha256)
            return entry

        files = sorted(self._states, key=lambda file: -file.nbytes)  # the longest begins first
        entries = in_parallel([partial(write, file) for file in files])
        return {file.name: entry for file, entry in zip(files, entries, strict=True)}

    def _experts(self) -> Any:
        entry = self.source.manifest.experts if self.source.manifest else None
        if entry is None:
            return None
        return replace(entry, ep_size=self.topology.ep_size, ownership=dict(self.topology.ownership))


# --- planning -------------------------------------------------------------------------------------------------------


def plan_reshard(
    path: Path,
    world_size: int,
    ep_size: int = 1,
    ownership: str | list[int] | None = None,
    tag: str | None = None,
) -> Reshard:
    """Say what is to be written for another topology, and check that the source has all of it.

    Args:
        path: folder of tags.
        world_size: ranks of the target.
        ep_size: of its expert-parallel groups.
        ownership: prefix of every expert layer, or "even"; None: even.
        tag: None: the one that ``latest`` names.

    Raises:
        CheckpointError: incomplete or damaged, or ranks that disagree.
        OwnershipError: a topology that does not fit the ranks or experts.
    """
    source = TrainingSource(locate(path, tag))
    _check(source)
    topology = _target(source, world_size, ep_size, ownership)
    target: Target = (Stage3Target if source.stage == 3 else Stage12Target)(source, topology)
    notes = [
        f"client state {key!r} differs from rank to rank; every new rank gets that of rank 0"
        for key in target.differing
    ]
    if source.manifest is not None:
        notes.append("the random states of the ranks are not carried over: they belong to the ranks that were")
    return Reshard(source, target, notes)


def _check(source: TrainingSource) -> None:
    """Refuse what a manifest and DeepSpeed's files say differently, and a form of them that is not known."""
    if source.manifest is not None:
        first = source.ranks[0]
        found, wanted = first.state.get("global_steps"), source.manifest.global_steps
        if found != wanted:
            raise damaged(first.model.path, f"global_steps {wanted} as the manifest says", str(found))
    for rank, files in enumerate(source.ranks):
        if not isinstance(source.base_state(rank), Mapping):
            expected = "an optimizer state as zero_optimization.elastic_checkpoint false saves it"
            raise damaged(files.optim.path, expected, type(source.base_state(rank)).__name__)


def _target(source: TrainingSource, world_size: int, ep_size: int, ownership: str | list[int] | None) -> Topology:
    layers: dict[str, int] = {}
    for known in source.known.values():
        if known.logical.experts is not None:
            layers[known.logical.experts] = known.logical.shape[0]
    if not layers and (ep_size > 1 or ownership not in (None, "even")):
        raise OwnershipError(
            f"ep_size is {ep_size} and the ownership {ownership}, but {source.folder} names no expert layers"
        )
    prefixes = {layer: ownership_of(ownership or "even", count, ep_size).prefix for layer, count in layers.items()}
    return Topology(world_size, ep_size, prefixes, source.topology.sub_group_size)
