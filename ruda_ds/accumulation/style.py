"""The three ways in which people drive a DeepSpeed engine, and the rule that one window knows only one of them."""

from __future__ import annotations

from enum import Enum

from ruda_ds.errors import CallingStyleError


class CallingStyle(Enum):
    """How the micro-batches of the current window came in."""

    # No micro-batch yet, or a restored window that nobody has gone on with.
    UNDECIDED = "no call yet"
    # accumulator.backward_sum / accumulate_sum, then accumulator.step: the caller ends the window.
    SUM = "accumulator.backward_sum + accumulator.step"
    # engine.backward + engine.step for each micro-batch: gradient_accumulation_steps ends the window.
    EVERY_STEP = "engine.backward + engine.step for each micro-batch"
    # set_gradient_accumulation_boundary before each backward, as Accelerate does: the flag ends the window.
    BOUNDARY = "set_gradient_accumulation_boundary + engine.backward"


class StyleTracker:
    """Decides whether ``engine.step()`` ends the window.

    Args:
        steps_per_window: gradient_accumulation_steps; 1 if the config gives the boundary to the caller
            (`managed_gradient_accumulation: false`).
    """

    def __init__(self, steps_per_window: int) -> None:
        self.steps_per_window = steps_per_window
        self.style = CallingStyle.UNDECIDED
        self.announced: bool | None = None
        self.calls = 0

    def require(self, style: CallingStyle) -> None:
        """Raise CallingStyleError if the window began in another style; decide nothing yet."""
        if self.style not in (CallingStyle.UNDECIDED, style):
            raise CallingStyleError(
                f"this window was begun by {self.style.value}; {style.value} cannot go on with it. "
                "Finish it with the calls it began with"
            )

    def enter(self, style: CallingStyle) -> None:
        """Go on in ``style``; raises as `require` does."""
        self.require(style)
        self.style = style

    @property
    def engine_style(self) -> CallingStyle:
        """The style in which a call of the engine's own methods would go on."""
        return CallingStyle.EVERY_STEP if self.announced is None else CallingStyle.BOUNDARY

    def announce(self, is_boundary: bool) -> None:
        """The caller says whether the next micro-batch is the window's last."""
        self.enter(CallingStyle.BOUNDARY)
        self.announced = bool(is_boundary)

    def next_step_ends_window(self) -> bool:
        """Whether the next engine.step() is the window's last."""
        if self.announced is not None:
            return self.announced
        return (self.calls + 1) % self.steps_per_window == 0

    def restart(self, microbatches: int = 0) -> None:
        """Begin a window, or stand ``microbatches`` into a restored one."""
        self.style = CallingStyle.UNDECIDED
        self.announced = None
        self.calls = microbatches
