"""Where rows lie on their way to experts and back. Index arithmetic alone: no rows, no communication.

[Note: own rows stay]
A rank's rows for its own experts are not sent. They are the first rows of what the experts take and give; the rows of
the other ranks follow, a block a rank, in the order of the ranks. A block of results ends in one row more, the status.

Letters: T tokens, K experts a token, R = T * K rows (assignments), E experts, L experts owned here, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """How T * K assignments are ordered by expert.

    Attributes:
        tokens: [R] int64, the token of each row, rows sorted by expert and, within one, by token.
        slots: [T, K] int64, the row of each assignment; column k is a token's k-th expert in ascending order.
        counts: [E] int64, rows of each expert.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    counts: torch.Tensor


def sort_by_expert(experts: torch.Tensor, num_experts: int) -> Dispatch:
    """The order of ``experts`` [T, K], ascending within a token."""
    flat = experts.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    slots = torch.empty_like(order)
    slots[order] = torch.arange(order.numel(), device=order.device)
    return Dispatch(
        tokens=order.div(experts.shape[1], rounding_mode="floor"),
        slots=slots.view_as(experts),
        counts=torch.bincount(flat, minlength=num_experts),
    )


@dataclass(frozen=True, kw_only=True)
class Route:
    """How many rows go between this rank and each of its group; see [Note: own rows stay].

    Attributes:
        rank: this one's, in the group.
        sent: [P] rows for the experts of each rank, its own among them.
        received: [P] rows from each rank, its own among them.
        group: the expert-parallel ranks.
    """

    rank: int
    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    @property
    def own(self) -> int:
        """Rows that stay."""
        return self.sent[self.rank]

    def out(self, extra: int = 0) -> list[int]:
        """[P] rows for each other rank, each block ``extra`` rows longer; 0 for this one."""
        return self._others(self.sent, extra)

    def into(self, extra: int = 0) -> list[int]:
        """[P] rows from each other rank, likewise."""
        return self._others(self.received, extra)

    def _others(self, counts: list[int], extra: int) -> list[int]:
        return [0 if peer == self.rank else count + extra for peer, count in enumerate(counts)]

    def starts(self, blocks: Sequence[int]) -> list[int]:
        """[P] where each rank's rows begin when this rank's come first, then ``blocks``, those of the others."""
        begins = list(accumulate(blocks, initial=self.own))[:-1]
        return [0 if peer == self.rank else begin for peer, begin in enumerate(begins)]

    def shifts(self, blocks: Sequence[int]) -> torch.Tensor:
        """[P] int64: how far a slot of Dispatch moves, by the owner of its expert, to lie as ``starts`` say."""
        begins = list(accumulate(self.sent, initial=0))[:-1]
        return torch.tensor(self.starts(blocks)) - torch.tensor(begins)


def regroup(table: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """[R] int64: where the r-th row lies when rows are sorted by expert and, within one, by rank.

    Args:
        table: [P, L] int64 rows of each expert from each rank; a rank's lie one after another, by expert.
        starts: [P] where those of each rank begin.
    """
    begins = (table.cumsum(1) - table + torch.tensor(starts).unsqueeze(1)).t().reshape(-1)
    sizes = table.t().reshape(-1)  # in the wanted order
    within = torch.arange(int(sizes.sum())) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    return torch.repeat_interleave(begins, sizes) + within
