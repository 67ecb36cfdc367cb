"""Coordinated all-to-all-v: a header tells every rank what comes, then the rows come, or every rank raises.

Letters: P ranks of the group, L experts owned here, R rows, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from ruda_ds.comm.lost import naming_lost_ranks
from ruda_ds.comm.scope import CollectiveScope, current_scope
from ruda_ds.errors import ExpertProtocolError, NonFiniteError, OwnershipError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# tracked, dtype, width, status, then the counts.
FIXED_FIELDS = 4


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
        counts: [P][L] rows of each owned expert that come from each rank.
        tracked: whether the ranks track gradients; all do or none does.
    """

    counts: list[list[int]]
    tracked: bool

    @property
    def received(self) -> list[int]:
        """Rows that come from each rank."""
        return [sum(row) for row in self.counts]


def exchange_headers(
    counts: Sequence[int],
    owned: Sequence[int],
    *,
    tracked: bool,
    dtype: torch.dtype,
    width: int,
    status: Status,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Header:
    """Tell every owner what comes, and hear it from every rank. The one host synchronisation of a layer's forward.

    Args:
        counts: [E] rows for each expert, in order; zeros if ``status`` is not READY.
        owned: [P] experts owned by each rank.
        tracked: whether this rank's rows are tracked by autograd. Every rank must answer alike: one that does not track
            would not enter the inverse exchange.
        dtype: of the rows.
        width: H.
        status: of this rank.
        group: the expert-parallel ranks.
        device: on which the group communicates.

    Raises:
        ExpertProtocolError: on every rank alike, if any rank is not READY or ranks disagree on dtype, width or
            tracking; no payload has moved.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    own = [int(tracked), DTYPES.index(dtype), width, int(status)]
    words: list[int] = []
    start = 0
    for number in owned:
        words += [*own, *counts[start : start + number]]
        start += number
    sent = torch.tensor(words, dtype=torch.int64).to(device)
    incoming = owned[rank] + FIXED_FIELDS
    received = torch.empty(world * incoming, dtype=torch.int64, device=device)
    with naming_lost_ranks(group, "the header of an expert exchange"):
        dist.all_to_all_single(received, sent, [incoming] * world, [n + FIXED_FIELDS for n in owned], group=group)
    rows = received.view(world, incoming).tolist()
    for peer, (_, _, _, state, *_) in enumerate(rows):
        if state != Status.READY:
            raise ExpertProtocolError(peer, REASONS[Status(state)])
    for peer, (_, kind, peer_width, *_) in enumerate(rows):
        if (kind, peer_width) != (rows[0][1], rows[0][2]):
            raise ExpertProtocolError(
                peer,
                f"it sends {DTYPES[kind]} rows of width {peer_width}, rank 0 sends {DTYPES[rows[0][1]]} rows of width "
                f"{rows[0][2]}",
            )
    tracks = [bool(row[0]) for row in rows]
    if any(tracks) and not all(tracks):
        raise ExpertProtocolError(
            tracks.index(False), f"it runs without gradients (torch.no_grad), rank {tracks.index(True)} with them"
        )
    return Header(counts=[row[FIXED_FIELDS:] for row in rows], tracked=all(tracks))


class _AllToAll(torch.autograd.Function):
    """Rows out and back; the backward is the inverse exchange, entered on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        token: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        ctx.set_materialize_grads(True)
        return _move(rows, sent, received, group), token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, token: torch.Tensor) -> tuple:
        return _move(gradient, ctx.received, ctx.sent, ctx.group), token, None, None, None


def _move(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    if dist.get_world_size(group) == 1:
        return rows.clone()
    out = rows.new_empty(sum(received), rows.shape[1])
    with naming_lost_ranks(group, "an expert exchange"):
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def exchange_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], *, tracked: bool, group: dist.ProcessGroup
) -> torch.Tensor:
    """All-to-all-v of rows [R, H], ordered by rank.

    Args:
        sent: [P] rows for each rank; they lie one after another.
        received: [P] rows from each rank.
        tracked: the header's word.
        group: the expert-parallel ranks.
    """
    if not tracked:
        return _move(rows, sent, received, group)
    scope: CollectiveScope | None = current_scope()
    token = scope.token if scope is not None and scope.token is not None else _new_token(rows)
    moved, following = _AllToAll.apply(rows, token, sent, received, group)
    if scope is not None:
        scope.token = following
    return moved


def exchange_results(
    results: torch.Tensor | Exception,
    sent: list[int],
    received: list[int],
    *,
    like: torch.Tensor,
    tracked: bool,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The way back: `exchange_rows` of blocks that each end in one row more, this rank's status.

    Args:
        results: [sum(sent) + P, H], a zero row at the end of each rank's block; or what went wrong here.
        sent: [P] results for each rank, without the status rows.
        received: [P] results from each rank.
        like: [.., H], dtype and device of results.

    Returns:
        [sum(received) + P, H].

    Raises:
        ExpertProtocolError: on every rank, if any rank has gone wrong; nobody waits for results that do not come.
    """
    out, back = [count + 1 for count in sent], [count + 1 for count in received]
    if isinstance(results, Exception):
        status = status_of(results)
        payload = like.new_zeros(sum(out), like.shape[1])
        payload[_ends(out), 0] = int(status)
        _move(payload, out, back, group)
        raise ExpertProtocolError(dist.get_rank(group), REASONS[status]) from results
    returned = exchange_rows(results, out, back, tracked=tracked, group=group)
    for peer, code in enumerate(returned.detach()[_ends(back), 0].tolist()):
        if code:
            raise ExpertProtocolError(peer, REASONS[Status(int(code))])
    return returned


def _ends(blocks: list[int]) -> list[int]:
    """The last row of each block."""
    return [end - 1 for end in accumulate(blocks)]


def status_of(error: Exception) -> Status:
    """What a rank tells the others of an error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Status.OUT_OF_MEMORY
    if isinstance(error, NonFiniteError):
        return Status.NOT_FINITE
    return Status.BAD_INPUT if isinstance(error, OwnershipError) else Status.FAILED


def _new_token(rows: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float32, device=rows.device, requires_grad=True)
