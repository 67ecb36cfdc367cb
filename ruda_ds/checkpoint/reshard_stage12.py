"""DeepSpeed's files of a ZeRO-1 or 2 job on another topology, and the experts' files of ours that go with them.

One model's file for all ranks, that of rank 0, and an optimizer's file for each. The model's weights are copied in
their storage dtype, not made of the float32 masters again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint import hf, rank_files
from ruda_ds.checkpoint.layout import Logical, Topology
from ruda_ds.checkpoint.layout_stage12 import stage12_layout
from ruda_ds.checkpoint.manifest import FileEntry, sha256_of
from ruda_ds.checkpoint.pickles import LazyTensor, foreign
from ruda_ds.checkpoint.pt_writer import write_pt
from ruda_ds.checkpoint.recipes import Part, Recipe, Slice
from ruda_ds.checkpoint.reshard_groups import param_groups, plan_groups, scheduler_state
from ruda_ds.checkpoint.reshard_state import client_state, state_of
from ruda_ds.checkpoint.reshard_values import (
    Advance,
    TargetFile,
    common_copy,
    lazy,
    like,
    nbytes_of,
    pieces,
    tensors_in,
    zeros,
)
from ruda_ds.checkpoint.source import WEIGHT, TrainingSource
from ruda_ds.checkpoint.stock import RESERVED
from ruda_ds.checkpoint.stored_weights import StoredWeights

MODEL_FILE = "mp_rank_00_model_states.pt"
_ALIGNMENT_BYTES = 16  # of zero_optimization.parameter_alignment
_PLACEHOLDER = ""  # no parameter has this name


class Stage12Target:
    """What is to be written for a ZeRO-1 or 2 job.

    Args:
        source: the checkpoint, of stage 1 or 2.
        topology: of the target.

    Attributes:
        groups: names of the trained parameters by optimizer group, in the order of the flat tensors.
        differing: none: below ZeRO-3 DeepSpeed saves the client state of rank 0 alone.

    Raises:
        CheckpointError: ranks that disagree, or groups of experts that cannot be joined; see reshard_groups.py.
    """

    def __init__(self, source: TrainingSource, topology: Topology) -> None:
        self.source, self.topology = source, topology
        self.plans = plan_groups(source, topology)
        self.groups = tuple(plan.flat for plan in self.plans)
        self.states = [state_of(source, plan.origins) for plan in self.plans]
        logical = [[source.known[name].logical for name in names] for names in self.groups]
        self.layout = stage12_layout(logical, topology, [self._multiple(names[0]) for names in self.groups])
        self.client, self.differing = client_state(source)

    def _multiple(self, name: str) -> int:
        """Elements at whose multiples the parameters of a group begin."""
        if not self.source.zero_config.get("parameter_alignment", False):
            return 1
        return _ALIGNMENT_BYTES // gcd(_ALIGNMENT_BYTES, self.source.known[name].dtype.itemsize)

    def held(self, name: str, rank: int) -> tuple[int, int]:
        """Half-open range of a flattened whole parameter that is in a rank's partition; (n, n) if nothing is."""
        return self.layout.held(name, rank)

    def fragments(self, rank: int) -> dict[str, tuple[int, int]]:
        """Name -> half-open range of the flattened parameter, as the rank has it, in the rank's partition."""
        return {name: self.layout.fragment(name, rank) for name in self.source.known}

    def files(self) -> list[TargetFile]:
        """DeepSpeed's files, and those of experts."""
        made = [_file(MODEL_FILE, self._model_states)]
        for rank in range(self.topology.world_size):
            name = self.source.ranks[0].optim.path.name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_")
            made.append(_file(name, partial(self._optim_states, rank)))
        experts = [n for n, known in self.source.known.items() if self.topology.is_split(known.logical)]
        if experts:
            made += [self._experts_file(experts, owner) for owner in range(self.topology.ep_size)]
        return made

    # --- the model's weights ------------------------------------------------------------------------------------

    def _stored(self, name: str, rank: int) -> LazyTensor:
        """A parameter as a rank's module has it, in its storage dtype."""
        logical, stored = self.source.known[name].logical, self.source.stored
        shape, dtype = self.topology.local_shape(logical, rank), stored.dtype(name)
        begin, end = _owned(self.topology, logical, rank)

        def chunks() -> Iterator[torch.Tensor]:
            yield from pieces(partial(stored.read, name), begin, end)
            yield from zeros(torch.Size(shape).numel() - (end - begin), dtype)  # of a placeholder

        return LazyTensor(shape, dtype, chunks)

    def _is_expert(self, name: str) -> bool:
        known = self.source.known.get(self.source.tied.get(name, name))
        return known is not None and known.logical.experts is not None

    def _with_experts(self, values: Any) -> Any:
        """Values by parameter name, those of experts made rank 0's."""
        if values is None:
            return None
        own = {n: self._stored(self.source.tied.get(n, n), 0) for n in values if self._is_expert(n)}
        return like(values, ((n, own.get(n, value)) for n, value in values.items()))

    def _shape(self, name: str) -> torch.Size:
        return torch.Size(self.topology.local_shape(self.source.known[name].logical, 0))

    def _model_states(self) -> dict[str, Any]:
        state = {k: v for k, v in self.source.ranks[0].state.items() if k in RESERVED} | self.client
        frozen, known = state.get("frozen_param_shapes") or {}, self.source.known
        shapes = OrderedDict((n, self._shape(n) if n in known else shape) for n, shape in frozen.items())
        state |= {
            "module": self._with_experts(state["module"]),
            "param_shapes": [OrderedDict((name, self._shape(name)) for name in names) for names in self.groups],
            "frozen_param_shapes": None if state.get("frozen_param_shapes") is None else shapes,
            "frozen_param_fragments": self._with_experts(state.get("frozen_param_fragments")),
            "lr_scheduler": scheduler_state(state.get("lr_scheduler"), self.plans, len(self.source.groups)),
            "dp_world_size": self.topology.world_size,
        }
        return lazy(state)

    def _experts_file(self, names: list[str], owner: int) -> TargetFile:
        """The file of an EP rank's experts, which DeepSpeed has none of."""
        tensors, stored = [], self.source.stored
        for name in names:
            logical = self.source.known[name].logical
            begin, end = _owned(self.topology, logical, owner)
            piece = Slice(name, begin, end - begin) if end > begin else Slice(_PLACEHOLDER, 0, 1)
            recipe = Recipe(name, self.topology.local_shape(logical, owner), (Part((piece,)),))
            tensors.append((recipe, stored.dtype(name)))
        shard = hf.Shard(rank_files.experts_name(owner, self.topology.world_size), tuple(tensors))

        def write(folder: Path, advance: Advance) -> FileEntry:
            hf.write_shard(folder, shard, _WithPlaceholders(stored), {}, advance, allow_empty=True)
            return FileEntry((folder / shard.name).stat().st_size, sha256_of(folder / shard.name))

        return TargetFile(shard.name, shard.nbytes, len(tensors), write)

    # --- the optimizer's file -----------------------------------------------------------------------------------

    def _optim_states(self, rank: int) -> dict[str, Any]:
        first, layout = self.source.ranks[0], self.layout
        groups = range(len(self.plans))
        paddings = [layout.padding(rank, group) for group in groups]
        sizes = layout.partitions[rank]
        zero = dict(first.zero) | {
            "single_partition_of_fp32_groups": [
                self._flat(rank, group, WEIGHT, torch.float32, sizes[group] - paddings[group]) for group in groups
            ],
            "group_paddings": paddings,
            "param_alignment_paddings": [list(gaps) for gaps in layout.gaps[rank % self.topology.ep_size]],
            "partition_count": [len(layout.ranks(group, rank)) for group in groups],
            "param_slice_mappings": [self._addresses(rank, group) for group in groups],
        }
        base = dict(zero["base_optimizer_state"])
        stepped = [group for group in groups if self.plans[group].origins[0] in base["state"]]
        base["state"] = {group: self._state(rank, group) for group in stepped}
        base["param_groups"] = param_groups(self.source, self.plans, self.topology)
        zero["base_optimizer_state"] = base
        return lazy({**first.optim.root, "optimizer_state_dict": zero})

    def _state(self, rank: int, group: int) -> dict[str, Any]:
        state, size = self.states[group], self.layout.partitions[rank][group]
        moments = {kind: self._flat(rank, group, kind, dtype, size) for kind, dtype in state.moments.items()}
        return {**common_copy(state.common), **moments}

    def _flat(self, rank: int, group: int, kind: str, dtype: torch.dtype, size: int) -> LazyTensor:
        """The first ``size`` elements of a rank's flat tensor of masters or of a moment."""

        def chunks() -> Iterator[torch.Tensor]:
            for run in self.layout.runs(rank, group):
                count = min(run.count, size - run.start)
                if run.name is None or run.logical is None:
                    yield from zeros(count, dtype)
                    continue
                read = partial(self._read, run.name, kind)
                for values in pieces(read, run.logical, run.logical + count):
                    yield values.to(dtype)

        return LazyTensor((size,), dtype, chunks)

    def _read(self, name: str, kind: str, start: int, count: int) -> torch.Tensor:
        return self.source.read(name, start, count, kind)

    def _addresses(self, rank: int, group: int) -> OrderedDict[str, Any]:
        """Where the parameters lie in a rank's partition, in the optimizer's own order.

        DeepSpeed's note of it, for its universal checkpoints. With `round_robin_gradients` and no gaps DeepSpeed itself
        notes where they would lie if they were not dealt; here it is where they do.
        """
        place = {name: index for index, name in enumerate(self.plans[group].names)}
        runs = sorted((place[run.name], run) for run in self.layout.runs(rank, group) if run.name is not None)
        return OrderedDict((str(run.name), _address(run.start, run.count)) for _, run in runs)


class _WithPlaceholders:
    """Weights as they are stored, and the one zero of a rank without experts under a name of its own; a Source."""

    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored
        self.shapes, self.dtype = stored.shapes, stored.dtype

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """See Source."""
        return torch.zeros(count) if name == _PLACEHOLDER else self._stored.read(name, start, count)


def _owned(topology: Topology, logical: Logical, rank: int) -> tuple[int, int]:
    """Half-open range of the flattened whole that a rank's module has."""
    if not topology.is_split(logical):
        return 0, logical.numel
    start, stop = topology.owned(logical, rank % topology.ep_size)
    row = torch.Size(logical.shape[1:]).numel()
    return start * row, stop * row


def _address(start: int, count: int) -> Any:
    """DeepSpeed's `fragment_address`, which is pickled as a plain object with these two fields."""
    kind = foreign("deepspeed.utils.tensor_fragment", "fragment_address")
    made = kind.__new__(kind)
    made.__setstate__({"numel": count, "start": start})
    return made


def _file(name: str, make: Callable[[], dict[str, Any]]) -> TargetFile:
    def write(folder: Path, advance: Advance) -> FileEntry:
        return write_pt(folder / name, make(), advance)

    tensors = list(tensors_in(make()))  # none is read, and what holds them is made again: a job has many ranks
    return TargetFile(name, sum(map(nbytes_of, tensors)), len(tensors), write)
