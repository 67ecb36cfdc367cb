"""Every exception of ruda_ds. Each message names the thing, what was expected and what was found.

Unless its text says otherwise, an error leaves the object that raised it as it was before the call.
"""

from __future__ import annotations

from typing import Any


class RudaError(Exception):
    """Base of all errors that ruda_ds raises on purpose."""


class VersionError(RudaError):
    """The installed DeepSpeed is not one whose internals ruda_ds knows, or a name that it needs is gone."""


class ConfigError(RudaError, ValueError):
    """A setting is unknown, malformed, contradictory, or not supported together with exact accumulation."""

    def __init__(self, key: str, found: Any, expected: str) -> None:
        self.key = key
        self.found = found
        self.expected = expected
        super().__init__(f"DeepSpeed config: {key!r} is {found!r}; {expected}")


class LossError(RudaError, ValueError):
    """The loss handed to backward is not one floating, differentiable scalar."""


class CountError(RudaError, ValueError):
    """A token count, or a weight, is missing, negative, not finite or of the wrong kind."""


class CounterOverflowError(RudaError, OverflowError):
    """An exact counter would leave 0..2^64-1."""


class EmptyWindowError(RudaError):
    """A mean was asked of a window that holds no micro-batch."""


class StateError(RudaError, ValueError):
    """An accumulation state is not a valid one (dtype, loss scale, counters)."""


class PlacementError(RudaError, ValueError):
    """A parameter, or a gradient shard given for it, differs from where and how it was recorded."""

    def __init__(self, parameter: str, field: str, expected: Any, found: Any) -> None:
        self.parameter = parameter
        self.field = field
        self.expected = expected
        self.found = found
        super().__init__(f"parameter {parameter!r}: {field} is {found}, expected {expected}")


class RecordError(RudaError, ValueError):
    """A contract or record does not belong to this accumulator, or contradicts itself."""


class BindingError(RudaError):
    """An engine is bound to an accumulator already; a second would count every gradient twice."""


class CallingStyleError(RudaError):
    """Two ways of driving one window were mixed, or a backward ran that no accumulator was told of."""


class BrokenWindowError(RudaError):
    """A backward failed part-way, so the pending sums are incomplete; only ``discard()`` is possible."""


class RankDisagreementError(RudaError):
    """Ranks hold different states of what must be one window. Raised on every rank."""

    def __init__(self, field: str, rank: int, found: Any, expected: Any) -> None:
        self.field = field
        self.rank = rank
        super().__init__(
            f"ranks disagree on {field}: rank {rank} holds {found}, the others hold {expected}; "
            "no rank has stepped and the window is unchanged"
        )


class HookError(RudaError):
    """The reduction hook is not called as DeepSpeed is known to call it, or gave a wrong sum in its self-test."""


class OwnershipError(RudaError, ValueError):
    """An ownership of experts, or a cube of expert weights, does not fit the experts and ranks it is for."""


class NonFiniteError(RudaError, ValueError):
    """A tensor that was to be checked holds NaN or Inf."""


class ExpertProtocolError(RudaError):
    """A rank of an expert-parallel group could not take part in an exchange. Raised on every rank of the group."""

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason
        super().__init__(f"expert exchange: rank {rank} of the expert-parallel group: {reason}")


class CheckpointError(RudaError):
    """A checkpoint cannot be written, is incomplete or damaged, or belongs to another run. Raised on every rank alike.

    A failed save leaves the last complete tag and ``latest`` as they were; a refused load changes nothing.
    """


class UnfinishedError(RudaError):
    """A conversion has stopped, and the files that it has completed are kept for the same command to go on from.

    Args:
        reason: why it has stopped.
        folder: where they are.
        complete, total: files.
    """

    def __init__(self, reason: str, folder: Any, complete: int, total: int) -> None:
        self.folder = folder
        self.complete = complete
        self.total = total
        super().__init__(
            f"{reason}; {complete} of {total} files are complete in {folder}: the same command goes on from there, or "
            "delete that folder to give up"
        )


class BuildError(RudaError):
    """A compiled operator cannot be built or loaded; the message says why, in one line where there is one."""


class SecondDerivativeError(RudaError, NotImplementedError):
    """A derivative of a gradient of the fused experts was asked for; they have first derivatives only."""


class LaunchError(RudaError):
    """The environment of the launcher does not add up to ranks, a world and an address."""


class RankFailedError(RudaError):
    """A rank of a local group of processes raised, was killed, or did not finish in time."""


class RankLostError(RudaError):
    """Other ranks of this job are gone: killed, ended, or cut off. Raised on every rank that was waiting for them.

    The process groups are broken; the job must end and resume from its last checkpoint.
    """

    def __init__(self, ranks: list[int], phase: str, word: str) -> None:
        self.ranks = ranks
        self.phase = phase
        who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {ranks} are"
        super().__init__(
            f"{who} gone (killed, ended or cut off) while this rank was in {phase}: {word}. End the job and resume "
            "from the last checkpoint"
        )
