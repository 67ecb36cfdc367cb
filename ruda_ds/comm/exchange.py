"""Coordinated all-to-all-v: a header tells every rank what comes, then the rows come, or every rank raises.

Letters: P ranks of the group, L experts owned here, R rows, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import NoReturn

import torch
import torch.distributed as dist

from ruda_ds.comm.lost import naming_lost_ranks
from ruda_ds.comm.trace import TRACE
from ruda_ds.errors import ExpertProtocolError, NonFiniteError, OwnershipError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# tracked, dtype, width, status, place; then the counts.
FIXED_FIELDS = 5
# A place is (layer, how often it was called), in one integer.
CALLS = 1 << 40


class Status(IntEnum):
    """What a rank says of itself in the header."""

    READY = 0
    BAD_INPUT = 1
    NOT_FINITE = 2
    OUT_OF_MEMORY = 3
    FAILED = 4


REASONS = {
    Status.BAD_INPUT: "its input does not fit the layer (dtype, width or device)",
    Status.NOT_FINITE: "its input holds NaN or Inf",
    Status.OUT_OF_MEMORY: "it ran out of memory",
    Status.FAILED: "it raised an error; its own message says which",
}


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one header exchange told this rank.

    Attributes:
        own_counts: [E] rows that this rank sends to each expert.
        counts: [P][L] rows of each owned expert that come from each rank.
        tracked: whether the ranks track gradients; all do or none does.
    """

    own_counts: list[int]
    counts: list[list[int]]
    tracked: bool

    @property
    def received(self) -> list[int]:
        """Rows that come from each rank."""
        return [sum(row) for row in self.counts]


def exchange_headers(
    counts: torch.Tensor,
    owned: Sequence[int],
    *,
    tracked: bool,
    dtype: torch.dtype,
    width: int,
    status: Status,
    place: tuple[int, int],
    group: dist.ProcessGroup,
) -> Header:
    """Tell every owner what comes, and hear it from every rank. The one host synchronisation of a layer's forward.

    Args:
        counts: [E] int64 rows for each expert, in order, on the device that the group communicates from; zeros if
            ``status`` is not READY.
        owned: [P] experts owned by each rank.
        tracked: whether this rank's rows are tracked by autograd. Every rank must answer alike: one that does not track
            would not enter the inverse exchange.
        dtype: of the rows.
        width: H.
        status: of this rank.
        place: (number of the layer in the model, calls of it before this one): ranks that stand in different exchanges
            are told apart by it, which would otherwise be mixed without a word where shapes agree.
        group: the expert-parallel ranks.

    Raises:
        ExpertProtocolError: on every rank alike, if any rank is not READY or ranks disagree on dtype, width, tracking
            or place; no payload has moved.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    own = [int(tracked), DTYPES.index(dtype), width, int(status), place[0] * CALLS + place[1] % CALLS]
    fields = torch.tensor(own, dtype=torch.int64).to(counts.device)
    sent = torch.cat([piece for own_counts in counts.split(list(owned)) for piece in (fields, own_counts)])
    incoming = owned[rank] + FIXED_FIELDS
    received = torch.empty(world * incoming, dtype=torch.int64, device=counts.device)
    with naming_lost_ranks(group, "the header of an expert exchange"):
        dist.all_to_all_single(received, sent, [incoming] * world, [n + FIXED_FIELDS for n in owned], group=group)
    on_host = torch.cat([counts, received]).tolist()
    own_counts = on_host[: len(counts)]
    rows = [on_host[begin : begin + incoming] for begin in range(len(counts), len(on_host), incoming)]
    _require_ready(rows)
    if tracked and world > 1:  # alone, a rank waits for nobody and may call a layer as often as it likes
        TRACE.note(place[0])
    return Header(own_counts=own_counts, counts=[row[FIXED_FIELDS:] for row in rows], tracked=bool(rows[0][0]))


def _require_ready(rows: list[list[int]]) -> None:
    """Raise ExpertProtocolError unless the headers of all ranks fit each other; the same on every rank."""
    for peer, (_, _, _, state, *_) in enumerate(rows):
        if state != Status.READY:
            raise ExpertProtocolError(peer, REASONS[Status(state)])
    for peer, row in enumerate(rows):
        if row[4] != rows[0][4]:
            (layer, call), (first_layer, first_call) = divmod(row[4], CALLS), divmod(rows[0][4], CALLS)
            raise ExpertProtocolError(
                peer,
                f"it stands in expert layer {layer}, call {call}; rank 0 in layer {first_layer}, call {first_call}",
            )
        if row[1:3] != rows[0][1:3]:
            raise ExpertProtocolError(
                peer,
                f"it sends {DTYPES[row[1]]} rows of width {row[2]}, rank 0 sends {DTYPES[rows[0][1]]} rows of width "
                f"{rows[0][2]}",
            )
    tracks = [bool(row[0]) for row in rows]
    if any(tracks) and not all(tracks):
        raise ExpertProtocolError(
            tracks.index(False), f"it runs without gradients (torch.no_grad), rank {tracks.index(True)} with them"
        )


def move_rows(
    out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> None:
    """All-to-all-v of rows, ordered by rank, into ``out``; nothing to do for a rank alone.

    Args:
        out: [sum(received), H], contiguous; written.
        rows: [sum(sent), H], contiguous.
        received: [P] rows from each rank.
        sent: [P] rows for each rank; they lie one after another.
        group: the expert-parallel ranks.
    """
    if dist.get_world_size(group) > 1:
        with naming_lost_ranks(group, "an expert exchange"):
            dist.all_to_all_single(out, rows, received, sent, group=group)


def require_good(results: torch.Tensor, blocks: list[int]) -> None:
    """Raise ExpertProtocolError if a block of returned results ends in a status that is not READY.

    Args:
        results: [sum(blocks), H].
        blocks: [P] rows from each rank, the last of them its status; 0 of a rank that sends none.
    """
    ends = _ends(blocks)
    if not ends:
        return
    for peer, code in zip(ends, results[list(ends.values()), 0].tolist(), strict=True):
        if code:
            raise ExpertProtocolError(peer, REASONS[Status(int(code))])


def _ends(blocks: list[int]) -> dict[int, int]:
    """The last row of each rank's block; none of a rank without one."""
    return {peer: end - 1 for peer, (end, count) in enumerate(zip(accumulate(blocks), blocks, strict=True)) if count}


def tell_failure(
    error: Exception, like: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> NoReturn:
    """Send, in the place of results, blocks that end in a status; nobody waits for results that do not come.

    Args:
        error: what went wrong here.
        like: [.., H], dtype and device of results.
        sent, received: [P] rows as they are for results, each block's status among them.
        group: the expert-parallel ranks.

    Raises:
        ExpertProtocolError: always.
    """
    status = status_of(error)
    payload = like.new_zeros(sum(sent), like.shape[1])
    for end in _ends(sent).values():
        payload[end, 0] = int(status)
    move_rows(like.new_empty(sum(received), like.shape[1]), payload, received, sent, group)
    raise ExpertProtocolError(dist.get_rank(group), REASONS[status]) from error


def status_of(error: Exception) -> Status:
    """What a rank tells the others of an error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Status.OUT_OF_MEMORY
    if isinstance(error, NonFiniteError):
        return Status.NOT_FINITE
    return Status.BAD_INPUT if isinstance(error, OwnershipError) else Status.FAILED
