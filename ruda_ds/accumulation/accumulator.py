"""The window: micro-batches in, one exact mean out.

[Note: roundings]
From a rank's local gradient to the mean, an element is rounded once for each addition (W - 1 over the ranks inside
the reduce-scatter, M - 1 over the micro-batches of the window) and once by the division, which takes the clipping
coefficient along; a cast to the work dtype is exact, since float32 holds every bf16 and fp16 value. It cannot be
fewer: a sum of two numbers in a fixed precision rounds, and a divisor that is known only when the window ends can be
applied only then. Stock DeepSpeed rounds more often: it divides each micro-batch by the accumulation steps and by the
world size before the wire, and multiplies by a rounded reciprocal at the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from ruda_ds import _deepspeed
from ruda_ds.accumulation.binding import EngineBinding
from ruda_ds.accumulation.checks import check_counts, check_loss, check_shards
from ruda_ds.accumulation.contract import AccumulatedGradients, AccumulationContract, WindowResult
from ruda_ds.accumulation.division import divide_
from ruda_ds.accumulation.live_placement import live_placement
from ruda_ds.accumulation.one_model import require_one_model
from ruda_ds.accumulation.placement import ParameterPlacement
from ruda_ds.accumulation.record import RECORD_VERSION, PendingGradientsRecord, check_fit, check_record
from ruda_ds.accumulation.reduction import GradientReduction, Stage3Reduction
from ruda_ds.accumulation.reduction_stage12 import Stage12Reduction
from ruda_ds.accumulation.state import MAX_COUNTER, AccumulationState, check_count
from ruda_ds.accumulation.step import take_step
from ruda_ds.accumulation.style import CallingStyle
from ruda_ds.accumulation.totals import MicrobatchTotals, PendingTotals
from ruda_ds.comm.trace import TRACE
from ruda_ds.config import RudaConfig, check_engine
from ruda_ds.errors import BindingError, BrokenWindowError, EmptyWindowError


class GradientAccumulator:
    """Accumulates the global SUM of a window's gradients in a ZeRO engine and divides it once, by the exact count.

    See [Note: roundings] for how often an element is rounded, and [Note: the path of a gradient] in reduction.py for
    what is replaced in DeepSpeed. Every rank makes the same calls; a rank without tokens runs its backward with a
    count of 0. All methods that refuse their arguments leave the window as it was.

    Args:
        engine: a DeepSpeed engine at ZeRO stage 1, 2 or 3.
        dtype: torch.float32 (pending sums live in DeepSpeed's own buffers) or torch.float64 (in ours, with a float64
            wire). None: from the config's "ruda" section, float32 if that is silent.
        loss_scale: fixed multiplier of every loss. None: from the config; fp16's static scale if that is silent.

    Raises:
        ConfigError: a stage or setting that is not supported, by key, value and what to set instead.
        BindingError: the engine is bound to an accumulator already. One of another class that stands idle, as
            `initialize` attaches it, gives way and is closed.
        HookError: the reduction gave a wrong sum in its self-test.
        RankDisagreementError: on every rank; one has another model, or other optimizer groups, than the rest.
    """

    def __init__(self, engine: Any, dtype: torch.dtype | None = None, loss_scale: float | None = None) -> None:
        present = vars(engine).get("accumulator")
        if present is not None:
            if type(present) is type(self) or present.state.microbatches:
                raise BindingError(f"the engine is bound to a {type(present).__name__} already; close() it first")
            present.close()  # another kind, standing idle: the one that initialize attached
        _deepspeed.require_supported_version()
        settings = check_engine(engine)
        state = self._empty_state(dtype or settings.dtype, settings.loss_scale if loss_scale is None else loss_scale)
        optimizer = _deepspeed.zero_optimizer(engine)
        self._engine = engine
        self._settings = settings
        self._state = state
        self._placement = live_placement(engine.module, optimizer)
        self._group = _deepspeed.data_parallel_group(optimizer)
        require_one_model(engine.module, _deepspeed.parameters_by_param_group(optimizer), self._group)
        hook = Stage3Reduction if _deepspeed.is_stage3(optimizer) else Stage12Reduction
        self._reduction: GradientReduction = hook(engine, self._placement, state.dtype)
        _deepspeed.neutralize_loss_scale(optimizer)
        _deepspeed.own_the_boundary(engine)
        self._unread: list[PendingTotals] = []
        self._loss: float | None = 0.0
        self._failure: str | None = None
        self.last_result: WindowResult | None = None
        self._binding = EngineBinding(engine, self, settings.steps_per_window)
        for module in engine.module.modules():
            if hasattr(module, "backward_scale"):  # an expert layer, which adds losses of its own
                module.backward_scale = state.work_scale

    def _empty_state(self, dtype: torch.dtype, loss_scale: float) -> AccumulationState:
        return AccumulationState(dtype, loss_scale)

    # --- what is in the window ------------------------------------------------------------------------------

    @property
    def state(self) -> AccumulationState:
        """Precision, scale and exact counters. Waits for counts that are still on the wire."""
        while self._unread:
            totals = self._unread[0].read()
            self._state = self._advance(totals)
            if self._loss is not None:
                self._loss += totals.loss
            self._unread.pop(0)
        return self._state

    def _advance(self, totals: MicrobatchTotals) -> AccumulationState:
        return self._state.advanced(totals.count)

    @property
    def placement(self) -> tuple[ParameterPlacement, ...]:
        """One ParameterPlacement for each floating parameter, sorted by name."""
        return self._placement

    @property
    def config(self) -> RudaConfig:
        """The settings in force."""
        return self._settings

    def pending(self) -> Mapping[str, torch.Tensor]:
        """name -> this rank's pending scaled sum, 1-D, unpadded: views to read, not to write or keep past the window.

        Parameters that no rank has used in the window are absent.
        """
        _deepspeed.synchronize_reduction(self._engine.optimizer)
        shards = self._reduction.pending
        return MappingProxyType({name: shards.views[name].detach() for name in sorted(shards.touched)})

    def contract(self) -> AccumulationContract:
        """State and placement: what a continuation must match."""
        self._require_whole()
        return AccumulationContract(self.state, self._placement)

    def record(self) -> PendingGradientsRecord:
        """A copy of the window, at any micro-batch boundary: state, placement, pending shards and loss sum.

        Nothing changes in memory.

        Raises:
            BrokenWindowError: an earlier backward failed part-way.
        """
        window = self.live_record()
        return replace(window, gradients={name: shard.clone() for name, shard in window.gradients.items()})

    def live_record(self) -> PendingGradientsRecord:
        """`record` without the copy: its shards are the pending sums themselves, to be written out before the next
        backward. A device that training fills has no room for a second set."""
        contract = self.contract()
        return PendingGradientsRecord(RECORD_VERSION, self.pending(), contract.state, contract.placement, self._loss)

    # --- filling it -----------------------------------------------------------------------------------------

    def backward_sum(
        self, loss_sum: torch.Tensor, local_count: int | None = None, *, global_count: int | None = None
    ) -> None:
        """Backward of one micro-batch; every rank calls it, with a count of 0 where it has no token.

        Args:
            loss_sum: this rank's SUM of token losses, a differentiable floating scalar, neither divided nor scaled.
            local_count: supervised tokens in it. Summed over the ranks behind the backward.
            global_count: instead of local_count: the tokens of all ranks, the same number on each.

        Raises:
            LossError, CountError, CounterOverflowError: the window is as before.
            CallingStyleError: the window was begun in another style.
            BrokenWindowError: an earlier backward failed part-way.
        """
        loss = check_loss(loss_sum)
        local, total = check_counts(local_count, global_count)
        self._binding.tracker.require(CallingStyle.SUM)
        self.run_backward(loss, local, total)
        self._binding.tracker.enter(CallingStyle.SUM)

    def accumulate_sum(self, gradients: Mapping[str, torch.Tensor], global_count: int) -> None:
        """Add shards that are global sums of ``loss_scale`` times the gradient already, as one micro-batch.

        Args:
            gradients: name -> this rank's shard, floating, unpadded, of the placement's length. The same names on
                every rank; parameters may be left out.
            global_count: the tokens of all ranks.

        Raises:
            PlacementError: an unknown or frozen parameter, a wrong length or dtype.
        """
        count = check_count(global_count, "global_count")
        shards = check_shards(self._placement, gradients)
        self._require_whole()
        self._binding.tracker.require(CallingStyle.SUM)
        self._state = self.state.advanced(count)
        self._loss = None
        _deepspeed.synchronize_reduction(self._engine.optimizer)
        self._reduction.pending.add(list(shards), list(shards.values()))
        self._binding.tracker.enter(CallingStyle.SUM)

    def count(self, local_count: int) -> None:
        """Say how many supervised tokens the loss of the next ``engine.backward(loss_sum)`` sums over, on this rank."""
        self._binding.next_count, _ = check_counts(local_count, None)

    def _require_bound(self) -> None:
        if vars(self._engine).get("accumulator") is not self:
            raise BindingError(
                "this accumulator was closed, or another was bound to its engine; use engine.accumulator"
            )

    def _require_whole(self) -> None:
        self._require_bound()
        if self._failure is not None:
            raise BrokenWindowError(
                f"a backward of this window failed part-way ({self._failure}), so its sums are incomplete; "
                "call discard() on every rank and repeat the window"
            )

    def run_backward(
        self,
        loss: torch.Tensor,
        local_count: int | None,
        global_count: int | None,
        weight: float = 0.0,
        retain_graph: bool = False,
    ) -> None:
        """Backward of a checked loss with checked counts, in whatever style it came in."""
        self._require_whole()
        totals = PendingTotals(local_count, global_count, loss, weight, self._group)
        bound = self._state.global_count + totals.bound + sum(earlier.bound for earlier in self._unread)
        if bound > MAX_COUNTER:  # on every rank alike: near the limit the sum is read before the backward
            _ = self.state
            self._advance(totals.read())
        scale = self._state.work_scale
        scaled = loss.to(self._state.dtype)
        self._reduction.begin_backward()
        try:
            self._binding.engine_backward(scaled if scale == 1.0 else scaled * scale, retain_graph)
            self._reduction.end_backward()
        except BaseException as error:
            if self._reduction.abandon_backward():
                self._failure = f"{type(error).__name__}: {error}"
            raise
        self._unread.append(totals)

    # --- emptying it ----------------------------------------------------------------------------------------

    def finish_sums(self) -> AccumulatedGradients:
        """Hand out the scaled sums as they are, and begin a new window."""
        return self._finish(lambda shard: shard, needs_microbatch=False)

    def finish_mean(self) -> AccumulatedGradients:
        """Hand out the sums divided once by ``state.divisor``, and begin a new window.

        Raises:
            EmptyWindowError: the window has no micro-batch.
        """
        divisor = self.state.divisor
        return self._finish(lambda shard: divide_(shard, divisor))

    def finish_native_mean(self) -> AccumulatedGradients:
        """`finish_mean`, each shard then rounded to its parameter's storage dtype."""
        mean = self.finish_mean()
        dtypes = {p.name: p.dtype for p in self._placement}
        return AccumulatedGradients({n: g.to(dtypes[n]) for n, g in mean.gradients.items()}, mean.state)

    def _finish(self, transform: Any, needs_microbatch: bool = True) -> AccumulatedGradients:
        self._require_whole()
        state = self.state
        if needs_microbatch and state.microbatches == 0:
            raise EmptyWindowError("finish_mean: the window holds no micro-batch, expected at least one")
        gradients = {name: transform(shard.clone()) for name, shard in self.pending().items()}
        self._clear()
        return AccumulatedGradients(gradients, state)

    def step(self, lr_kwargs: dict | None = None) -> WindowResult:
        """End the window: agree, divide once, clip, step the optimizer and the scheduler.

        The step is skipped, and reported, if the gradient is not finite or (by default) if the window has no token.

        Raises:
            EmptyWindowError: no micro-batch. RankDisagreementError: ranks hold different windows; nothing is changed.
        """
        self._binding.tracker.require(CallingStyle.SUM)
        return self.end_window(lr_kwargs)

    def end_window(self, lr_kwargs: dict | None) -> WindowResult:
        """`step`, in whatever style the window was filled."""
        self._require_whole()
        state = self.state
        if state.microbatches == 0:
            raise EmptyWindowError("step: the window holds no micro-batch, expected at least one")
        result = take_step(
            engine=self._engine,
            engine_step=lambda: self._binding.engine_step(lr_kwargs),
            reduction=self._reduction,
            contract=AccumulationContract(state, self._placement),
            loss=self._loss,
            settings=self._settings,
            group=self._group,
        )
        self._clear()
        self.last_result = result
        return result

    def discard(self) -> None:
        """Throw the window away, whole or broken. Every rank must do so."""
        self._clear()

    def _clear(self) -> None:
        self._reduction.clear()
        self._unread.clear()
        self._state = self._state.cleared()
        self._loss = 0.0
        self._failure = None
        self._binding.restart()
        TRACE.clear()

    # --- continuing one -------------------------------------------------------------------------------------

    @classmethod
    def from_contract(
        cls, engine: Any, contract: AccumulationContract, gradients: Mapping[str, torch.Tensor]
    ) -> GradientAccumulator:
        """The engine's accumulator (bound now, if it has none), standing in the window that ``contract`` describes.

        Args:
            engine: the engine, its parameters and optimizer restored by a training record of the caller's.
            contract: of the saved window.
            gradients: name -> this rank's pending shard, in the contract's dtype; untouched parameters absent.

        Raises:
            PlacementError, RecordError: what was expected and found; the accumulator's window is as before.
        """
        accumulator = vars(engine).get("accumulator")
        if accumulator is None:
            accumulator = cls(engine, contract.state.dtype, contract.state.loss_scale)
        accumulator._restore(contract, gradients, None)
        return accumulator

    def check_record(self, record: PendingGradientsRecord) -> None:
        """Raise what `load_record` would raise, and change nothing."""
        self._require_bound()
        check_record(record)
        check_fit(self._state, self._placement, record.contract, record.gradients)

    def load_record(self, record: PendingGradientsRecord) -> None:
        """Stand in the window of a record, in place of the present one. Every rank loads its own.

        Raises:
            RecordError, PlacementError: another version, placement, dtype, loss_scale or kind of window, or a record
                that contradicts itself; the accumulator's window is as before.
            BindingError: this accumulator was closed.
        """
        check_record(record)
        self._restore(record.contract, record.gradients, record.loss)

    def _restore(
        self, contract: AccumulationContract, gradients: Mapping[str, torch.Tensor], loss: float | None
    ) -> None:
        self._require_bound()
        shards, state = check_fit(self._state, self._placement, contract, gradients), contract.state
        self._clear()
        self._state = state
        self._loss = loss if state.microbatches else 0.0
        self._binding.restart(state.microbatches)
        _deepspeed.count_backwards(self._engine, state.microbatches)
        self._reduction.pending.add(list(shards), list(shards.values()))

    def close(self) -> None:
        """Give the engine its own methods back, for another accumulator. The window is thrown away.

        It is not a way back to stock DeepSpeed: the loss scale stays 1 and each ``step()`` a boundary.
        """
        self._clear()
        self._reduction.remove()
        self._binding.remove()
