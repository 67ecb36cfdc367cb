"""What this process is doing, in words that a report of a failure can use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

OWN_CODE = "its own code"


class PhaseRecord:
    """The phase that the training thread stands in; other threads read it.

    Attributes:
        name: "an expert exchange", "a backward", ..., or OWN_CODE between them.
        number: phases entered so far; ranks that do the same count alike.
        since: monotonic seconds at which the phase began.
        failed_in: the innermost phase that an exception left, if none was completed since; None otherwise.
        watchdog: of this process; see watchdog.py.
    """

    def __init__(self) -> None:
        self.name, self.number, self.since = OWN_CODE, 0, time.monotonic()
        self.failed_in: str | None = None
        self.watchdog: Any = None

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Stand in a phase, inside of another or not."""
        outer = self.name
        self.name, self.number, self.since = name, self.number + 1, time.monotonic()
        try:
            yield
            self.failed_in = None  # whatever it was, this rank has gone on
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self.name, self.since = outer, time.monotonic()


# One process trains in one thread: its phase is a fact of the process, like its rank.
PHASES = PhaseRecord()
