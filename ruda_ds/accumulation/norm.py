"""The norm of a partitioned gradient, and clipping by it: neither overflows, underflows or counts anything twice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ruda_ds.accumulation.division import CHUNK, divide_

DEFAULT_EPSILON = 1e-6


@dataclass(frozen=True)
class NonFinite:
    """A gradient shard with a NaN or an Inf in it: whose it is, and on which rank."""

    parameter: str
    rank: int

    def __str__(self) -> str:
        return f"parameter {self.parameter!r} on rank {self.rank}"


@dataclass(frozen=True)
class GradientNorm:
    """A 2-norm kept as maximum * root, so that it is right even where the product overflows float64.

    Attributes:
        maximum: a scale, the largest magnitude where the shards are float64.
        root: the norm of the gradient divided by ``maximum``.
        nonfinite: the first offending parameter of each rank that has one; empty if the gradient is finite.
    """

    maximum: float
    root: float
    nonfinite: tuple[NonFinite, ...] = ()

    @property
    def value(self) -> float:
        """The norm as one number; inf if it overflows float64, NaN if the gradient is not finite."""
        return math.nan if self.nonfinite else self.maximum * self.root

    def divided(self, divisor: float) -> GradientNorm:
        """The norm of the gradient divided by ``divisor``."""
        return GradientNorm(self.maximum / divisor, self.root, self.nonfinite)

    def coefficient(self, max_norm: float, epsilon: float = DEFAULT_EPSILON) -> float:
        """min(1, max_norm / (norm + epsilon)); 1 if ``max_norm`` is 0 or less, DeepSpeed's word for no clipping."""
        if max_norm <= 0:
            return 1.0
        if math.isinf(self.value):
            return max_norm / self.maximum / self.root
        return min(1.0, max_norm / (self.value + epsilon))


def local_moments(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """(maximum, sum((g / maximum)^2)) of 1-D tensors on one device, float64 [2], without leaving the device.

    float32 needs one pass and the maximum 1: its squares reach 1.2e77 at most and 2e-90 at least, both well inside
    float64, in which they are summed.
    """
    tensors = [value for value in values if value.numel()]
    if not tensors:
        return torch.tensor([1.0, 0.0], dtype=torch.float64)
    device = tensors[0].device
    one = torch.ones((), dtype=torch.float64, device=device)
    maximum = one
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        largest = torch.stack([tensor.abs().amax().double() for tensor in tensors]).amax()
        maximum = torch.where(torch.isfinite(largest) & (largest > 0), largest, one)
    total = torch.zeros((), dtype=torch.float64, device=device)
    size = CHUNK if device.type == "cpu" else 1 << 26
    for tensor in tensors:
        for chunk in tensor.split(size):
            scaled = chunk.double() if maximum is one else chunk.double() / maximum
            total += torch.dot(scaled, scaled)
    return torch.stack([maximum, total])


def combine_moments(moments: Sequence[Sequence[float]]) -> GradientNorm:
    """The norm over disjoint parts, each given as (maximum, scaled sum of squares), added in the order given."""
    largest = max((maximum for maximum, total in moments if total > 0), default=1.0)
    total = sum(total * (maximum / largest) ** 2 for maximum, total in moments)
    return GradientNorm(largest, math.sqrt(total) if total >= 0 else math.nan)


def find_nonfinite(shards: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> tuple[NonFinite, ...]:
    """The first parameter, by name, with a NaN or Inf on each rank that has one. A collective over ``group``."""
    bad = next((name for name in sorted(shards) if not bool(torch.isfinite(shards[name]).all())), None)
    answers: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, bad, group=group)
    return tuple(NonFinite(name, rank) for rank, name in enumerate(answers) if name is not None)


def measure_gradient_norm(
    partitions: Mapping[str, torch.Tensor],
    *,
    replicas: int | Mapping[str, int] = 1,
    group: dist.ProcessGroup | None = None,
) -> GradientNorm:
    """The 2-norm of a gradient whose partitions lie on the ranks of ``group``; called by all of them.

    Args:
        partitions: name -> this rank's shard, 1-D, float32 or float64, without padding; a tied parameter once. Ranks
            may hold different names, or none.
        replicas: how many ranks of ``group`` hold a full copy of each element: its squares count 1 / replicas. One
            number for all, or by name.
        group: the ranks; None for the default group.

    Returns:
        The same norm on every rank. A NaN or Inf is not an error: it is named in ``nonfinite``.

    Raises:
        ValueError: a replica count below 1, or a name without one.
    """
    by_count: dict[int, list[torch.Tensor]] = {}
    for name in sorted(partitions):
        if not isinstance(replicas, int) and name not in replicas:
            raise ValueError(f"replicas has no entry for parameter {name!r}")
        count = replicas if isinstance(replicas, int) else replicas[name]
        if count < 1:
            raise ValueError(f"replicas of parameter {name!r} is {count}, expected 1 or more")
        by_count.setdefault(count, []).append(partitions[name].reshape(-1))
    rows = [(*local_moments(values).tolist(), count) for count, values in sorted(by_count.items())]
    own = combine_moments([(maximum, total / count) for maximum, total, count in rows])
    gathered: list[tuple[float, float]] = [(1.0, 0.0)] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (own.maximum, own.root**2), group=group)
    norm = combine_moments(gathered)
    if math.isfinite(norm.root):
        return norm
    return GradientNorm(norm.maximum, norm.root, find_nonfinite(partitions, group))


def clip_gradient_norm(
    partitions: Mapping[str, torch.Tensor],
    norm: GradientNorm,
    max_norm: float,
    epsilon: float = DEFAULT_EPSILON,
) -> float:
    """Scale shards in place by min(1, max_norm / (norm + epsilon)) and return that coefficient.

    The norm is an argument, measured over all ranks, so clipping needs no communication and every rank scales alike.

    Raises:
        ValueError: the norm is not finite because the gradient is not; its parameters and ranks are named.
    """
    if norm.nonfinite:
        raise ValueError("cannot clip a gradient with NaN or Inf in " + ", ".join(map(str, norm.nonfinite)))
    coefficient = norm.coefficient(max_norm, epsilon)
    if coefficient != 1.0:
        for shard in partitions.values():
            divide_(shard, 1.0 / coefficient)
    return coefficient
