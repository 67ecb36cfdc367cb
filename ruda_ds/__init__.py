"""ruda_ds makes DeepSpeed exact: windows of gradients that are sums, divided once by the exact count of tokens.

Importing this package is light: torch and deepspeed load when a name that needs them is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ruda_ds import lazy

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
    # Subpackages: `import ruda_ds` is enough to write `ruda_ds.moe.replace_moe_blocks`.
    "accumulation": "ruda_ds.accumulation",
    "checkpoint": "ruda_ds.checkpoint",
    "moe": "ruda_ds.moe",
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

if TYPE_CHECKING:
    from ruda_ds import accumulation as accumulation
    from ruda_ds import checkpoint as checkpoint
    from ruda_ds import moe as moe
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
else:  # Unseen by a type checker, which would take any name as known.
    __getattr__, __dir__ = lazy.attributes(__name__, _HOME)
