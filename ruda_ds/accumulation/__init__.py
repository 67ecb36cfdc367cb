"""The accumulation contract: windows of gradients that are sums, divided once by the exact count of tokens."""

from ruda_ds.accumulation.accumulator import GradientAccumulator
from ruda_ds.accumulation.contract import AccumulatedGradients, AccumulationContract, WindowResult
from ruda_ds.accumulation.norm import GradientNorm, NonFinite, clip_gradient_norm, measure_gradient_norm
from ruda_ds.accumulation.placement import ParameterPlacement, inspect
from ruda_ds.accumulation.record import PendingGradientsRecord
from ruda_ds.accumulation.state import AccumulationState
from ruda_ds.accumulation.weighted import WeightedAccumulationState, WeightedGradientAccumulator

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
