"""What leaves an accumulator: continuations, gradients and the report of a window. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ruda_ds.accumulation.placement import ParameterPlacement
from ruda_ds.accumulation.state import AccumulationState


@dataclass(frozen=True)
class AccumulationContract:
    """All that is needed to go on with a window, without a copy of its gradients.

    Attributes:
        state: precision, scale and counters.
        placement: where each parameter's shard lies, sorted by name.
    """

    state: AccumulationState
    placement: tuple[ParameterPlacement, ...]


@dataclass(frozen=True)
class AccumulatedGradients:
    """Gradients handed out by a finished window.

    Attributes:
        gradients: name -> this rank's shard, 1-D, without padding, owned by the caller. Parameters that no rank used
            in the window are absent.
        state: the counters of the window that produced them.
    """

    gradients: Mapping[str, torch.Tensor]
    state: AccumulationState


@dataclass(frozen=True)
class WindowResult:
    """The report of a step, the same on every rank.

    Attributes:
        count: supervised tokens of the window, over all ranks.
        microbatches: micro-batches of the window.
        loss: global loss sum / max(count, 1) (weighted: / weight); None if ready-made sums were added, whose loss is
            not known.
        grad_norm: 2-norm of the mean gradient before clipping; NaN if it is not finite.
        clipped_norm: the same after clipping; equal to grad_norm where clipping is off or not needed.
        skipped: whether the optimizer and the scheduler were left alone.
        reason: why it was skipped; None if it was not.
        untouched: trainable parameters that no rank used in the window, sorted. Their gradient is exactly zero, but
            DeepSpeed steps flat groups: weight decay and momentum still act on them.
    """

    count: int
    microbatches: int
    loss: float | None
    grad_norm: float
    clipped_norm: float
    skipped: bool
    reason: str | None
    untouched: tuple[str, ...]
