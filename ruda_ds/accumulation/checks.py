"""What the accumulator's calls accept. Pure: each check raises before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ruda_ds.accumulation.placement import ParameterPlacement
from ruda_ds.accumulation.state import check_count
from ruda_ds.accumulation.totals import MAX_LOCAL_COUNT
from ruda_ds.errors import CountError, LossError, PlacementError


def check_loss(loss: object) -> torch.Tensor:
    """``loss`` as a 0-dim tensor; raises LossError unless it is one floating, differentiable number."""
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"the loss is a {type(loss).__name__}, expected a tensor with one floating element")
    if not loss.dtype.is_floating_point or loss.numel() != 1:
        raise LossError(f"the loss has dtype {loss.dtype} and shape {tuple(loss.shape)}, expected one floating element")
    if not loss.requires_grad:
        raise LossError(
            "the loss does not require grad, expected a differentiable sum; on a rank without tokens pass "
            "(logits * 0).sum(), so that its backward takes part in the collectives"
        )
    return loss.reshape(())


def check_counts(local: int | None, total: int | None) -> tuple[int | None, int | None]:
    """(local_count, global_count), one of them None; raises CountError unless exactly one valid count is given."""
    if (local is None) == (total is None):
        raise CountError(
            f"local_count is {local} and global_count is {total}, expected exactly one of them: without a count of "
            "tokens the window has no divisor, and a mean of means would be wrong"
        )
    if local is None:
        return None, check_count(total, "global_count")
    local = check_count(local, "local_count")
    if local > MAX_LOCAL_COUNT:
        raise CountError(f"local_count is {local}, expected at most {MAX_LOCAL_COUNT} a rank and micro-batch")
    return local, None


def check_shards(
    placement: Iterable[ParameterPlacement], gradients: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """``gradients``, detached and sorted by name; raises PlacementError at the first that does not fit."""
    known = {p.name: p for p in placement}
    for name, shard in gradients.items():
        if name not in known:
            raise PlacementError(name, "presence", "the name of a parameter", "unknown")
        if not known[name].requires_grad:
            raise PlacementError(name, "requires_grad", "no gradient, it is frozen", "a gradient")
        if not shard.dtype.is_floating_point:
            raise PlacementError(name, "gradient dtype", "a floating dtype", shard.dtype)
        if shard.ndim != 1 or shard.numel() != known[name].shard_numel:
            raise PlacementError(name, "gradient shape", (known[name].shard_numel,), tuple(shard.shape))
    return {name: gradients[name].detach() for name in sorted(gradients)}
