"""Rows to the owners of their experts, results back and summed, as autograd sees them: each backward is the way round.

Letters: T tokens, K experts a token, H hidden width, P ranks; see [Note: own rows stay] for the order of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from ruda_ds.comm.exchange import move_rows, require_good
from ruda_ds.moe.dispatch import Dispatch, Route
from ruda_ds.ops.rows import combine_rows, combine_rows_backward, fresh_rows, sum_rows


class Send(torch.autograd.Function):
    """Tokens [T, H] -> the rows of this rank's experts: its own, then those that arrive from the others.

    The backward adds a token's K gradients in ascending expert order, in float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        token: torch.Tensor,
        dispatch: Dispatch,
        owners: torch.Tensor,
        route: Route,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``owners`` [T, K]: the rank of each assignment's expert; ``compiled``: see ops/rows.py."""
        ctx.route, ctx.compiled = route, compiled
        ctx.save_for_backward(dispatch.slots + route.shifts(route.out()).to(owners.device)[owners])
        before, own, after = dispatch.tokens.split([sum(p) for p in _around(route)])
        with record_function("ruda.dispatch"):
            arrived = fresh_rows(x, route.own + sum(route.into()), compiled)
            leaving = fresh_rows(x, len(before) + len(after), compiled)
            torch.index_select(x, 0, own, out=arrived[: route.own])
            torch.index_select(x, 0, torch.cat([before, after]), out=leaving)
        with record_function("ruda.exchange"):
            move_rows(arrived[route.own :], leaving, route.into(), route.out(), route.group)
        return arrived, token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of tokens and token."""
        (slots,), route = ctx.saved_tensors, ctx.route
        gradient = gradient.contiguous()
        own, arrived = gradient[: route.own], gradient[route.own :]
        # The compiled sum takes rows that lie in two places; for torch's they must lie in one.
        count = sum(route.out())
        whole = fresh_rows(gradient, count if ctx.compiled else route.own + count, ctx.compiled)
        back = whole[len(whole) - count :]
        with record_function("ruda.backward.exchange"):
            move_rows(back, arrived, route.out(), route.into(), route.group)
        with record_function("ruda.backward.dispatch"):
            if ctx.compiled:
                return sum_rows(own, slots, True, more=back), token, None, None, None, None
            whole[: route.own] = own
            return sum_rows(whole, slots), token, None, None, None, None


def _around(route: Route) -> tuple[list[int], list[int], list[int]]:
    """Rows for the ranks before this one, for it, and for those after it."""
    return route.sent[: route.rank], [route.own], route.sent[route.rank + 1 :]


class Return(torch.autograd.Function):
    """Results of this rank's experts -> [T, H]: sum over k of weights [T, K] times the results of a token's experts,
    in float32 and ascending expert order.

    ``term`` is a scalar loss that the layer adds by itself: its derivative is what ``account`` returns. ``account`` is
    called once for each backward that uses the layer, which activation checkpointing of any kind does not repeat.
    """

    @staticmethod
    def forward(
        ctx: Any,
        results: torch.Tensor,
        token: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
        owners: torch.Tensor,
        term: torch.Tensor,
        account: Callable[[], float],
        route: Route,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``slots`` [T, K] of Dispatch; the others as for Send.

        Raises:
            ExpertProtocolError: on every rank, if any rank has gone wrong in its experts.
        """
        blocks = route.out(extra=1)
        slots = slots + route.shifts(blocks).to(owners.device)[owners]
        with record_function("ruda.return"):
            returned = results
            if len(blocks) > 1:
                # Own results are copied, so that those of the others need not be kept for the backward.
                returned = fresh_rows(results, route.own + sum(blocks), compiled)
                returned[: route.own] = results[: route.own]
                move_rows(
                    returned[route.own :], results[route.own :].contiguous(), blocks, route.into(extra=1), route.group
                )
                require_good(returned[route.own :], blocks)
        ctx.save_for_backward(returned, weights, slots)
        ctx.account, ctx.like, ctx.route, ctx.compiled = account, (term.dtype, term.device), route, compiled
        with record_function("ruda.combine"):
            return combine_rows(returned, weights, slots, compiled), token.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each row's gradient is written once; a weight's is a dot product in float32 or wider."""
        (returned, weights, slots), route = ctx.saved_tensors, ctx.route
        blocks = route.into(extra=1)
        with record_function("ruda.backward.combine"):
            whole, leaving, of_weights = combine_rows_backward(
                gradient, returned, weights, slots, ctx.compiled, split=route.own, room=sum(blocks)
            )
            dtype, device = ctx.like
            of_term = torch.full((), ctx.account(), dtype=dtype, device=device)
        with record_function("ruda.backward.return"):
            move_rows(whole[route.own :], leaving, blocks, route.out(extra=1), route.group)
        return whole, token, of_weights, None, None, of_term, None, None, None
