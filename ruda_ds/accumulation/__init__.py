"""The accumulation contract: windows of gradients that are sums, divided once by the exact count of tokens.

Importing this package is light: a module loads when a name of it is first used; what reads a window from disk
needs its records, not DeepSpeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ruda_ds import lazy

_HOME = {
    "AccumulatedGradients": "ruda_ds.accumulation.contract",
    "AccumulationContract": "ruda_ds.accumulation.contract",
    "AccumulationState": "ruda_ds.accumulation.state",
    "GradientAccumulator": "ruda_ds.accumulation.accumulator",
    "GradientNorm": "ruda_ds.accumulation.norm",
    "NonFinite": "ruda_ds.accumulation.norm",
    "ParameterPlacement": "ruda_ds.accumulation.placement",
    "PendingGradientsRecord": "ruda_ds.accumulation.record",
    "WeightedAccumulationState": "ruda_ds.accumulation.state",
    "WeightedGradientAccumulator": "ruda_ds.accumulation.weighted",
    "WindowResult": "ruda_ds.accumulation.contract",
    "clip_gradient_norm": "ruda_ds.accumulation.norm",
    "inspect": "ruda_ds.accumulation.live_placement",
    "measure_gradient_norm": "ruda_ds.accumulation.norm",
}

__all__ = [
    "AccumulatedGradients",
    "AccumulationContract",
    "AccumulationState",
    "GradientAccumulator",
    "GradientNorm",
    "NonFinite",
    "ParameterPlacement",
    "PendingGradientsRecord",
    "WeightedAccumulationState",
    "WeightedGradientAccumulator",
    "WindowResult",
    "clip_gradient_norm",
    "inspect",
    "measure_gradient_norm",
]

if TYPE_CHECKING:
    from ruda_ds.accumulation.accumulator import GradientAccumulator
    from ruda_ds.accumulation.contract import AccumulatedGradients, AccumulationContract, WindowResult
    from ruda_ds.accumulation.live_placement import inspect
    from ruda_ds.accumulation.norm import GradientNorm, NonFinite, clip_gradient_norm, measure_gradient_norm
    from ruda_ds.accumulation.placement import ParameterPlacement
    from ruda_ds.accumulation.record import PendingGradientsRecord
    from ruda_ds.accumulation.state import AccumulationState, WeightedAccumulationState
    from ruda_ds.accumulation.weighted import WeightedGradientAccumulator
else:  # Unseen by a type checker, which would take any name as known.
    __getattr__, __dir__ = lazy.attributes(__name__, _HOME)
