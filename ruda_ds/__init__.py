"""ruda_ds makes DeepSpeed exact: windows of gradients that are sums, divided once by the exact count of tokens.

Importing this package is light: torch and deepspeed load when a name that needs them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "initialize": "ruda_ds.engine",
    "attach": "ruda_ds.engine",
    "GradientAccumulator": "ruda_ds.accumulation",
    "WeightedGradientAccumulator": "ruda_ds.accumulation",
    "AccumulationState": "ruda_ds.accumulation",
    "AccumulationContract": "ruda_ds.accumulation",
    "AccumulatedGradients": "ruda_ds.accumulation",
    "ParameterPlacement": "ruda_ds.accumulation",
    "WindowResult": "ruda_ds.accumulation",
    "measure_gradient_norm": "ruda_ds.accumulation",
    "save_checkpoint": "ruda_ds.checkpoint",
    "load_checkpoint": "ruda_ds.checkpoint",
    "clip_gradient_norm": "ruda_ds.accumulation",
}

__all__ = [
    "AccumulatedGradients",
    "AccumulationContract",
    "AccumulationState",
    "GradientAccumulator",
    "ParameterPlacement",
    "WeightedGradientAccumulator",
    "WindowResult",
    "__version__",
    "attach",
    "clip_gradient_norm",
    "initialize",
    "load_checkpoint",
    "measure_gradient_norm",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ruda_ds' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


if TYPE_CHECKING:
    from ruda_ds.accumulation import (
        AccumulatedGradients,
        AccumulationContract,
        AccumulationState,
        GradientAccumulator,
        ParameterPlacement,
        WeightedGradientAccumulator,
        WindowResult,
        clip_gradient_norm,
        measure_gradient_norm,
    )
    from ruda_ds.checkpoint import load_checkpoint, save_checkpoint
    from ruda_ds.engine import attach, initialize
