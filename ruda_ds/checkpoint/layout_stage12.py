"""Where the elements of every parameter lie in the flat partitions of ZeRO-1 and 2. Pure: no file, no process.

DeepSpeedZeroOptimizer (`__init__`, `flatten_dense_tensors_aligned`, `get_data_parallel_partitions`): an optimizer
group is one flat tensor of all its trainable parameters. With `parameter_alignment` there is a gap behind a parameter,
so that the next begins at a multiple of 16 bytes. The end is padded to a multiple of twice the ranks, and the whole is
cut evenly over them. With `round_robin_gradients` the parameters are dealt to the ranks first, one by one, and the flat
tensor holds the first rank's, then the second's. Experts that are split have groups of their own, cut over the ranks
that hold a copy. Letters as in layout.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from ruda_ds.checkpoint.layout import Logical, Segment, Topology
from ruda_ds.shapes import element_count

Item = TypeVar("Item")
# DeepSpeed's `nccl_start_alignment_factor`: a partition has a multiple of so many elements.
PARTITION_MULTIPLE = 2


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a rank's flat tensor.

    Attributes:
        name: of the parameter; None for padding.
        start: first element in the rank's flat tensor.
        logical: first element of the flattened whole parameter; None where all are zero: padding, and the placeholder
            of a rank without experts.
        count: elements.
    """

    name: str | None
    start: int
    logical: int | None
    count: int


class Stage12Layout:
    """All ranks of a ZeRO-1 or 2 job.

    Args:
        groups: the parameters of each optimizer group, in the order of its flat tensor; experts have their own groups.
        gaps: by EP rank, then by group: elements of padding after each parameter.
        partitions: by rank, then by group: elements of the rank's part, padding of the last included.
        topology: ranks and ownership.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Logical]],
        gaps: Sequence[Sequence[Sequence[int]]],
        partitions: Sequence[Sequence[int]],
        topology: Topology,
    ) -> None:
        self.groups, self.gaps, self.partitions, self.topology = groups, gaps, partitions, topology
        self.parameters = {p.name: p for group in groups for p in group}
        self._places: list[dict[str, tuple[int, int]]] = []
        self._lengths: list[list[int]] = []
        self._offsets: list[list[list[int]]] = []
        for ep_rank in range(topology.ep_size):
            places, lengths = {}, []
            for index, (group, after) in enumerate(zip(groups, gaps[ep_rank], strict=True)):
                offset = 0
                for parameter, gap in zip(group, after, strict=True):
                    places[parameter.name] = index, offset
                    offset += element_count(topology.local_shape(parameter, ep_rank)) + gap
                lengths.append(offset)
            self._places.append(places)
            self._offsets.append([[places[parameter.name][1] for parameter in group] for group in groups])
            self._lengths.append(lengths)
        self._begins = [[0] * len(groups) for _ in range(topology.world_size)]
        for index in range(len(groups)):
            for ep_rank in range(topology.ep_size if self.is_split(index) else 1):
                for before, rank in pairwise(self.ranks(index, ep_rank)):
                    self._begins[rank][index] = self._begins[before][index] + partitions[before][index]

    def is_split(self, group: int) -> bool:
        """Whether an optimizer group is of experts that are each rank's own."""
        return any(self.topology.is_split(parameter) for parameter in self.groups[group])

    def ranks(self, group: int, rank: int) -> list[int]:
        """Global ranks over which a group is cut, this one among them."""
        return self.topology.partition_ranks(self.is_split(group), rank)

    def padding(self, rank: int, group: int) -> int:
        """Elements at the end of a rank's flat tensor that DeepSpeed leaves out where it saves the masters."""
        size = self.partitions[rank][group]
        end = self._begins[rank][group] + size
        return min(max(end - self._lengths[rank % self.topology.ep_size][group], 0), size)

    def fragment(self, name: str, rank: int) -> tuple[int, int]:
        """Half-open range of the flattened parameter, as the rank has it, that lies in the rank's partition.

        What is not in the flat tensors (frozen, or without elements) gives (0, 0), and so does a placeholder. What
        lies before or behind the partition gives (n, n), as `_deepspeed.FlatFragment` does.
        """
        if name not in self.parameters:
            return 0, 0
        group, offset = self._places[rank % self.topology.ep_size][name]
        numel = self._local(name, rank)[1]
        begin = self._begins[rank][group] - offset
        end = begin + self.partitions[rank][group]
        return min(max(begin, 0), numel), min(max(end, 0), numel)

    def held(self, name: str, rank: int) -> tuple[int, int]:
        """The same of the flattened whole; (n, n) if nothing is held."""
        if name not in self.parameters:
            return 0, 0
        base, (begin, end) = self._local(name, rank)[0], self.fragment(name, rank)
        return base + begin, base + end

    def _local(self, name: str, rank: int) -> tuple[int, int]:
        """(first element in the whole, elements) of what a rank has of a parameter, before it is cut."""
        parameter = self.parameters[name]
        if not self.topology.is_split(parameter):
            return 0, parameter.numel
        start, stop = self.topology.owned(parameter, rank % self.topology.ep_size)
        row = element_count(parameter.shape[1:])
        return start * row, (stop - start) * row

    def segments(self, name: str) -> list[Segment]:
        """All that is held of a parameter, in order of its elements."""
        split = self.topology.is_split(self.parameters[name])
        found: list[Segment] = []
        for ep_rank in range(self.topology.ep_size if split else 1):
            group, offset = self._places[ep_rank][name]
            for rank in self.topology.partition_ranks(split, ep_rank):
                (begin, end), logical = self.fragment(name, rank), self.held(name, rank)[0]
                if end > begin:
                    found.append(Segment(rank, group, offset + begin - self._begins[rank][group], logical, end - begin))
        return found

    def runs(self, rank: int, group: int) -> Iterator[Run]:
        """A rank's flat tensor from its first element to its last, padding included."""
        ep_rank, size = rank % self.topology.ep_size, self.partitions[rank][group]
        low, place = self._begins[rank][group], 0
        offsets = self._offsets[ep_rank][group]
        for index in range(max(bisect_right(offsets, low) - 1, 0), bisect_left(offsets, low + size)):
            parameter, offset = self.groups[group][index], offsets[index]
            numel = element_count(self.topology.local_shape(parameter, ep_rank))
            begin, end = max(offset - low, 0), min(offset + numel - low, size)
            if end <= begin:  # the partition begins in the gap behind it
                continue
            if begin > place:
                yield Run(None, place, None, begin - place)
            base, owned = self._local(parameter.name, rank)
            yield Run(parameter.name, begin, base + low + begin - offset if owned else None, end - begin)
            place = end
        if place < size:
            yield Run(None, place, None, size - place)


def stage12_layout(groups: Sequence[Sequence[Logical]], topology: Topology, multiples: Sequence[int]) -> Stage12Layout:
    """The layout that DeepSpeed makes.

    Args:
        groups: the parameters of each optimizer group, in the order of its flat tensor.
        topology: ranks and ownership.
        multiples: by group, elements at whose multiples a parameter begins; 1 without `parameter_alignment`.
    """
    gaps, lengths = [], []
    for ep_rank in range(topology.ep_size):
        sizes = [[element_count(topology.local_shape(p, ep_rank)) for p in group] for group in groups]
        gaps.append([_gaps(group, multiple) for group, multiple in zip(sizes, multiples, strict=True)])
        lengths.append([sum(size) + sum(gap) for size, gap in zip(sizes, gaps[-1], strict=True)])
    partitions = []
    for rank in range(topology.world_size):
        sizes_of_rank = []
        for index, group in enumerate(groups):
            split = any(topology.is_split(parameter) for parameter in group)
            unit = PARTITION_MULTIPLE * len(topology.partition_ranks(split, rank))
            sizes_of_rank.append(-(-lengths[rank % topology.ep_size][index] // unit) * PARTITION_MULTIPLE)
        partitions.append(sizes_of_rank)
    return Stage12Layout(groups, gaps, partitions, topology)


def _gaps(sizes: Sequence[int], multiple: int) -> list[int]:
    """Padding behind each parameter but the last, so that the next begins at a multiple."""
    return [-size % multiple for size in sizes[:-1]] + [0] * len(sizes[-1:])


def dealt(items: Sequence[Item], ranks: int) -> list[Item]:
    """The order that `round_robin_gradients` puts a group's parameters in."""
    return [item for rank in range(ranks) for item in items[rank::ranks]]


def undealt(items: Sequence[Item], ranks: int) -> list[Item]:
    """The inverse of `dealt`."""
    before = dealt(range(len(items)), ranks)
    return [item for _, item in sorted(zip(before, items, strict=True), key=lambda pair: pair[0])]
