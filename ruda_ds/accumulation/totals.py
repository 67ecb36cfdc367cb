"""The counts and losses of micro-batches, summed over the ranks behind the backward and read when they are needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ruda_ds.comm.agreement import join_counter, split_counter
from ruda_ds.comm.lost import naming_lost_ranks

# The most tokens that one rank may count in one micro-batch. It bounds what an unread sum can hold, so that an
# overflow of the window's counter is seen before a backward and not after it.
MAX_LOCAL_COUNT = 2**48 - 1


@dataclass(frozen=True)
class MicrobatchTotals:
    """Sums over all ranks of one micro-batch: tokens (exact), unscaled loss and weight (float64)."""

    count: int
    loss: float
    weight: float


class PendingTotals:
    """One all-reduce in flight: [count low 32 bits, count high bits, loss, weight], float64.

    The halves of a count are whole numbers far below 2^53 even when summed over a million ranks, so float64 carries
    them exactly and the count needs no collective of its own.

    Args:
        local_count: this rank's tokens; None if ``global_count`` is given.
        global_count: the tokens of all ranks, where the caller knows them.
        loss: this rank's unscaled loss sum, a scalar.
        weight: this rank's weight.
        group: the data-parallel ranks.
    """

    def __init__(
        self,
        local_count: int | None,
        global_count: int | None,
        loss: torch.Tensor,
        weight: float,
        group: dist.ProcessGroup,
    ) -> None:
        self._global_count, self._group = global_count, group
        self.bound = global_count if global_count is not None else dist.get_world_size(group) * MAX_LOCAL_COUNT
        host = torch.tensor([*split_counter(local_count or 0), weight], dtype=torch.float64)
        host = host.to(loss.device, non_blocking=True)
        self._sums = torch.cat([host, loss.detach().double().reshape(1)])
        self._handle = dist.all_reduce(self._sums, group=group, async_op=True)

    def read(self) -> MicrobatchTotals:
        """Wait for the sums."""
        with naming_lost_ranks(self._group, "the sum of a micro-batch's counts"):
            self._handle.wait()
        low, high, weight, loss = self._sums.tolist()
        count = self._global_count if self._global_count is not None else join_counter(int(low), int(high))
        return MicrobatchTotals(count, loss, weight)
