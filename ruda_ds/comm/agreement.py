"""One small all-gather before a step: the ranks must hold one and the same window.

Integers and float64 values travel in one int64 tensor; the floats as their bits, so nothing is rounded.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ruda_ds.comm.collectives import all_gather_single
from ruda_ds.comm.lost import naming_lost_ranks
from ruda_ds.errors import RankDisagreementError

LIMB = 2**32


def split_counter(value: int) -> tuple[int, int]:
    """A counter in 0..2^64-1 as its low and high 32 bits, which any collective carries and sums exactly."""
    return value % LIMB, value // LIMB


def join_counter(low: int, high: int) -> int:
    """The inverse of `split_counter`; also of sums of its results."""
    return low + high * LIMB


def as_integer(value: int | float) -> int:
    """A number as an integer that `shown` turns back: a float by its bits."""
    return value if isinstance(value, int) else struct.unpack("<q", struct.pack("<d", value))[0]


def shown(sent: int | float, received: int) -> int | float:
    """What another rank's integer means, in the kind of number that this rank sent."""
    return received if isinstance(sent, int) else struct.unpack("<d", struct.pack("<q", received))[0]


def exchange(fields: Mapping[str, int | float], reals: torch.Tensor, group: dist.ProcessGroup) -> list[list[float]]:
    """Compare ``fields`` over all ranks and hand every rank all ranks' ``reals``.

    Args:
        fields: name -> an integer in -2^63..2^64-1, or a float, that must be the same on every rank; the same names and
            kinds everywhere.
        reals: float64 [n] on the device that the group communicates from.
        group: all ranks of the window.

    Returns:
        [W][n] floats, by rank. This is the one host synchronisation of a step.

    Raises:
        RankDisagreementError: on every rank, naming the first field that differs and the rank that is alone with it.
    """
    words = [word for value in fields.values() for word in split_counter(as_integer(value))]
    own = torch.cat([torch.tensor(words, dtype=torch.int64).to(reals.device), reals.view(torch.int64)])
    table = torch.empty(dist.get_world_size(group) * own.numel(), dtype=torch.int64, device=own.device)
    with naming_lost_ranks(group, "the agreement before a step"):
        all_gather_single(table, own, group=group)
    rows = table.view(-1, own.numel()).cpu()
    for index, (field, sent) in enumerate(fields.items()):
        values = [join_counter(*row[2 * index : 2 * index + 2]) for row in rows.tolist()]
        _require_same(field, [shown(sent, value) for value in values])
    return rows[:, len(words) :].contiguous().view(torch.float64).tolist()


def _require_same(field: str, values: list[int | float]) -> None:
    usual, _ = Counter(values).most_common(1)[0]
    for rank, value in enumerate(values):
        if value != usual:
            raise RankDisagreementError(field, rank, value, usual)
