"""A training checkpoint of DeepSpeed as named tensors that are read by range, whatever ranks hold them.

Nothing is read at the opening but pickles and headers: where every element lies follows from `layout`, and what the
files say of themselves must agree with it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint.layout import (
    SUB_GROUP_SIZE,
    Logical,
    Segment,
    Stage3Layout,
    Topology,
    covers,
)
from ruda_ds.checkpoint.layout_checks import check_stage3, lay_out_stage12
from ruda_ds.checkpoint.layout_stage12 import Stage12Layout
from ruda_ds.checkpoint.manifest import MANIFEST, Manifest
from ruda_ds.checkpoint.pickles import StoredTensor
from ruda_ds.checkpoint.rank_states import RankFiles, field_of, open_ranks, stage_of
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.stored_weights import StoredWeights
from ruda_ds.errors import OwnershipError

WEIGHT = "weight"


@dataclass(frozen=True)
class Known:
    """A parameter of the checkpoint: what it is, the dtype that it is trained in, and whether it is trained."""

    logical: Logical
    dtype: torch.dtype
    trained: bool


class TrainingSource:
    """See the module's docstring; a Source whose ``read`` gives float32 masters of what is trained.

    Args:
        folder: of a tag.

    Raises:
        CheckpointError: a file is missing, too many, damaged, or disagrees; or the ZeRO stage has no such files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
        if self.manifest is not None:
            self.manifest.check_sizes(folder)
        self.ranks = open_ranks(folder, self.manifest.world_size if self.manifest else None)
        first = self.ranks[0]
        field_of(first.optim, first.zero, "zero_stage")
        self.stage = stage_of(first.zero)
        if self.manifest is not None and self.manifest.zero_stage != self.stage:
            raise damaged(first.optim.path, f"ZeRO stage {self.manifest.zero_stage}", str(self.stage))
        self.tied: dict[str, str] = dict(first.state.get("shared_params") or {})
        self.buffers: dict[str, StoredTensor] = {
            name: first.state["module"][name] for name in first.state["buffer_names"] if name in first.state["module"]
        }
        self.topology = self._find_topology()
        self.known = self._find_parameters()
        self.groups = self._find_groups()
        self.layout = self._lay_out()
        logical = {name: known.logical for name, known in self.known.items()}
        module = first.state.get("module") or {}
        self.stored = StoredWeights(folder, first.model.path, module, self.topology, logical)
        self._cached = lru_cache(maxsize=16)(self._find_segments)

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.ranks)

    # --- what is in it ------------------------------------------------------------------------------------------

    @property
    def zero_config(self) -> Mapping[str, Any]:
        """The "zero_optimization" of the DeepSpeed config that the files hold."""
        config = self.ranks[0].state.get("ds_config") or self.ranks[0].optim.root.get("ds_config") or {}
        return config.get("zero_optimization") or {}

    def _find_topology(self) -> Topology:
        limit = int(self.zero_config.get("sub_group_size", SUB_GROUP_SIZE))
        experts = self.manifest.experts if self.manifest else None
        if experts is not None:
            return Topology(self.world_size, experts.ep_size, dict(experts.ownership), limit)
        ep_size, ownership = _infer_experts(self.ranks)
        return Topology(self.world_size, ep_size, ownership, limit)

    def _find_parameters(self) -> dict[str, Known]:
        if self.manifest is not None:
            return {
                p.name: Known(Logical(p.name, p.shape, p.experts), getattr(torch, p.dtype), p.requires_grad)
                for p in self.manifest.parameters
            }
        state, known = self.ranks[0].state, {}
        trained = {name for group in state["param_shapes"] for name in group}
        shapes = [_local_shapes(self.ranks[rank].state) for rank in range(self.topology.ep_size)]
        for name, stored in state["module"].items():
            if name in self.buffers or name in self.tied:
                continue
            shape = shapes[0].get(name, stored.shape)
            layer = next((layer for layer in self.topology.ownership if name.startswith(f"{layer}.experts.")), None)
            if layer is not None:
                full = next(s[name] for s in shapes if len(s[name]) > 1)
                shape = (self.topology.ownership[layer][-1], *full[1:])
            known[name] = Known(Logical(name, tuple(shape), layer), stored.dtype, name in trained)
        return known

    def _find_groups(self) -> list[list[str]]:
        """Names of the trained parameters by optimizer group, in the order of the flat tensors."""
        if self.manifest is not None:
            return [list(group) for group in self.manifest.groups]
        flat = [list(group) for group in self.ranks[0].state["param_shapes"]]
        if self.stage < 3:
            return flat
        base = self.ranks[0].zero["optimizer_state_dict"]["param_groups"]
        return [[name for index in group["params"] for name in flat[index]] for group in base]

    def _logical(self, groups: list[list[str]]) -> list[list[Logical]]:
        return [[self.known[name].logical for name in group] for group in groups]

    def _lay_out(self) -> Stage3Layout | Stage12Layout:
        groups, flats = self._logical(self.groups), [self.flat(rank) for rank in range(self.world_size)]
        try:
            if self.stage < 3:
                return lay_out_stage12(groups, self.topology, self.ranks, flats)
            layout = Stage3Layout(groups, self.topology)
            for rank, files in enumerate(self.ranks):
                check_stage3(layout, files, flats[rank], rank)
            return layout
        except OwnershipError as error:
            raise damaged(self.folder, "parameters that fit their ownership", str(error)) from error

    def flat(self, rank: int) -> list[StoredTensor]:
        """The flat float32 tensors of a rank."""
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return field_of(self.ranks[rank].optim, self.ranks[rank].zero, key)

    def padded(self, rank: int, group: int) -> int:
        """Length of a rank's flat tensor with the padding that ZeRO-1 and 2 leave out when they save."""
        extra = 0 if self.stage == 3 else int(self.ranks[rank].zero["group_paddings"][group])
        return self.flat(rank)[group].numel + extra

    def base_state(self, rank: int) -> dict[str, Any]:
        """The torch optimizer's state of a rank, by flat tensor, and its param_groups."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        return field_of(self.ranks[rank].optim, self.ranks[rank].zero, key)

    def held(self, name: str, rank: int) -> tuple[int, int]:
        """Half-open range of a flattened whole parameter that is in a rank's partition; (n, n) if nothing is."""
        if isinstance(self.layout, Stage12Layout):
            return self.layout.held(name, rank)
        return self.topology.held(self.known[name].logical, rank)

    def segments_of(self, name: str) -> list[Segment]:
        """Where a parameter's elements lie, in order; group -1 for what is not in flat tensors.

        Raises:
            CheckpointError: some are nowhere.
        """
        return self._cached(name)

    def _find_segments(self, name: str) -> list[Segment]:
        logical = self.known[name].logical
        if self.known[name].trained and logical.numel:
            segments = self.layout.segments(name)
        elif self.stage == 3:
            held = [(rank, self.topology.held(logical, rank)) for rank in range(self.world_size)]
            segments = [Segment(rank, -1, 0, begin, end - begin) for rank, (begin, end) in held if end > begin]
            segments.sort(key=lambda segment: segment.logical)
        else:
            segments = [Segment(0, -1, 0, 0, logical.numel)]
        if not covers(segments, logical.numel):
            raise damaged(self.folder, f"all {logical.numel} elements of {name}", f"{segments}")
        return segments

    def _tensor(self, name: str, kind: str, segment: Segment) -> StoredTensor:
        files = self.ranks[segment.rank]
        if segment.group < 0:
            fragments = files.state.get("frozen_param_fragments") or files.state.get("module", {})
            stored = fragments.get(name)
        elif kind == WEIGHT:
            stored = self.flat(segment.rank)[segment.group]
        else:
            stored = self.base_state(segment.rank)["state"].get(segment.group, {}).get(kind)
        if not isinstance(stored, StoredTensor) or stored.numel < segment.start + segment.count:
            raise damaged(
                (files.model if segment.group < 0 else files.optim).path,
                f"{kind} of {name}, {segment.count} elements from {segment.start}",
                "nothing" if not isinstance(stored, StoredTensor) else f"{stored.numel} in all",
            )
        return stored

    # --- reading ------------------------------------------------------------------------------------------------

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See Source: parameters, tied ones once, and the buffers that are saved."""
        shapes = {name: known.logical.shape for name, known in self.known.items()}
        return shapes | {name: stored.shape for name, stored in self.buffers.items()}

    def dtype(self, name: str) -> torch.dtype:
        """See Source."""
        return self.known[name].dtype if name in self.known else self.buffers[name].dtype

    def pieces(self, name: str, start: int, count: int) -> Iterator[tuple[Segment, int, int]]:
        """(segment, offset in it, elements) that make up a range of a parameter, in order."""
        segments = self.segments_of(name)
        place = bisect_right(segments, start, key=lambda segment: segment.logical) - 1
        while count > 0:
            segment = segments[place]
            skip = start - segment.logical
            taken = min(count, segment.count - skip)
            yield segment, skip, taken
            start, count, place = start + taken, count - taken, place + 1

    def read(self, name: str, start: int, count: int, kind: str = WEIGHT) -> torch.Tensor:
        """See Source; ``kind`` is WEIGHT or the name of a moment."""
        if name in self.buffers:
            return self.buffers[name].read(start, count)
        if self.stage < 3 and not self.known[name].trained:
            return self.stored.read(name, start, count)
        flat, place = None, 0
        for segment, skip, taken in self.pieces(name, start, count):
            stored = self._tensor(name, kind, segment)
            if flat is None:
                flat = torch.empty(count, dtype=stored.dtype)
            stored.read_into(flat[place : place + taken], segment.start + skip)
            place += taken
        return torch.empty(0) if flat is None else flat


def _local_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(shape) for group in state["param_shapes"] for name, shape in group.items()}
    return shapes | {name: tuple(shape) for name, shape in (state.get("frozen_param_shapes") or {}).items()}


def _infer_experts(ranks: list[RankFiles]) -> tuple[int, dict[str, tuple[int, ...]]]:
    """(ep_size, ownership by layer) of a checkpoint without a manifest, from DeepSpeed's own partition groups."""
    groups = ranks[0].zero.get("ds_zero_partition_groups")
    if not groups:
        return 1, {}
    names, counts = [], set()
    for group, shapes in zip(groups, ranks[0].state["param_shapes"], strict=True):
        if group["families"] == ["autoep_expert"]:
            names += list(shapes)
            counts.add(group["partition_count"])
    if len(counts) != 1:
        raise damaged(ranks[0].optim.path, "one size of expert-data-parallel groups", str(sorted(counts)))
    ep_size = len(ranks) // counts.pop()
    local = [_local_shapes(ranks[rank].state) for rank in range(ep_size)]
    ownership = {}
    for name in names:
        prefix = [0]
        for shapes in local:
            prefix.append(prefix[-1] + (shapes[name][0] if len(shapes[name]) > 1 else 0))
        ownership[name.partition(".experts.")[0]] = tuple(prefix)
    return ep_size, ownership
