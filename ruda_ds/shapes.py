"""The letters used in names and docstrings, and the arithmetic of shards. Pure: no torch, no process group.

T  tokens on this rank          K  experts a token (top_k)      E  experts in all
L  experts owned here           R  rows (assignments) held      H  hidden width
F  expert (intermediate) width  P  ranks of the expert-parallel group
W  ranks over which a parameter is partitioned                  N  elements of a parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod


def element_count(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape; 1 for a scalar's empty shape."""
    return prod(shape)


def padded_shard_length(elements: int, world_size: int) -> int:
    """ceil(N / W): the length of every rank's slot under ZeRO-3, with padding."""
    return -(-elements // world_size)


def shard_range(elements: int, world_size: int, rank: int) -> tuple[int, int]:
    """The half-open range of a flattened parameter that ``rank`` holds, without padding; (N, N) for an empty one."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected 0..{world_size - 1}")
    length = padded_shard_length(elements, world_size)
    start = min(rank * length, elements)
    return start, min(start + length, elements)
