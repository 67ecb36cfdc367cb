"""The engine's own calls, led into the window: ``engine.backward``, ``engine.step`` and the boundary flag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ruda_ds import _deepspeed
from ruda_ds.accumulation.checks import check_loss
from ruda_ds.accumulation.contract import WindowResult
from ruda_ds.accumulation.style import StyleTracker
from ruda_ds.comm.lost import naming_lost_ranks
from ruda_ds.errors import CountError

if TYPE_CHECKING:
    from ruda_ds.accumulation.accumulator import GradientAccumulator


class EngineBinding:
    """Shadows five methods of one engine, and keeps DeepSpeed's own for the accumulator to call.

    Args:
        engine: the engine; ``engine.accumulator`` is set.
        accumulator: where backwards and steps go.
        steps_per_window: see StyleTracker.
    """

    def __init__(self, engine: Any, accumulator: GradientAccumulator, steps_per_window: int) -> None:
        self._engine = engine
        self._accumulator = accumulator
        self._own_forward, self._own_backward, self._own_step = engine.forward, engine.backward, engine.step
        self.tracker = StyleTracker(steps_per_window)
        self.next_count: int | None = None
        shadows = {
            "forward": self.forward,
            "backward": self.backward,
            "step": self.step,
            "set_gradient_accumulation_boundary": self.tracker.announce,
            "is_gradient_accumulation_boundary": self.is_boundary,
            "accumulator": accumulator,
        }
        self._names = list(shadows)
        vars(engine).update(shadows)

    def engine_backward(self, loss: torch.Tensor, retain_graph: bool) -> None:
        """DeepSpeed's backward, dividing by nothing."""
        with naming_lost_ranks(None, "a backward"):
            self._own_backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def engine_step(self, lr_kwargs: dict | None) -> None:
        """DeepSpeed's step, always a boundary."""
        with naming_lost_ranks(None, "a step"):
            self._own_step(lr_kwargs)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """``engine.forward``, whose gathers of parameters break when a rank is lost."""
        with naming_lost_ranks(None, "a forward"):
            return self._own_forward(*inputs, **keywords)

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """``engine.backward``: ``loss`` is a SUM over the tokens that ``count`` announced.

        ``scale_wrt_gas`` is accepted for DeepSpeed's signature; a sum is divided once, at the window's end.
        """
        checked = check_loss(loss)
        if self.next_count is None:
            raise CountError(
                "engine.backward: no count for this loss; call accumulator.count(n) before each backward, with the "
                "number of supervised tokens that the loss sums over (0 if none)"
            )
        style = self.tracker.engine_style
        self.tracker.require(style)
        self._accumulator.run_backward(checked, self.next_count, None, retain_graph=retain_graph)
        self.tracker.enter(style)
        self.next_count = None
        return loss

    def step(self, lr_kwargs: dict | None = None) -> WindowResult | None:
        """``engine.step``: ends the window where the configuration or the announced boundary says so; else None."""
        self.tracker.enter(self.tracker.engine_style)
        if self.tracker.next_step_ends_window():
            return self._accumulator.end_window(lr_kwargs)
        self.tracker.calls += 1
        self._engine.micro_steps += 1
        return None

    def is_boundary(self) -> bool:
        """``engine.is_gradient_accumulation_boundary``: whether the next step ends the window, or one is running."""
        return _deepspeed.in_engine_step(self._engine) or self.tracker.next_step_ends_window()

    def restart(self, microbatches: int = 0) -> None:
        """Begin a window, or stand ``microbatches`` into a restored one."""
        self.next_count = None
        self.tracker.restart(microbatches)

    def remove(self) -> None:
        """Give the engine its methods back."""
        _deepspeed.restore(self._engine, self._names)
