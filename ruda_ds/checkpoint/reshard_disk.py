"""A ZeRO-3 checkpoint for other ranks: parameters, moments, scheduler, frozen parameters and the pending window.

Which element goes where follows from two layouts, that of the source and that of the target; files are then written
one after another, each flat tensor in pieces that are read where they lie. Counters and whatever else is not split are
copied after all ranks have been found to say the same.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint import hf, reshard_pending
from ruda_ds.checkpoint.layout import FlatGroup, Stage3Layout, Topology
from ruda_ds.checkpoint.manifest import FileEntry
from ruda_ds.checkpoint.parallel import in_parallel, one_at_a_time
from ruda_ds.checkpoint.pickles import LazyTensor, StoredTensor
from ruda_ds.checkpoint.pt_writer import write_pt
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.recipes import CHUNK
from ruda_ds.checkpoint.reshard_state import State, client_state, original_groups, state_of
from ruda_ds.checkpoint.source import WEIGHT, TrainingSource
from ruda_ds.checkpoint.stock import RESERVED
from ruda_ds.checkpoint.writer import LATEST, locate
from ruda_ds.errors import OwnershipError
from ruda_ds.moe.ownership import ownership_of

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Reshard:
    """A conversion that has been checked and not yet run.

    Attributes:
        source: the checkpoint.
        layout: of the target.
        states: of the optimizer, by optimizer group.
        client: what the user saved and all ranks agree in, and rank 0's of the rest.
        notes: what the user should know.
    """

    source: TrainingSource
    layout: Stage3Layout
    states: list[State]
    client: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def topology(self) -> Topology:
        """Of the target."""
        return self.layout.topology

    def files(self) -> list[tuple[str, int, int]]:
        """(name, bytes of tensors, tensors) of what will be written."""
        return self._files

    @cached_property
    def _files(self) -> list[tuple[str, int, int]]:
        made = []
        for rank in range(self.topology.world_size):
            lengths = [(group.numel, self.states[group.optimizer_group]) for group in self.layout.groups(rank)]
            nbytes = sum(n * (4 + sum(d.itemsize for d in state.moments.values())) for n, state in lengths)
            made.append((self._names(rank)[1], nbytes, sum(1 + len(state.moments) for _, state in lengths)))
            frozen = [self._frozen(name, rank) for name in self._frozen_names()]
            made.append((self._names(rank)[0], sum(map(_nbytes, frozen)), len(frozen)))
        return made + reshard_pending.files(self.source, self.topology)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that will be written."""
        return sum(nbytes for _, nbytes, _ in self.files())

    def run(self, target: Path, advance: Advance) -> None:
        """Write the folder; ``advance`` is told bytes as they are written.

        Raises:
            CheckpointError: the target is there already, or a source file is damaged; nothing is left then.
        """
        tag, root = self.source.folder.name, self.source.folder.parent
        with hf.finished_folder(target) as folder:
            (folder / tag).mkdir()
            entries = self._write_states(folder / tag, one_at_a_time(advance))
            if self.source.manifest is not None:
                entries |= reshard_pending.write(folder / tag, self.source, self.topology, advance)
                groups = tuple(self._flat_names(index) for index in range(len(self.states)))
                replace(
                    self.source.manifest,
                    tag=tag,
                    world_size=self.topology.world_size,
                    groups=groups,
                    experts=self._experts(),
                    files=dict(sorted(entries.items())),
                ).write(folder / tag)
            for script in root.glob("zero_to_*.py"):
                shutil.copy(script, folder / script.name)
            hf.copy_side_files(root, folder)
            hf.write_text(folder / LATEST, tag, end="")

    def _write_states(self, folder: Path, advance: Advance) -> dict[str, FileEntry]:
        def write(name: str, make: Callable[[int], dict[str, Any]], rank: int) -> FileEntry:
            return write_pt(folder / name, make(rank), advance)

        files = [
            (name, make, rank)
            for rank in range(self.topology.world_size)
            for name, make in zip(self._names(rank), (self._model_states, self._optim_states), strict=True)
        ]
        sizes = {name: nbytes for name, nbytes, _ in self.files()}
        files.sort(key=lambda file: -sizes[file[0]])  # the longest begins first
        entries = in_parallel([partial(write, *file) for file in files])
        return {name: entry for (name, _, _), entry in zip(files, entries, strict=True)}

    def _experts(self) -> Any:
        entry = self.source.manifest.experts if self.source.manifest else None
        if entry is None:
            return None
        return replace(entry, ep_size=self.topology.ep_size, ownership=dict(self.topology.ownership))

    def _flat_names(self, optimizer_group: int) -> tuple[str, ...]:
        flat = self.layout.groups(0)
        return tuple(name for group in flat if group.optimizer_group == optimizer_group for name in group.names)

    def _names(self, rank: int) -> tuple[str, str]:
        first = self.source.ranks[0]
        optim = first.optim.path.name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")
        return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", optim

    # --- the model's file ---------------------------------------------------------------------------------------

    def _frozen_names(self) -> list[str]:
        return list(self.source.ranks[0].state.get("frozen_param_fragments") or {})

    def _frozen(self, name: str, rank: int) -> LazyTensor:
        logical = self.source.known[name].logical
        stored = self.source.ranks[0].state["frozen_param_fragments"][name]
        slot = self.topology.slot(logical, rank)
        begin, end = self.topology.held(logical, rank)

        def chunks() -> Iterator[torch.Tensor]:
            yield from _padded(self.source, name, WEIGHT, begin, end, slot, stored.dtype)

        return LazyTensor((slot,), stored.dtype, chunks)

    def _model_states(self, rank: int) -> dict[str, Any]:
        state = {key: value for key, value in self.source.ranks[0].state.items() if key in RESERVED} | self.client
        known = self.source.known
        shapes = [
            OrderedDict((n, torch.Size(self.topology.local_shape(known[n].logical, rank))) for n in group.names)
            for group in self.layout.groups(rank)
        ]
        frozen = self._frozen_names()
        if state.get("frozen_param_shapes") is not None:
            state["frozen_param_shapes"] = OrderedDict(
                (n, torch.Size(self.topology.local_shape(known[n].logical, rank))) for n in frozen
            )
            state["frozen_param_fragments"] = OrderedDict((n, self._frozen(n, rank)) for n in frozen)
        state |= {
            "param_shapes": shapes,
            "dp_world_size": self.topology.world_size,
            "shared_params": state.get("shared_params") if rank == 0 else {},
        }
        return _lazy(state)

    # --- the optimizer's file -----------------------------------------------------------------------------------

    def _optim_states(self, rank: int) -> dict[str, Any]:
        groups = self.layout.groups(rank)
        first = self.source.ranks[0]
        zero = dict(first.zero) | {"partition_count": self.topology.world_size}
        metadata = partition_metadata(groups, self.topology, rank)
        zero.pop("ds_zero_partition_groups", None)
        if metadata is not None:
            zero["ds_zero_partition_groups"] = metadata
        zero["fp32_flat_groups"] = [self._flat(group, WEIGHT, torch.float32, rank) for group in groups]
        base = dict(zero["optimizer_state_dict"])
        base["state"] = {index: self._state(group, rank) for index, group in enumerate(groups)}
        base["param_groups"] = [
            {**group, "params": [i for i, flat in enumerate(groups) if flat.optimizer_group == index]}
            for index, group in enumerate(base["param_groups"])
        ]
        zero["optimizer_state_dict"] = base
        return _lazy({**first.optim.root, "optimizer_state_dict": zero})

    def _state(self, group: FlatGroup, rank: int) -> dict[str, Any]:
        state = self.states[group.optimizer_group]
        moments = {kind: self._flat(group, kind, dtype, rank) for kind, dtype in state.moments.items()}
        # A copy for each: a step count that two states share would be counted twice a step.
        common = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.common.items()
        }
        return {**common, **moments}

    def _flat(self, group: FlatGroup, kind: str, dtype: torch.dtype, rank: int) -> LazyTensor:
        def chunks() -> Iterator[torch.Tensor]:
            for name in group.names:
                logical = self.source.known[name].logical
                begin, end = self.topology.held(logical, rank)
                yield from _padded(self.source, name, kind, begin, end, self.topology.slot(logical, rank), dtype)

        return LazyTensor((group.numel,), dtype, chunks)


def _nbytes(tensor: LazyTensor) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


def _padded(
    source: TrainingSource, name: str, kind: str, begin: int, end: int, slot: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Elements begin..end of a parameter (or moment), then zeros up to ``slot`` elements."""
    for start in range(begin, end, CHUNK):
        yield source.read(name, start, min(CHUNK, end - start), kind).to(dtype)
    if slot > end - begin:
        yield torch.zeros(slot - (end - begin), dtype=dtype)


def _lazy(value: Any) -> Any:
    """The same with StoredTensors as LazyTensors, so that they are read when they are written."""
    if isinstance(value, StoredTensor):
        return LazyTensor(value.shape, value.dtype, lambda: iter([value.read().reshape(-1)]))
    if isinstance(value, (dict, OrderedDict)):
        return type(value)((key, _lazy(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_lazy, value))
    return value


def partition_metadata(groups: Sequence[FlatGroup], topology: Topology, rank: int) -> list[dict[str, Any]] | None:
    """What DeepSpeed notes of a rank's partition groups and compares when it loads; None without split experts."""
    if not any(group.split for group in groups):
        return None
    return [
        {
            "sub_group": index,
            "partition_count": len(topology.partition_ranks(group.split, rank)),
            "partition_rank": topology.partition_ranks(group.split, rank).index(rank),
            "partition_ranks": topology.partition_ranks(group.split, rank),
            "families": ["autoep_expert" if group.split else "replicated"],
            "group_names": [f"ep_size_{topology.ep_size}" if group.split else "replicated"],
        }
        for index, group in enumerate(groups)
    ]


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
        CheckpointError: incomplete or damaged, ranks that disagree, or another ZeRO stage.
        OwnershipError: a topology that does not fit the ranks or experts.
    """
    source = TrainingSource(locate(path, tag))
    if source.stage != 3:
        raise damaged(source.folder, "ZeRO stage 3, the only one that can be resharded", f"stage {source.stage}")
    topology = _target(source, world_size, ep_size, ownership)
    groups = [[source.known[name].logical for name in names] for names in original_groups(source, topology)]
    layout = Stage3Layout(groups, topology)
    states = [state_of(source, index) for index in range(len(groups))]
    client, differing = client_state(source)
    notes = [f"client state {key!r} differs from rank to rank; every new rank gets that of rank 0" for key in differing]
    if source.manifest is not None:
        notes.append("the random states of the ranks are not carried over: they belong to the ranks that were")
    return Reshard(source, layout, states, client, notes)


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
