"""What this rank has exchanged since the last step, as a rolling signature: ranks that did other things, or the same in
another order, are told apart before a step mixes their gradients. Where all of a group's ranks do the same and another
group's something else, no header shows it."""

from __future__ import annotations

_BITS = 62
# 2^64 divided by the golden ratio: neighbouring values end far apart (Knuth, The Art of Computer Programming, 6.4).
_MULTIPLIER = 0x9E3779B97F4A7C15


class ExchangeTrace:
    """The exchanges of a window that are part of its gradient.

    Attributes:
        count: how many there were.
        signature: of their layers, in order.
    """

    def __init__(self) -> None:
        self.count = self.signature = 0

    def note(self, layer: int) -> None:
        """An exchange of an expert layer."""
        self.count += 1
        self.signature = ((self.signature + layer + 1) * _MULTIPLIER) % (1 << _BITS)

    def fields(self) -> dict[str, int]:
        """What must be the same on every rank at a step."""
        return {"expert exchanges": self.count, "expert exchanges (signature)": self.signature}

    def clear(self) -> None:
        """A window is over."""
        self.count = self.signature = 0


# One process issues its collectives from one thread: what it issued is a fact of the process, like its rank.
TRACE = ExchangeTrace()
