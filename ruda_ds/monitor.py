"""What a window looks like in DeepSpeed's monitor (TensorBoard, W&B, CSV, Comet: by config)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ruda_ds.accumulation import WindowResult

PREFIX = "Train/Window/"


def window_events(result: WindowResult, step: int, extra: Mapping[str, float] | None = None) -> list[tuple]:
    """(name, value, step) of each finite figure of a window; ``extra`` adds the caller's, under the same prefix."""
    figures = {
        "loss": result.loss,
        "tokens": result.count,
        "microbatches": result.microbatches,
        "grad_norm": result.grad_norm,
        "clipped_norm": result.clipped_norm,
        "skipped": int(result.skipped),
        "untouched": len(result.untouched),
        **(extra or {}),
    }
    return [
        (PREFIX + name, value, step) for name, value in figures.items() if value is not None and math.isfinite(value)
    ]


def write_window(engine: Any, result: WindowResult, extra: Mapping[str, float] | None = None) -> None:
    """Write a window's figures to the engine's monitor at its global step; does nothing where no monitor is on."""
    if engine.monitor.enabled:
        engine.monitor.write_events(window_events(result, engine.global_steps, extra))
