"""The exact counters of a window. Pure: it knows no process group and no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from ruda_ds.errors import CounterOverflowError, CountError, StateError

MAX_COUNTER = 2**64 - 1


def check_count(value: object, name: str) -> int:
    """``value`` as an exact counter in 0..2^64-1.

    Raises:
        CountError: not an integer (a bool or a float is not one), or negative.
        CounterOverflowError: above 2^64-1.
    """
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_floating_point():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise CountError(f"{name} is {value!r} ({type(value).__name__}), expected an integer count of tokens")
    if value < 0:
        raise CountError(f"{name} is {value}, expected 0 or more")
    if value > MAX_COUNTER:
        raise CounterOverflowError(f"{name} is {value}, expected at most 2^64-1")
    return value


@dataclass(frozen=True)
class AccumulationState:
    """What a window of summed gradients must be divided by, and how it was summed.

    Attributes:
        dtype: torch.float32 or torch.float64, the precision of the sums.
        loss_scale: fixed multiplier of every loss sum in the window; finite, above 0, and neither 0 nor inf once
            rounded to ``dtype``.
        global_count: exact number of supervised tokens over all ranks and micro-batches, 0..2^64-1.
        microbatches: micro-batches in the window, those without a token included, 0..2^64-1.
    """

    dtype: torch.dtype
    loss_scale: float
    global_count: int = 0
    microbatches: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise StateError(f"accumulation dtype is {self.dtype}, expected torch.float32 or torch.float64")
        scale = self.loss_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
            raise StateError(f"loss_scale is {scale!r}, expected a finite number above 0")
        object.__setattr__(self, "loss_scale", float(scale))
        if not math.isfinite(self.work_scale) or self.work_scale == 0.0:
            raise StateError(f"loss_scale is {scale!r}, which {self.dtype} rounds to {self.work_scale}")
        check_count(self.global_count, "global_count")
        check_count(self.microbatches, "microbatches")
        if self.microbatches == 0 and self.global_count != 0:
            raise StateError(f"global_count is {self.global_count} in a window without a micro-batch, expected 0")

    @property
    def work_scale(self) -> float:
        """``loss_scale`` as the backward really multiplies by it: rounded to ``dtype``."""
        return torch.tensor(self.loss_scale, dtype=self.dtype).item()

    @property
    def divisor(self) -> float:
        """``loss_scale * max(global_count, 1)``, one float64 product: what each sum is divided by, once."""
        return self.work_scale * max(self.global_count, 1)

    @property
    def loss_divisor(self) -> float:
        """What the unscaled loss sum is divided by: ``max(global_count, 1)``."""
        return max(self.global_count, 1)

    @property
    def is_empty(self) -> bool:
        """Whether the window has micro-batches but nothing to divide by."""
        return self.global_count == 0

    def advanced(self, global_count: int, microbatches: int = 1) -> AccumulationState:
        """The state after ``microbatches`` more with ``global_count`` tokens; raises CounterOverflowError."""
        count, steps = self.global_count + global_count, self.microbatches + microbatches
        for name, value in (("global_count", count), ("microbatches", steps)):
            if value > MAX_COUNTER:
                raise CounterOverflowError(f"{name} would become {value}, expected at most 2^64-1")
        return replace(self, global_count=count, microbatches=steps)

    def agreed_fields(self) -> dict[str, int | float]:
        """Name and value of everything in which the ranks of a window must not differ; the dtype as its bits."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "dtype"}
        return {"dtype (bits)": torch.finfo(self.dtype).bits, **values}

    def cleared(self) -> AccumulationState:
        """The state of a new window: the same precision and scale, counters at 0."""
        return replace(self, global_count=0, microbatches=0)


@dataclass(frozen=True)
class WeightedAccumulationState(AccumulationState):
    """An AccumulationState whose divisor is a weight.

    Attributes:
        global_weight: sum of weights over all ranks and micro-batches; finite in ``dtype``, 0 or more. The integer
            counters beside it are exact as ever.
    """

    global_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.global_weight) or self.global_weight < 0:
            raise StateError(f"global_weight is {self.global_weight}, expected a finite number of 0 or more")
        if self.microbatches == 0 and self.global_weight != 0:
            raise StateError(f"global_weight is {self.global_weight} in a window without a micro-batch, expected 0")

    @property
    def divisor(self) -> float:
        """``loss_scale * global_weight``; inf where the weight is 0, so that the gradients become zero."""
        return self.work_scale * self.global_weight if self.global_weight > 0 else math.inf

    @property
    def loss_divisor(self) -> float:
        """What the loss sum is divided by: the weight, inf where it is 0."""
        return self.global_weight if self.global_weight > 0 else math.inf

    @property
    def is_empty(self) -> bool:
        """Whether there is no weight to divide by."""
        return self.global_weight == 0

    def cleared(self) -> WeightedAccumulationState:
        """The state of a new window."""
        return replace(self, global_count=0, microbatches=0, global_weight=0.0)
