"""The end of a window: the ranks agree on what they hold, then step or skip together."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ruda_ds import _deepspeed
from ruda_ds.accumulation.contract import AccumulationContract, WindowResult
from ruda_ds.accumulation.norm import GradientNorm, combine_moments, find_nonfinite, local_moments
from ruda_ds.accumulation.placement import digest, text_hash
from ruda_ds.accumulation.reduction import GradientReduction
from ruda_ds.comm.agreement import exchange
from ruda_ds.comm.trace import TRACE
from ruda_ds.config import RudaConfig


def take_step(
    *,
    engine: Any,
    engine_step: Callable[[], None],
    reduction: GradientReduction,
    contract: AccumulationContract,
    loss: float | None,
    settings: RudaConfig,
    group: dist.ProcessGroup,
) -> WindowResult:
    """Divide the pending sums once and let DeepSpeed step, or decide on every rank alike that it must not.

    Args:
        engine: the engine, for its counters.
        engine_step: DeepSpeed's own step.
        reduction: the hook, holding the pending sums.
        contract: the window's state, with at least one micro-batch, and placement.
        loss: global unscaled loss sum, None if unknown.
        settings: clipping and the rule for empty windows.
        group: all ranks of the window.

    Raises:
        RankDisagreementError: on every rank; nothing has changed.
    """
    state = contract.state
    used = reduction.used_by_any_rank()
    norm = _agree(reduction, contract, used, group).divided(state.divisor)
    coefficient = 1.0 if norm.nonfinite else norm.coefficient(settings.gradient_clipping)
    reason = None
    if norm.nonfinite:
        reason = "the gradient is not finite: " + ", ".join(map(str, norm.nonfinite))
    elif state.is_empty and settings.skip_empty_window:
        reason = f"empty window: no supervised token in {state.microbatches} micro-batches"
    if reason is None:
        reported = min(norm.value, sys.float_info.max)  # DeepSpeed takes an infinite norm for a failed step
        reduction.hand_over(state.divisor / coefficient, reported)
        engine_step()
        if not engine.was_step_applied():
            reason = "DeepSpeed found an overflow that the measured norm does not show"
    else:
        _deepspeed.book_skipped_step(engine)
    return WindowResult(
        count=state.global_count,
        microbatches=state.microbatches,
        loss=None if loss is None else loss / state.loss_divisor,
        grad_norm=norm.value,
        clipped_norm=norm.value * coefficient,
        skipped=reason is not None,
        reason=reason,
        untouched=tuple(p.name for p in contract.placement if p.requires_grad and p.name not in used),
    )


def _agree(
    reduction: GradientReduction, contract: AccumulationContract, used: set[str], group: dist.ProcessGroup
) -> GradientNorm:
    """The norm of the scaled sums, once all ranks are known to hold the same window."""
    _deepspeed.synchronize_reduction(reduction.optimizer)
    shards = reduction.pending
    shards.zero_untouched()
    moments = local_moments([shards.flat])
    fields = {
        "placement (hash)": digest(contract.placement),
        "used parameters (hash)": text_hash("\n".join(sorted(used))),
        **contract.state.agreed_fields(),
        **TRACE.fields(),
    }
    device = _deepspeed.gradient_device(reduction.optimizer)
    norm = combine_moments(exchange(fields, moments.to(device), group))
    if math.isfinite(norm.root):
        return norm
    return GradientNorm(norm.maximum, norm.root, find_nonfinite(shards.views, group))
