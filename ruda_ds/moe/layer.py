"""The dropless expert-parallel layer: route, send rows to the owners of their experts, compute, bring them back.

Letters: T tokens, K experts a token, E experts, L experts owned here, R rows, H hidden width, P ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import record_function

from ruda_ds import _deepspeed
from ruda_ds.comm.exchange import Header, Status, exchange_headers, status_of, tell_failure
from ruda_ds.comm.groups import expert_groups
from ruda_ds.comm.scope import current_scope, next_token
from ruda_ds.errors import NonFiniteError, OwnershipError
from ruda_ds.moe.dispatch import Dispatch, Route, regroup, sort_by_expert
from ruda_ds.moe.experts import ReceivedExperts
from ruda_ds.moe.losses import router_losses
from ruda_ds.moe.options import MoEOptions
from ruda_ds.moe.router import choose
from ruda_ds.moe.transfer import Return, Send
from ruda_ds.ops import RowLayout
from ruda_ds.ops.rows import is_compiled


@dataclass(frozen=True)
class ExpertParallelMoEOutput:
    """A forward with what it decided.

    Attributes:
        output: the input's shape and dtype.
        router_logits: [T, E], tracked.
        selected_experts: [T, K] int64, ascending.
        sent_rows: [P] rows sent to each rank.
        received_rows: [P] rows received from each rank.
    """

    output: torch.Tensor
    router_logits: torch.Tensor
    selected_experts: torch.Tensor
    sent_rows: list[int]
    received_rows: list[int]


@dataclass(frozen=True)
class _Routed:
    """What this rank has decided.

    Attributes:
        flat: [T, H] the input, tracked with gradients on.
        logits: [T, E].
        experts: [T, K], ascending.
        weights: [T, K].
        dispatch: the order of its rows.
        compiled: whether compiled operators move and sum them.
    """

    flat: torch.Tensor
    logits: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    dispatch: Dispatch
    compiled: bool


def _track(x: torch.Tensor) -> torch.Tensor:
    """With gradients on, a tensor that requires one: the backward must enter the exchanges whatever lies below, and
    ZeRO-3 reduces a leaf module's gradients only when that of its input is there."""
    if torch.is_grad_enabled() and x.is_floating_point() and not x.requires_grad:
        return x.detach().requires_grad_()
    return x


class WideLinear(torch.nn.Linear):
    """A Linear that works in its input's dtype, whatever its weight is stored in.

    A module of its own and not a product with its weight elsewhere: ZeRO-3 gathers parameters where modules are called.
    """

    @classmethod
    def of(cls, linear: torch.nn.Linear) -> WideLinear:
        """The same parameters."""
        made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in the dtype of x."""
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class ExpertParallelMoE(torch.nn.Module):
    """No token is dropped; routing weights are applied once, at the combine, in float32 and ascending expert order.

    Every rank of the expert-parallel group calls it the same number of times, also with no token.

    Args:
        router: module [T, H] -> logits [T, E]; replicated.
        experts: this rank's; see ReceivedExperts.
        correction_bias: [E] selection-only bias; kept as a float32 buffer whatever the model is cast to.
        options: selection, weights, backend.
        router_input_dtype: the router gets its input in this dtype, and works in it if it is a Linear; None: the
            layer's input as it is.
        group: a torch process group for use without DeepSpeed's engine; None: DeepSpeed's expert-parallel group of as
            many ranks as the ownership has, set when the engine is made.

    Raises:
        OwnershipError: parts that do not fit each other.
    """

    correction_bias: torch.Tensor | None
    expert_counts: torch.Tensor
    expert_shares: torch.Tensor | None
    router_sums: torch.Tensor

    def __init__(
        self,
        router: torch.nn.Module,
        experts: ReceivedExperts,
        correction_bias: torch.Tensor | None = None,
        options: MoEOptions | None = None,
        router_input_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.options = options or MoEOptions()
        self.options.check(experts.ownership.num_experts)
        if router_input_dtype is not None and type(router) is torch.nn.Linear:
            router = WideLinear.of(router)
        self.router, self.experts = router, experts
        self.router_input_dtype = router_input_dtype
        self.group = group
        self._owner_ends = torch.tensor(experts.ownership.prefix[1:])
        bias = None
        if correction_bias is not None:
            if tuple(correction_bias.shape) != (experts.ownership.num_experts,):
                raise OwnershipError(
                    f"correction_bias has shape {tuple(correction_bias.shape)}, expected "
                    f"({experts.ownership.num_experts},)"
                )
            bias = correction_bias.detach().float().clone()
        self.register_buffer("correction_bias", bias)
        for name, value in self.fresh_tallies().items():
            self.register_buffer(name, value, persistent=False)
        self.counting = True
        # Of the layer in its model; chain_exchanges numbers them. With the calls, it tells exchanges apart.
        self.number, self._calls = 0, 0
        # By what the accumulator multiplies every loss before its backward; it sets this.
        self.backward_scale = 1.0
        if group is not None:
            self._check_group(group)

    def fresh_tallies(self) -> dict[str, torch.Tensor | None]:
        """The buffers of the window, as at the beginning. State of training and not of the model: a checkpoint of ours
        holds them beside it, and a state dict does not.

        expert_counts: [E] rows of each expert on this rank since the counts were last taken; see balance.py.
        router_sums: [E + 1] sums over this rank's tokens of each expert's probability and of the z-loss, likewise.
        expert_shares: [E] rows of each expert by token in the window before, on all ranks; see [Note: losses from
        global counts]. None without a balancing loss.
        """
        number = self.experts.ownership.num_experts
        even = torch.full((number,), self.options.top_k / number) if self.options.balance_loss else None
        return {
            "expert_counts": torch.zeros(number, dtype=torch.int64),
            "router_sums": torch.zeros(number + 1, dtype=torch.float64),
            "expert_shares": even,
        }

    def _check_group(self, group: dist.ProcessGroup) -> None:
        found = dist.get_rank(group), dist.get_world_size(group)
        expected = self.experts.rank, self.experts.ownership.world_size
        if found != expected:
            raise OwnershipError(
                f"rank {found[0]} of {found[1]} in the process group, but the experts are those of rank {expected[0]} "
                f"of {expected[1]}"
            )

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Called by DeepSpeed while it makes an engine: take its groups and mark the experts' parameters for ZeRO."""
        groups = expert_groups(self.experts.ownership.world_size, use_data_before_expert_parallel_)
        self._check_group(groups.expert_parallel)
        self.group = groups.expert_parallel
        owned = self.experts.ownership.range(self.experts.rank)
        # With one rank to a group the experts are replicated like any other weight.
        marked = self.experts.named_parameters() if self.experts.ownership.world_size > 1 else ()
        for name, parameter in marked:
            _deepspeed.mark_expert_parameter(name, parameter, groups.name, groups.expert_data_parallel, owned)
        _deepspeed.mark_leaf_module(cast(torch.nn.Module, self.experts))

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertParallelMoE:
        """Moves and casts as any module, but what selections and counts rest on keeps its dtype: bf16 would flip close
        selections."""
        exact = {name: buffer for name, buffer in self.named_buffers(recurse=False) if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            if getattr(self, name).dtype != buffer.dtype:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def forward(self, x: torch.Tensor, detailed: bool = False) -> Any:
        """x [..., H] -> the same shape; with ``detailed`` the fields of ExpertParallelMoEOutput as a tuple.

        Raises:
            ExpertProtocolError: on every rank of the group, if any of them cannot take part.
        """
        if self.group is None:
            raise OwnershipError(
                "the layer has no process group: make an engine with DeepSpeed first, or pass group= to the constructor"
            )
        routed, header = self._route_or_tell(x)
        route = self._route_of(header)
        # Which rank owns the expert of each assignment.
        owners = torch.bucketize(routed.experts, self._owner_ends.to(routed.experts.device), right=True)
        token = next_token(routed.flat.device)
        arrived, token = Send.apply(routed.flat, token, routed.dispatch, owners, route, routed.compiled)
        results = self._compute(arrived, header.counts, route)
        if isinstance(results, Exception):
            tell_failure(results, arrived, route.into(extra=1), route.out(extra=1), route.group)
        term, account = self._accounted(routed.logits, routed.dispatch.counts)
        output, token = Return.apply(
            results, token, routed.weights, routed.dispatch.slots, owners, term, account, route, routed.compiled
        )
        output = output.view(x.shape)
        scope = current_scope()
        if scope is not None and header.tracked:
            scope.token = token
            scope.keep(output)
        return (output, routed.logits, routed.experts, route.sent, route.received) if detailed else output

    def forward_detailed(self, x: torch.Tensor) -> ExpertParallelMoEOutput:
        """`forward`, with the router's logits and choices of the same pass."""
        return ExpertParallelMoEOutput(*self(x, detailed=True))

    def _accounted(self, logits: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, Callable[[], float]]:
        """The layer's own losses of these tokens, and what is to be done once their gradients enter the window."""
        counted, sums = self.counting and self.training, None
        if counted and (self.options.balance_loss or self.options.z_loss):
            term, sums = router_losses(logits, self.expert_shares, self.options)
        else:
            term = logits.new_zeros(())

        def account() -> float:
            if counted:
                self.expert_counts += counts
            if sums is not None:
                self.router_sums += sums
            return self.backward_scale

        return term, account

    def _route_or_tell(self, x: torch.Tensor) -> tuple[_Routed, Header]:
        """Route, and exchange headers; an error of this rank is told to all of the group, and raised on all."""
        self._calls += 1
        try:
            routed = self._decide(x)
        except Exception as error:
            device = next(iter(self.experts.named_parameters()))[1].device
            nothing = torch.zeros(self.experts.ownership.num_experts, dtype=torch.int64, device=device)
            self._exchange_headers(nothing, status_of(error))  # raises ExpertProtocolError on every rank
            raise
        return routed, self._exchange_headers(routed.dispatch.counts, Status.READY)

    def _route_of(self, header: Header) -> Route:
        assert self.group is not None
        sent = [sum(header.own_counts[start:stop]) for start, stop in pairwise(self.experts.ownership.prefix)]
        return Route(rank=dist.get_rank(self.group), sent=sent, received=header.received, group=self.group)

    def _decide(self, x: torch.Tensor) -> _Routed:
        hidden = self.experts.dimensions[1]
        if not isinstance(x, torch.Tensor):
            raise OwnershipError(f"the layer's input is a {type(x).__name__}, expected a tensor [..., {hidden}]")
        if x.ndim < 1 or x.shape[-1] != hidden or x.dtype != self.experts.dtype:
            raise OwnershipError(
                f"the layer's input is {tuple(x.shape)} {x.dtype}, expected [..., {hidden}] {self.experts.dtype}"
            )
        if self.options.check_finite and not torch.isfinite(x).all():
            raise NonFiniteError(f"the layer's input {tuple(x.shape)} holds NaN or Inf, expected finite numbers")
        flat = _track(x).reshape(-1, hidden)
        with record_function("ruda.router"):
            logits = self.router(flat if self.router_input_dtype is None else flat.to(self.router_input_dtype))
            experts, weights = choose(logits, self.options, self.correction_bias)
        with record_function("ruda.dispatch"):
            dispatch = sort_by_expert(experts, self.experts.ownership.num_experts)
        return _Routed(flat, logits, experts, weights, dispatch, is_compiled(self.options.backend, flat))

    def _exchange_headers(self, counts: torch.Tensor, status: Status) -> Header:
        assert self.group is not None
        with record_function("ruda.header"):
            return exchange_headers(
                counts,
                self.experts.ownership.counts,
                tracked=torch.is_grad_enabled(),
                dtype=self.experts.dtype,
                width=self.experts.dimensions[1],
                status=status,
                place=(self.number, self._calls),
                group=self.group,
            )

    def _compute(self, arrived: torch.Tensor, counts: list[list[int]], route: Route) -> torch.Tensor | Exception:
        """Own rows, then those of other ranks -> results in the same order, with room for a status at the end of each
        other rank's block; or what went wrong."""
        with record_function("ruda.dispatch"):
            table = torch.tensor(counts, dtype=torch.int64).view(len(counts), -1)  # [P, L]
            offsets = torch.zeros(table.shape[1] + 1, dtype=torch.int64)
            torch.cumsum(table.sum(0), 0, out=offsets[1:])
            order, places = (regroup(table, route.starts(route.into(extra))) for extra in (0, 1))
            offsets, order, places = (index.to(arrived.device) for index in (offsets, order, places))
            layout = RowLayout(
                order=order if len(table) > 1 else None, places=places, size=route.own + sum(route.into(extra=1))
            )
        try:
            with record_function("ruda.experts"):
                return self.experts(arrived, offsets, self.options.backend, layout)
        except Exception as error:
            return error
