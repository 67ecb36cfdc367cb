"""The same window with a fractional divisor: a sum of weights in place of the count of tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ruda_ds.accumulation.accumulator import GradientAccumulator
from ruda_ds.accumulation.checks import check_counts, check_loss
from ruda_ds.accumulation.state import AccumulationState, WeightedAccumulationState
from ruda_ds.accumulation.style import CallingStyle
from ruda_ds.accumulation.totals import MicrobatchTotals
from ruda_ds.errors import CallingStyleError, CounterOverflowError, CountError


class WeightedGradientAccumulator(GradientAccumulator):
    """A GradientAccumulator whose mean divides by a sum of weights. Driven by `backward_sum` and ``step`` only."""

    _state: WeightedAccumulationState

    def _empty_state(self, dtype: torch.dtype, loss_scale: float) -> AccumulationState:
        return WeightedAccumulationState(dtype, loss_scale)

    def _advance(self, totals: MicrobatchTotals) -> AccumulationState:
        weight = self._state.global_weight + totals.weight
        if math.isinf(torch.tensor(weight, dtype=self._state.dtype).item()):
            raise CounterOverflowError(f"global_weight would become {weight}, expected a finite {self._state.dtype}")
        advanced: Any = self._state.advanced(totals.count)
        return replace(advanced, global_weight=weight)

    def backward_sum(  # type: ignore[override]
        self,
        loss_sum: torch.Tensor,
        local_weight: float | None = None,
        local_count: int | None = None,
        *,
        global_count: int | None = None,
    ) -> None:
        """Backward of one micro-batch whose loss is a weighted sum; every rank calls it.

        Args:
            loss_sum: this rank's weighted SUM of token losses, a differentiable floating scalar.
            local_weight: this rank's sum of weights, finite, 0 or more; summed over the ranks.
            local_count, global_count: the tokens, as in `GradientAccumulator.backward_sum`.

        Raises:
            CountError: no weight, or one that is negative or not finite. Otherwise as GradientAccumulator's.
        """
        loss = check_loss(loss_sum)
        if isinstance(local_weight, bool) or not isinstance(local_weight, (int, float)):
            raise CountError(f"local_weight is {local_weight!r}, expected a number")
        if not math.isfinite(local_weight) or local_weight < 0:
            raise CountError(f"local_weight is {local_weight}, expected a finite number of 0 or more")
        local, total = check_counts(local_count, global_count)
        self._binding.tracker.require(CallingStyle.SUM)
        self.run_backward(loss, local, total, weight=float(local_weight))
        self._binding.tracker.enter(CallingStyle.SUM)

    def accumulate_sum(self, gradients: Any, global_count: int, global_weight: float | None = None) -> None:
        """Add ready-made global sums, with the weight of all ranks; see `GradientAccumulator.accumulate_sum`."""
        if global_weight is None or not math.isfinite(global_weight) or global_weight < 0:
            raise CountError(f"global_weight is {global_weight}, expected a finite number of 0 or more")
        super().accumulate_sum(gradients, global_count)
        self._state = replace(self._state, global_weight=self._state.global_weight + float(global_weight))

    def count(self, local_count: int) -> None:
        """Refused: ``engine.backward`` has no place for a weight."""
        raise CallingStyleError(
            "a weighted window is filled by backward_sum(loss_sum, local_weight=..., local_count=...)"
        )
