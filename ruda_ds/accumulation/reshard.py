"""A window of W ranks for W' ranks: which elements of which shards make up each new shard. Pure.

Everything is said in elements of the WHOLE parameter, flattened: of an expert parameter, the cube of all E experts. A
rank's shard is one half-open range of it, whatever the ZeRO stage and whoever owns the experts, so going from one
topology to another is cutting ranges out of ranges. `ShardMap.pieces` says where they lie without reading anything; a
converter uses it on files.

Letters: W ranks, P ranks of an expert-parallel group, E experts in all, N elements of a whole parameter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ruda_ds.accumulation.placement import ParameterPlacement
from ruda_ds.accumulation.record import RECORD_VERSION, PendingGradientsRecord, check_record, window_fields
from ruda_ds.errors import RecordError
from ruda_ds.shapes import element_count


@dataclass(frozen=True)
class LogicalParameter:
    """A parameter as the model has it, whoever holds which part.

    Attributes:
        name: as in ParameterPlacement.
        shape: of the whole; of an expert parameter [E, ...], of all experts.
        dtype: storage dtype.
        requires_grad: whether it is trained.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one source shard, and where they go.

    Attributes:
        rank: source rank.
        start, stop: half-open range within the source rank's unpadded shard.
        at: first element in the target shard.
    """

    rank: int
    start: int
    stop: int
    at: int


class ShardMap:
    """Where the elements of one whole parameter lie.

    Args:
        name: of the parameter, for messages.
        held: by source rank, the half-open range that its shard holds; empty ranges (n, n) are legal.
        numel: N.

    Raises:
        RecordError: ranges that leave a gap, overlap, or do not end at N.
    """

    def __init__(self, name: str, held: Sequence[tuple[int, int]], numel: int) -> None:
        ranges = sorted((start, stop, rank) for rank, (start, stop) in enumerate(held) if stop > start)
        end = 0
        for start, stop, rank in ranges:
            if start != end:
                raise RecordError(
                    f"parameter {name!r}: the shard of rank {rank} begins at element {start}, expected {end}: a rank "
                    "is missing or stands twice"
                )
            end = stop
        if end != numel:
            raise RecordError(f"parameter {name!r}: the shards end at element {end}, expected {numel}")
        self._ranges = ranges
        self._starts = [start for start, _, _ in ranges]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """What the target shard [start, stop) of the whole parameter is made of, in order; takes O(log W + pieces)."""
        found: list[Piece] = []
        index = max(bisect_right(self._starts, start) - 1, 0)
        while start < stop and index < len(self._ranges):
            begin, end, rank = self._ranges[index]
            upto = min(end, stop)
            if upto > start:
                at = found[-1].at + found[-1].stop - found[-1].start if found else 0
                found.append(Piece(rank, start - begin, upto - begin, at))
                start = upto
            index += 1
        if start < stop:
            raise RecordError(f"elements {start}..{stop} lie outside of the parameter")
        return found


def held_range(place: ParameterPlacement) -> tuple[int, int]:
    """The range of the WHOLE flattened parameter (of all experts) that a rank's unpadded shard holds."""
    start, stop = place.shard
    if place.experts is None or place.experts[0] == place.experts[1]:
        return start, stop
    base = place.experts[0] * element_count(place.logical_shape[1:])
    return base + start, base + stop


def logical_parameters(placements: Sequence[Sequence[ParameterPlacement]]) -> dict[str, LogicalParameter]:
    """The model that the placements of all ranks, in rank order, describe; name -> parameter.

    Raises:
        RecordError: ranks that describe different models.
    """
    found: dict[str, LogicalParameter] = {}
    names = [p.name for p in placements[0]]
    for rank, places in enumerate(placements):
        if [p.name for p in places] != names:
            differing = sorted(set(names) ^ {p.name for p in places})
            raise RecordError(f"rank {rank} has other parameters than rank 0: {differing}")
        for place in places:
            if place.experts is not None and place.experts[0] == place.experts[1]:
                continue
            shape = place.logical_shape
            if place.experts is not None:
                shape = (place.experts[1], *shape[1:])
            known = found.get(place.name)
            parameter = LogicalParameter(place.name, shape, place.dtype, place.requires_grad)
            if known is not None:
                if place.experts is not None:  # the last expert of any rank ends the whole
                    parameter = replace(parameter, shape=(max(known.shape[0], shape[0]), *shape[1:]))
                    known = replace(known, shape=(parameter.shape[0], *known.shape[1:]))
                if known != parameter:
                    raise RecordError(f"rank {rank} has {parameter}, expected {known} as the ranks before it")
            found[place.name] = parameter
    return found


def zero3_placement(
    parameter: LogicalParameter, rank: int, world_size: int, prefix: Sequence[int] | None = None
) -> ParameterPlacement:
    """Where ZeRO-3 puts a rank's shard.

    Args:
        prefix: of an expert parameter: P + 1 numbers, the ownership. EP rank p = rank % P owns experts
            prefix[p] .. prefix[p + 1] - 1; their partition is over the world_size / P ranks that own the same. None, or
            P = 1: as any other parameter.

    Raises:
        RecordError: P does not divide the world, or the prefix is not for the parameter's experts.
    """
    common = (parameter.dtype, parameter.requires_grad)
    if prefix is None or len(prefix) == 2:
        return ParameterPlacement(parameter.name, parameter.shape, rank, world_size, *common)
    owners = len(prefix) - 1
    if world_size % owners or prefix[-1] != parameter.shape[0]:
        raise RecordError(
            f"parameter {parameter.name!r}: ownership {list(prefix)} does not fit {parameter.shape[0]} experts on "
            f"{world_size} ranks"
        )
    start, stop = prefix[rank % owners], prefix[rank % owners + 1]
    shape = (stop - start, *parameter.shape[1:]) if stop > start else (0,)
    return ParameterPlacement(
        parameter.name, shape, rank // owners, world_size // owners, *common, experts=(start, stop)
    )


def zero3_placements(
    parameters: Mapping[str, LogicalParameter],
    world_size: int,
    ownership: Mapping[str, Sequence[int]] | None = None,
) -> list[tuple[ParameterPlacement, ...]]:
    """By rank, the placement of every parameter, sorted by name.

    Args:
        ownership: name of an expert parameter -> prefix; those that are left out are whole on every rank.
    """
    prefixes = ownership or {}
    return [
        tuple(zero3_placement(parameters[n], rank, world_size, prefixes.get(n)) for n in sorted(parameters))
        for rank in range(world_size)
    ]


def reshard(
    records: Sequence[PendingGradientsRecord], targets: Sequence[Sequence[ParameterPlacement]]
) -> list[PendingGradientsRecord]:
    """The records of all source ranks as records for the target placements: the same sums, cut in another way.

    Counters and the loss sum are those of the whole window on every rank: found equal, then copied, never summed.

    Args:
        records: one a source rank, in any order.
        targets: by target rank, placements of the same parameters; see `zero3_placements`.

    Raises:
        RecordError: a missing, duplicate or disagreeing rank, a shard that only some owners have, or another model.
    """
    sources = _in_rank_order(records)
    _require_agreement(sources)
    parameters = logical_parameters([record.placement for record in sources])
    if logical_parameters(targets) != parameters:
        raise RecordError("the target placements describe another model than the records")
    tables = [{place.name: place for place in record.placement} for record in sources]
    touched = {
        name: ShardMap(name, [held_range(table[name]) for table in tables], element_count(parameter.shape))
        for name, parameter in parameters.items()
        if parameter.requires_grad and _is_touched(sources, tables, name)
    }
    made = []
    for places in targets:
        gradients = {}
        for place in places:
            if place.name in touched:
                pieces = touched[place.name].pieces(*held_range(place))
                parts = [sources[p.rank].gradients[place.name][p.start : p.stop] for p in pieces]
                gradients[place.name] = torch.cat(parts) if parts else torch.empty(0, dtype=sources[0].state.dtype)
        made.append(PendingGradientsRecord(RECORD_VERSION, gradients, sources[0].state, tuple(places), sources[0].loss))
    return made


def _in_rank_order(records: Sequence[PendingGradientsRecord]) -> list[PendingGradientsRecord]:
    """Sorted by rank; a parameter that is not an expert's is partitioned over all ranks and tells which this is."""
    if not records:
        raise RecordError("no record was given, expected one of each rank")
    by_rank: dict[int, PendingGradientsRecord] = {}
    world = 0
    for record in records:
        check_record(record)
        place = next((p for p in record.placement if p.experts is None), None)
        if place is None:
            raise RecordError("a record holds expert parameters alone, expected one parameter that all ranks share")
        if world not in (0, place.world_size):
            raise RecordError(f"rank {place.rank} is of {place.world_size} ranks, the records before it of {world}")
        if place.rank in by_rank:
            raise RecordError(f"rank {place.rank} of {place.world_size} stands twice")
        world = place.world_size
        by_rank[place.rank] = record
    missing = sorted(set(range(world)) - set(by_rank))
    if missing:
        raise RecordError(f"records of ranks {missing} are missing, expected one of each of {world} ranks")
    return [by_rank[rank] for rank in range(world)]


def _require_agreement(sources: Sequence[PendingGradientsRecord]) -> None:
    wanted = window_fields(sources[0].state, sources[0].loss)
    for rank, record in enumerate(sources):
        found = window_fields(record.state, record.loss)
        for field in sorted(wanted.keys() | found.keys()):
            if wanted.get(field) != found.get(field):
                raise RecordError(
                    f"ranks disagree on {field}: rank {rank} holds {found.get(field)}, rank 0 {wanted.get(field)}"
                )


def _is_touched(
    sources: Sequence[PendingGradientsRecord], tables: Sequence[Mapping[str, ParameterPlacement]], name: str
) -> bool:
    """Whether the window has a gradient for a parameter; all ranks that hold a part of it must say the same."""
    owners = [rank for rank, table in enumerate(tables) if table[name].shard_numel]
    absent = [rank for rank in owners if name not in sources[rank].gradients]
    if absent and len(absent) < len(owners):
        raise RecordError(f"parameter {name!r}: ranks {absent} have no pending gradient, the other owners have one")
    return not absent
