"""Where each parameter's gradient shard lives: names, shapes, ranks. Pure: no live engine, no DeepSpeed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from ruda_ds.errors import PlacementError
from ruda_ds.shapes import element_count, padded_shard_length, shard_range


@dataclass(frozen=True)
class ParameterPlacement:
    """One floating parameter, trainable or frozen, keyed by its name in the module (a tied one stands once).

    Attributes:
        name: the first name under which ``module.named_parameters()`` yields it.
        logical_shape: shape of the whole parameter.
        rank: this process's rank among those that partition it.
        world_size: how many ranks partition it.
        dtype: storage dtype of the parameter.
        requires_grad: whether it is trained.
        fragment: ZeRO-1/2 only: the half-open range of the flattened parameter that lies in this rank's part of
            DeepSpeed's flat group. None under ZeRO-3, where the range follows from rank and world_size.
        experts: of an expert parameter: the half-open range of experts that its owner holds. Its logical shape is the
            owner's cube, (0,) on a rank without experts, and its ranks are those that hold a copy of it.
    """

    name: str
    logical_shape: tuple[int, ...]
    rank: int
    world_size: int
    dtype: torch.dtype
    requires_grad: bool
    fragment: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return element_count(self.logical_shape)

    @property
    def shard(self) -> tuple[int, int]:
        """Half-open range of the flattened parameter held by this rank, without padding."""
        return self.fragment if self.fragment is not None else shard_range(self.numel, self.world_size, self.rank)

    @property
    def shard_numel(self) -> int:
        """Elements held by this rank, without padding."""
        start, stop = self.shard
        return stop - start

    @property
    def padded_numel(self) -> int:
        """Elements of this rank's slot in DeepSpeed's buffer: ceil(N / W) under ZeRO-3, no padding otherwise."""
        return self.shard_numel if self.fragment is not None else padded_shard_length(self.numel, self.world_size)


def compare(expected: Sequence[ParameterPlacement], found: Sequence[ParameterPlacement]) -> None:
    """Raise PlacementError at the first parameter and field in which two placements differ."""
    wanted, present = {p.name: p for p in expected}, {p.name: p for p in found}
    for name in sorted(wanted.keys() | present.keys()):
        if name not in present:
            raise PlacementError(name, "presence", "a parameter of the module", "missing")
        if name not in wanted:
            raise PlacementError(name, "presence", "no such parameter", "one in the module")
        for field in fields(ParameterPlacement):
            want, have = getattr(wanted[name], field.name), getattr(present[name], field.name)
            if want != have:
                raise PlacementError(name, field.name, want, have)


def digest(placement: Sequence[ParameterPlacement]) -> int:
    """63 bits that agree on all ranks if and only if (but for collisions) their placements describe one model.

    What differs from rank to rank by design is left out: the rank, the fragment, and which experts a rank owns.
    """
    text = "\n".join(
        f"{p.name} {'experts' if p.experts else p.logical_shape} {p.world_size} {p.dtype} {p.requires_grad}"
        for p in placement
    )
    return text_hash(text)


def text_hash(text: str) -> int:
    """63 bits of a text, for ranks to compare."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
