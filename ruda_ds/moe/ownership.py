"""Which rank owns which experts. Pure: any contiguous split, uneven or empty."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from ruda_ds.errors import OwnershipError


class ExpertOwnership:
    """Contiguous ownership of E experts by P ranks.

    Args:
        prefix: P + 1 integers from 0 to E, not decreasing: rank r owns experts prefix[r] .. prefix[r + 1] - 1. Ranks
            without an expert are legal.

    Raises:
        OwnershipError: what was expected of the prefix and what was found.
    """

    def __init__(self, prefix: Sequence[int]) -> None:
        values = tuple(prefix)
        if len(values) < 2 or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise OwnershipError(f"prefix is {values}, expected at least two integers")
        if values[0] != 0:
            raise OwnershipError(f"prefix {values} begins at {values[0]}, expected 0")
        for rank, (start, stop) in enumerate(pairwise(values)):
            if stop < start:
                raise OwnershipError(
                    f"prefix {values} falls from {start} to {stop} at rank {rank}, expected no decrease"
                )
        if values[-1] == 0:
            raise OwnershipError(f"prefix {values} ends at 0, expected the number of experts, 1 or more")
        self.prefix = values

    @property
    def world_size(self) -> int:
        """P, the ranks of the expert-parallel group."""
        return len(self.prefix) - 1

    @property
    def num_experts(self) -> int:
        """E, the experts in all."""
        return self.prefix[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        """Experts owned, by rank."""
        return tuple(stop - start for start, stop in pairwise(self.prefix))

    def range(self, rank: int) -> range:
        """The experts of a rank."""
        if not 0 <= rank < self.world_size:
            raise OwnershipError(f"rank is {rank}, expected 0..{self.world_size - 1}")
        return range(self.prefix[rank], self.prefix[rank + 1])

    def owner(self, expert: int) -> int:
        """The rank that owns an expert."""
        if not 0 <= expert < self.num_experts:
            raise OwnershipError(f"expert is {expert}, expected 0..{self.num_experts - 1}")
        return bisect_right(self.prefix, expert) - 1

    @classmethod
    def even(cls, num_experts: int, world_size: int) -> ExpertOwnership:
        """As equal as can be: the first ``num_experts % world_size`` ranks own one more."""
        if world_size < 1:
            raise OwnershipError(f"world size is {world_size}, expected 1 or more")
        share, rest = divmod(num_experts, world_size)
        prefix = [0]
        for rank in range(world_size):
            prefix.append(prefix[-1] + share + (rank < rest))
        return cls(prefix)

    @classmethod
    def balanced(cls, loads: Sequence[float], world_size: int) -> ExpertOwnership:
        """The contiguous split whose most loaded rank has the least load (ties: fewer experts on the earlier ranks).

        Args:
            loads: load of each expert, 0 or more, in any unit.
        """
        if world_size < 1 or not loads or any(not load >= 0 for load in loads):
            raise OwnershipError(
                f"loads are {list(loads)} for {world_size} ranks, expected loads of 0 or more, and a rank"
            )
        sums = [0.0]
        for load in loads:
            sums.append(sums[-1] + load)
        # best[p][e]: the least possible maximum when the first e experts are on p ranks, and where the last cut is.
        experts = len(loads)
        best = [(value, 0) for value in sums]
        cuts: list[list[int]] = []
        for _ in range(1, world_size):
            row = [
                min((max(best[cut][0], sums[stop] - sums[cut]), cut) for cut in range(stop + 1))
                for stop in range(experts + 1)
            ]
            best = row
            cuts.append([cut for _, cut in row])
        prefix = [experts]
        for row_cuts in reversed(cuts):
            prefix.append(row_cuts[prefix[-1]])
        return cls([*reversed([*prefix, 0])]) if world_size > 1 else cls([0, experts])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertOwnership) and other.prefix == self.prefix

    def __hash__(self) -> int:
        return hash(self.prefix)

    def __repr__(self) -> str:
        return f"ExpertOwnership({list(self.prefix)})"


def ownership_of(setting: str | Sequence[int], num_experts: int, world_size: int) -> ExpertOwnership:
    """The ownership that a setting ("even", or a prefix) means.

    Raises:
        OwnershipError: the prefix is for another number of ranks or experts.
    """
    if isinstance(setting, str):
        return ExpertOwnership.even(num_experts, world_size)
    ownership = ExpertOwnership(setting)
    if (ownership.num_experts, ownership.world_size) != (num_experts, world_size):
        raise OwnershipError(f"{ownership} does not fit {num_experts} experts on {world_size} ranks")
    return ownership
