"""A window on its way to a file or another process: state, placement, pending shards, loss sum. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ruda_ds.accumulation.checks import check_shards
from ruda_ds.accumulation.contract import AccumulationContract
from ruda_ds.accumulation.placement import ParameterPlacement, compare
from ruda_ds.accumulation.state import AccumulationState, WeightedAccumulationState
from ruda_ds.errors import CounterOverflowError, CountError, PlacementError, RecordError, StateError

# Of the record as a whole: what its fields mean. A change that an older reader would misread raises it.
RECORD_VERSION = 1


@dataclass(frozen=True)
class PendingGradientsRecord:
    """One rank's part of an unfinished window, complete: a copy that later backwards do not change.

    Attributes:
        version: RECORD_VERSION of the writer.
        gradients: name -> this rank's pending scaled sum, 1-D, unpadded, in the state's dtype. Parameters that no rank
            has used in the window are absent; one that is used and has no element here has an empty shard.
        state: precision, scale and exact counters, the same on every rank.
        placement: where each shard lies, sorted by name.
        loss: unscaled loss sum over ranks and micro-batches, so that the window's mean loss comes out to the bit; None
            if it is not known (ready-made sums were added).
    """

    version: int
    gradients: Mapping[str, torch.Tensor]
    state: AccumulationState
    placement: tuple[ParameterPlacement, ...]
    loss: float | None

    @property
    def contract(self) -> AccumulationContract:
        """State and placement."""
        return AccumulationContract(self.state, self.placement)


def check_record(record: PendingGradientsRecord) -> None:
    """Raise RecordError or PlacementError if a record contradicts itself or is of another version."""
    if record.version != RECORD_VERSION:
        raise RecordError(f"version of the record is {record.version}, expected {RECORD_VERSION}")
    state = record.state
    if state.microbatches == 0:
        if record.gradients:
            raise RecordError(
                f"gradients for {sorted(record.gradients)} in a record without a micro-batch, expected none"
            )
        if state.global_count or record.loss:
            raise RecordError(
                f"global_count is {state.global_count} and the loss sum {record.loss} in a record without a "
                "micro-batch, expected 0"
            )
    _check_dtypes(state, check_shards(record.placement, record.gradients))


def _check_dtypes(state: AccumulationState, shards: Mapping[str, torch.Tensor]) -> None:
    for name, shard in shards.items():
        if shard.dtype != state.dtype:
            raise PlacementError(name, "gradient dtype", state.dtype, shard.dtype)


def check_fit(
    own: AccumulationState,
    placement: Sequence[ParameterPlacement],
    contract: AccumulationContract,
    gradients: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The gradients, detached and sorted, if a window of this contract can stand where one of ``own`` does.

    Raises:
        RecordError, PlacementError: another kind of window, dtype, loss_scale, placement, or shards that do not fit it.
    """
    state = contract.state
    if type(state) is not type(own):
        raise RecordError(f"the state is a {type(state).__name__}, expected a {type(own).__name__}")
    for field in ("dtype", "loss_scale"):
        if getattr(state, field) != getattr(own, field):
            raise RecordError(f"{field} is {getattr(state, field)}, expected {getattr(own, field)}")
    compare(placement, contract.placement)
    shards = check_shards(placement, gradients)
    if state.microbatches == 0 and shards:
        raise RecordError(f"gradients for {sorted(shards)} in a window without a micro-batch, expected none")
    _check_dtypes(state, shards)
    return shards


def window_fields(state: AccumulationState, loss: float | None) -> dict[str, Any]:
    """A window's state and loss sum as JSON values that `read_window` turns back to the bit.

    Floats are written as numbers, which JSON readers of Python restore exactly; the loss sum, which may be NaN or
    infinite, as the text of ``float.hex``.
    """
    fields: dict[str, Any] = {"kind": type(state).__name__, **vars(state)}
    fields["dtype"] = str(state.dtype).removeprefix("torch.")
    fields["loss"] = None if loss is None else float(loss).hex()
    return fields


def read_window(fields: Mapping[str, Any]) -> tuple[AccumulationState, float | None]:
    """The inverse of `window_fields`.

    Raises:
        RecordError: an unknown kind of window, or a missing, unknown or impossible field.
    """
    kinds = {kind.__name__: kind for kind in (AccumulationState, WeightedAccumulationState)}
    values = dict(fields)
    kind, dtype, loss = values.pop("kind", None), values.pop("dtype", None), values.pop("loss", None)
    if kind not in kinds:
        raise RecordError(f"the window's kind is {kind!r}, expected one of {', '.join(kinds)}")
    if dtype not in ("float32", "float64"):
        raise RecordError(f"the window's dtype is {dtype!r}, expected float32 or float64")
    try:
        state = kinds[kind](dtype=getattr(torch, dtype), **values)
        return state, None if loss is None else float.fromhex(loss)
    except (TypeError, ValueError, CountError, CounterOverflowError, StateError) as error:
        raise RecordError(f"the window's fields {dict(fields)} make no {kind}: {error}") from None
