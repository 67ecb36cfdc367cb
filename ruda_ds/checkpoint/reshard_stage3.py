"""DeepSpeed's files of a ZeRO-3 job on another topology: a model's and an optimizer's file for each rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint.layout import FlatGroup, Stage3Layout, Topology
from ruda_ds.checkpoint.manifest import FileEntry
from ruda_ds.checkpoint.pickles import LazyTensor
from ruda_ds.checkpoint.pt_writer import write_pt
from ruda_ds.checkpoint.reshard_state import client_state, original_groups, state_of
from ruda_ds.checkpoint.reshard_values import Advance, TargetFile, common_copy, lazy, nbytes_of, pieces, zeros
from ruda_ds.checkpoint.source import WEIGHT, TrainingSource
from ruda_ds.checkpoint.stock import RESERVED


class Stage3Target:
    """What is to be written for a ZeRO-3 job.

    Args:
        source: the checkpoint, of stage 3.
        topology: of the target.

    Attributes:
        groups: names of the trained parameters by optimizer group, in the order of the flat tensors.
        differing: keys of the client state in which the ranks differ.

    Raises:
        CheckpointError: ranks that disagree, or groups whose order cannot be told.
    """

    def __init__(self, source: TrainingSource, topology: Topology) -> None:
        self.source, self.topology = source, topology
        groups = [[source.known[name].logical for name in names] for names in original_groups(source, topology)]
        self.layout = Stage3Layout(groups, topology)
        self.states = [state_of(source, [index]) for index in range(len(groups))]
        self.client, self.differing = client_state(source)
        self.groups = tuple(
            tuple(n for group in self.layout.groups(0) if group.optimizer_group == index for n in group.names)
            for index in range(len(groups))
        )

    def held(self, name: str, rank: int) -> tuple[int, int]:
        """Half-open range of a flattened whole parameter that is in a rank's partition; (n, n) if nothing is."""
        return self.topology.held(self.source.known[name].logical, rank)

    def fragments(self, rank: int) -> None:
        """None: what is held follows from rank and world."""

    def files(self) -> list[TargetFile]:
        """All of DeepSpeed's files."""
        made = []
        for rank in range(self.topology.world_size):
            lengths = [(group.numel, self.states[group.optimizer_group]) for group in self.layout.groups(rank)]
            nbytes = sum(n * (4 + sum(d.itemsize for d in state.moments.values())) for n, state in lengths)
            count = sum(1 + len(state.moments) for _, state in lengths)
            made.append(_file(self._optimizer_name(rank), nbytes, count, self._optim_states, rank))
            frozen = [self._frozen(name, rank) for name in self._frozen_names()]
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            made.append(_file(name, sum(map(nbytes_of, frozen)), len(frozen), self._model_states, rank))
        return made

    def _optimizer_name(self, rank: int) -> str:
        return self.source.ranks[0].optim.path.name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")

    # --- the model's file ---------------------------------------------------------------------------------------

    def _frozen_names(self) -> list[str]:
        return list(self.source.ranks[0].state.get("frozen_param_fragments") or {})

    def _frozen(self, name: str, rank: int) -> LazyTensor:
        stored = self.source.ranks[0].state["frozen_param_fragments"][name]
        slot = self.topology.slot(self.source.known[name].logical, rank)
        return LazyTensor((slot,), stored.dtype, lambda: self._padded(name, WEIGHT, rank, stored.dtype))

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
        return lazy(state)

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
        return lazy({**first.optim.root, "optimizer_state_dict": zero})

    def _state(self, group: FlatGroup, rank: int) -> dict[str, Any]:
        state = self.states[group.optimizer_group]
        moments = {kind: self._flat(group, kind, dtype, rank) for kind, dtype in state.moments.items()}
        return {**common_copy(state.common), **moments}

    def _flat(self, group: FlatGroup, kind: str, dtype: torch.dtype, rank: int) -> LazyTensor:
        def chunks() -> Iterator[torch.Tensor]:
            for name in group.names:
                yield from self._padded(name, kind, rank, dtype)

        return LazyTensor((group.numel,), dtype, chunks)

    def _padded(self, name: str, kind: str, rank: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """What a rank holds of a parameter (or moment), then zeros up to its slot."""
        begin, end = self.held(name, rank)
        for values in pieces(lambda start, count: self.source.read(name, start, count, kind), begin, end):
            yield values.to(dtype)
        yield from zeros(self.topology.slot(self.source.known[name].logical, rank) - (end - begin), dtype)


def _file(name: str, nbytes: int, tensors: int, make: Callable[[int], dict[str, Any]], rank: int) -> TargetFile:
    def write(folder: Path, advance: Advance) -> FileEntry:
        return write_pt(folder / name, make(rank), advance)

    return TargetFile(name, nbytes, tensors, write)


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
