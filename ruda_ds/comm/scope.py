"""One chain through all exchanges of a forward, so that every rank's backward enters them, in one order.

[Note: why a chain]
An all-to-all in a backward needs every rank. Autograd runs a node only if the loss depends on it: a rank whose loss
leaves a layer out would not come, and the others would wait. ``complete`` therefore ties the output of every layer of
the scope to the loss, with a derivative of zero, so that its whole backward runs, its router's and its experts' too.
Each exchange also passes a token on, a number that is always 0: it chains the exchanges, so that those of branches
that do not depend on each other come in one order on every rank.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch

_CURRENT: ContextVar[CollectiveScope | None] = ContextVar("ruda_ds_collective_scope", default=None)


class _Tie(torch.autograd.Function):
    """The loss, depending on further tensors with derivatives of zero."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.others)
        return gradient, *zeros


class CollectiveScope:
    """Chains the exchanges of one forward. Use it around the forward of a micro-batch::

        with CollectiveScope() as scope:
            loss = model(batch)
            loss = scope.complete(loss)
        loss.backward()

    A layer outside any scope works too, but then every rank's loss must use it.
    """

    def __init__(self) -> None:
        self.token: torch.Tensor | None = None
        self._outputs: list[torch.Tensor] = []
        self._outer: Token | None = None

    def __enter__(self) -> CollectiveScope:
        self._outer = _CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer is not None:
            _CURRENT.reset(self._outer)
            self._outer = None

    def keep(self, output: torch.Tensor) -> None:
        """A layer's output, for `complete`."""
        if output.requires_grad:
            self._outputs.append(output)

    def complete(self, loss: torch.Tensor) -> torch.Tensor:
        """The same loss, depending on every tracked layer of the scope, whether it uses their results or not."""
        if self.token is None or not self.token.requires_grad:
            return loss
        return _Tie.apply(loss, self.token, *self._outputs)


def current_scope() -> CollectiveScope | None:
    """The innermost scope that this thread of control stands in."""
    return _CURRENT.get()


def next_token(device: torch.device) -> torch.Tensor:
    """What the next tracked exchange takes and passes on: the current scope's, or the begin of a chain."""
    scope = current_scope()
    if scope is not None and scope.token is not None:
        return scope.token
    return torch.zeros((), dtype=torch.float32, device=device, requires_grad=torch.is_grad_enabled())
