"""All ranks go on, or all raise the same error: a save or load must not end differently here and there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ruda_ds.errors import CheckpointError, RudaError

T = TypeVar("T")


def agree(group: dist.ProcessGroup, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on every rank and hand every rank all results, by rank. A collective.

    Args:
        action: may differ from rank to rank; its result must pickle.

    Raises:
        CheckpointError: on every rank, with the message of the first rank whose action raised.
    """
    value, failure = None, None
    cause: Exception | None = None
    try:
        value = action()
    except Exception as error:
        cause = error
        failure = str(error) if isinstance(error, RudaError) else f"{type(error).__name__}: {error}"
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (value, failure), group=group)
    failed = [(rank, message) for rank, (_, message) in enumerate(answers) if message is not None]
    if failed:
        rank, message = failed[0]
        others = f" (and on ranks {[other for other, _ in failed[1:]]})" if len(failed) > 1 else ""
        raise CheckpointError(f"rank {rank} of {len(answers)}{others}: {message}") from cause
    return [value for value, _ in answers]


def on_first(group: dist.ProcessGroup, action: Callable[[], T]) -> T:
    """Run ``action`` on the group's first rank alone and hand its result to all; see `agree`."""
    found = agree(group, action if dist.get_rank(group) == 0 else lambda: None)
    return found[0]  # type: ignore[return-value]


def require_same(group: dist.ProcessGroup, fields: dict[str, Any]) -> None:
    """Raise CheckpointError on every rank if ranks differ in a field; values must compare by their text."""
    everyone = agree(group, lambda: {name: repr(value) for name, value in fields.items()})
    for rank, found in enumerate(everyone):
        for name, value in everyone[0].items():
            if found[name] != value:
                raise CheckpointError(f"ranks disagree on {name}: rank {rank} has {found[name]}, rank 0 {value}")
