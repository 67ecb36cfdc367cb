"""Where the elements of every parameter lie in DeepSpeed's flat partitions, rank by rank. Pure: no file, no process.

ZeRO-3 (DeepSpeedZeroOptimizer_Stage3, `_get_trainable_parameter_groups` and `_create_fp16_sub_groups`): each optimizer
group is split by the process group over which a parameter is partitioned, in order of first appearance; each part is
cut into sub-groups of `sub_group_size` local elements; a sub-group's flat tensor holds a slot of ceil(N / W) elements
for each parameter. For ZeRO-1 and 2 see layout_stage12.py.

Letters: W ranks, P the expert-parallel size, D = W / P ranks of an expert-data-parallel group. The EP rank of global
rank r is r % P, its place in its expert-data-parallel group r // P.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ruda_ds.errors import OwnershipError
from ruda_ds.shapes import element_count, padded_shard_length, shard_range

# DeepSpeed's own default of zero_optimization.sub_group_size.
SUB_GROUP_SIZE = 1_000_000_000


@dataclass(frozen=True)
class Logical:
    """A parameter as the whole job has it.

    Attributes:
        name: in the module.
        shape: whole; of a cube of experts all E come first.
        experts: name of the expert layer that it belongs to; None if it is replicated.
    """

    name: str
    shape: tuple[int, ...]
    experts: str | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return element_count(self.shape)


@dataclass(frozen=True)
class Topology:
    """Ranks, and who owns which experts.

    Attributes:
        world_size: W.
        ep_size: P; 1 where experts are replicated like any other parameter.
        ownership: prefix of P + 1 numbers, by expert layer.
        sub_group_size: of the DeepSpeed config.
    """

    world_size: int
    ep_size: int = 1
    ownership: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sub_group_size: int = SUB_GROUP_SIZE

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ep_size < 1 or self.world_size % self.ep_size:
            raise OwnershipError(
                f"{self.world_size} ranks with ep_size {self.ep_size}: expected 1 or more of both, and whole groups"
            )
        for layer, prefix in self.ownership.items():
            if len(prefix) != self.ep_size + 1 or prefix[0] != 0 or list(prefix) != sorted(prefix):
                raise OwnershipError(
                    f"ownership of {layer} is {prefix}, expected {self.ep_size + 1} numbers from 0, not decreasing"
                )

    def is_split(self, parameter: Logical) -> bool:
        """Whether each EP rank has experts of its own in this parameter."""
        return parameter.experts is not None and self.ep_size > 1

    def owned(self, parameter: Logical, ep_rank: int) -> tuple[int, int]:
        """Half-open range of the experts of an EP rank."""
        prefix = self.ownership[str(parameter.experts)]
        if prefix[-1] != parameter.shape[0]:
            raise OwnershipError(
                f"{parameter.name} has {parameter.shape[0]} experts, but the ownership {prefix} is of {prefix[-1]}"
            )
        return prefix[ep_rank], prefix[ep_rank + 1]

    def local_shape(self, parameter: Logical, rank: int) -> tuple[int, ...]:
        """Shape that DeepSpeed sees on a rank: one element, a placeholder, where it owns no expert."""
        if not self.is_split(parameter):
            return parameter.shape
        start, stop = self.owned(parameter, rank % self.ep_size)
        return (stop - start, *parameter.shape[1:]) if stop > start else (1,) * len(parameter.shape)

    def slot(self, parameter: Logical, rank: int) -> int:
        """Elements of the rank's partition, with padding."""
        ranks = self.world_size // self.ep_size if self.is_split(parameter) else self.world_size
        return padded_shard_length(element_count(self.local_shape(parameter, rank)), ranks)

    def held(self, parameter: Logical, rank: int) -> tuple[int, int]:
        """Half-open range of the flattened whole that lies in the rank's partition; (n, n) if nothing does."""
        if not self.is_split(parameter):
            return shard_range(parameter.numel, self.world_size, rank)
        start, stop = self.owned(parameter, rank % self.ep_size)
        row = element_count(parameter.shape[1:])
        begin, end = shard_range((stop - start) * row, self.world_size // self.ep_size, rank // self.ep_size)
        return start * row + begin, start * row + end

    def partition_ranks(self, split: bool, rank: int) -> list[int]:
        """Global ranks over which a parameter is partitioned."""
        return list(range(rank % self.ep_size if split else 0, self.world_size, self.ep_size if split else 1))


@dataclass(frozen=True)
class FlatGroup:
    """One flat tensor of a rank.

    Attributes:
        optimizer_group: index of the optimizer's parameter group that it belongs to.
        names: of its parameters, in order.
        split: whether they are experts' own.
        offsets: where each begins; one more than names, the last is the length.
    """

    optimizer_group: int
    names: tuple[str, ...]
    split: bool
    offsets: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Length of the flat tensor."""
        return self.offsets[-1]


def stage3_groups(groups: Sequence[Sequence[Logical]], topology: Topology, rank: int) -> list[FlatGroup]:
    """The flat tensors of a ZeRO-3 rank, of the trainable parameters of each optimizer group in order."""
    made = []
    for index, parameters in enumerate(groups):
        parts: dict[bool, list[Logical]] = {}
        for parameter in parameters:
            parts.setdefault(topology.is_split(parameter), []).append(parameter)
        for split, members in parts.items():
            for chunk in _sub_groups(members, [topology.slot(p, rank) for p in members], topology.sub_group_size):
                offsets = [0]
                for parameter in chunk:
                    offsets.append(offsets[-1] + topology.slot(parameter, rank))
                made.append(FlatGroup(index, tuple(p.name for p in chunk), split, tuple(offsets)))
    return made


def _sub_groups(members: list[Logical], slots: list[int], limit: int) -> Iterator[list[Logical]]:
    if sum(slots) <= limit:
        yield members
        return
    chunk: list[Logical] = []
    length = 0
    for parameter, slot in zip(members, slots, strict=True):
        chunk.append(parameter)
        length += slot
        if length >= limit or parameter is members[-1]:
            yield chunk
            chunk, length = [], 0


@dataclass(frozen=True)
class Segment:
    """A run of a parameter's elements in a rank's flat tensor.

    Attributes:
        rank: whose.
        group: index of its flat tensor.
        start: first element there.
        logical: first element of the flattened whole parameter.
        count: elements.
    """

    rank: int
    group: int
    start: int
    logical: int
    count: int


class Stage3Layout:
    """All ranks of a ZeRO-3 job.

    Ranks with the same EP rank have the same flat tensors (only which part of a parameter they hold differs), so P
    layouts are kept however many ranks there are.
    """

    def __init__(self, groups: Sequence[Sequence[Logical]], topology: Topology) -> None:
        self.topology = topology
        self.parameters = {p.name: p for group in groups for p in group}
        self.flat = [stage3_groups(groups, topology, ep_rank) for ep_rank in range(topology.ep_size)]
        self._places = [
            {
                name: (index, flat.offsets[place])
                for index, flat in enumerate(rank_groups)
                for place, name in enumerate(flat.names)
            }
            for rank_groups in self.flat
        ]

    def groups(self, rank: int) -> list[FlatGroup]:
        """The flat tensors of a rank."""
        return self.flat[rank % self.topology.ep_size]

    def segment(self, name: str, rank: int) -> Segment:
        """What a rank holds of a parameter; a count of 0 for nothing."""
        group, start = self._places[rank % self.topology.ep_size][name]
        begin, end = self.topology.held(self.parameters[name], rank)
        return Segment(rank, group, start, begin, end - begin)

    def segments(self, name: str) -> list[Segment]:
        """All that is held of a parameter, in order of its elements."""
        every = (self.segment(name, rank) for rank in range(self.topology.world_size))
        return sorted((s for s in every if s.count), key=lambda s: s.logical)


def covers(segments: Sequence[Segment], numel: int) -> bool:
    """Whether they hold every element once."""
    place = 0
    for segment in segments:
        if segment.logical != place:
            return False
        place += segment.count
    return place == numel
