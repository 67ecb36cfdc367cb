"""Swap the MoE blocks of a transformers model for expert-parallel ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ruda_ds.errors import OwnershipError
from ruda_ds.moe.experts import ExpertParallelSwiGLUExperts
from ruda_ds.moe.families import FAMILIES, Family
from ruda_ds.moe.layer import ExpertParallelMoE
from ruda_ds.moe.options import MoEOptions
from ruda_ds.moe.ownership import ExpertOwnership
from ruda_ds.moe.partition import ExpertPartitionContext


class ReplacedBlock(torch.nn.Module):
    """A family's block: routed experts of ours, and its dense, replicated shared expert beside them."""

    def __init__(
        self, moe: ExpertParallelMoE, shared: torch.nn.Module | None, shared_gate: torch.nn.Module | None
    ) -> None:
        super().__init__()
        self.moe, self.shared, self.shared_gate = moe, shared, shared_gate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> the same shape."""
        routed = self.moe(hidden_states)
        if self.shared is None:
            return routed
        dense = self.shared(hidden_states)
        if self.shared_gate is not None:
            dense = torch.sigmoid(self.shared_gate(hidden_states)) * dense
        return routed + dense


class _Halves:
    """gate and up [E, F, H] of a fused cube [E, 2F, H]; a cube that is tied gives the same halves again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, tuple[torch.nn.Parameter, torch.nn.Parameter]]] = {}

    def of(self, fused: torch.Tensor) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        if id(fused) not in self._known:
            gate, up = fused.detach().chunk(2, dim=1)
            halves = (
                torch.nn.Parameter(gate, requires_grad=fused.requires_grad),
                torch.nn.Parameter(up, requires_grad=fused.requires_grad),
            )
            self._known[id(fused)] = (fused, halves)
        return self._known[id(fused)][1]


def replace_moe_blocks(
    model: torch.nn.Module,
    ownership: ExpertOwnership | Sequence[int],
    *,
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
    balance_loss: float = 0.0,
    z_loss: float = 0.0,
) -> int:
    """Swap every MoE block of a model of a known family, in place, keeping only this rank's experts.

    Args:
        model: of transformers: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 or V3; real or on the meta device.
        ownership: of the experts of every block, or its prefix.
        rank: in the expert-parallel group; None: that of ``group``, else the global rank modulo the group's size, as
            DeepSpeed forms its groups.
        group: see ExpertParallelMoE.
        balance_loss, z_loss: coefficients; see MoEOptions. They take the place of the model's own auxiliary loss.

    Returns:
        How many blocks were replaced.

    Raises:
        OwnershipError: a family that is not known, no block in the model, an ownership of another number of experts,
            an activation that is not SiLU, or the model's own auxiliary loss is on.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind == "gpt_oss":
        raise OwnershipError(
            "model type is 'gpt_oss', whose experts are (up + 1) * gate * sigmoid(1.702 gate) with biases and a clamp; "
            "expected SwiGLU: it can be converted (ruda-convert) and not trained here"
        )
    if kind not in FAMILIES:
        raise OwnershipError(f"model type is {kind!r}, expected one of {', '.join(sorted(FAMILIES))}")
    if config.hidden_act != "silu":
        raise OwnershipError(f"hidden_act of {kind} is {config.hidden_act!r}, expected 'silu': experts are SwiGLU")
    if getattr(config, "output_router_logits", False):
        raise OwnershipError(
            "output_router_logits of the model is True, expected False: its own auxiliary loss would see no logits and "
            f"be 0; pass balance_loss={getattr(config, 'router_aux_loss_coef', 0.001)} instead"
        )
    split = ownership if isinstance(ownership, ExpertOwnership) else ExpertOwnership(ownership)
    if rank is None:
        rank = dist.get_rank(group) if group is not None else dist.get_rank() % split.world_size
    family = FAMILIES[kind]
    options = replace(family.options(config), balance_loss=balance_loss, z_loss=z_loss)
    context, halves = ExpertPartitionContext(), _Halves()
    blocks = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == family.block
    ]
    if not blocks:
        raise OwnershipError(f"no {family.block} in the model, expected at least one")
    for parent, name, block in blocks:
        setattr(parent, name, _replacement(block, family, options, split, rank, group, context, halves))
    return len(blocks)


def _replacement(
    block: Any,
    family: Family,
    options: MoEOptions,
    ownership: ExpertOwnership,
    rank: int,
    group: dist.ProcessGroup | None,
    context: ExpertPartitionContext,
    halves: _Halves,
) -> ReplacedBlock:
    gate, up = halves.of(block.experts.gate_up_proj)
    experts = ExpertParallelSwiGLUExperts.from_full(gate, up, block.experts.down_proj, ownership, rank, context)
    weight = block.gate.weight
    router = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    router.weight = weight
    moe = ExpertParallelMoE(
        router,
        experts,
        getattr(block.gate, family.bias) if family.bias else None,
        options,
        router_input_dtype=family.router_dtype,
        group=group,
    )
    shared = getattr(block, family.shared) if family.shared else None
    shared_gate = getattr(block, family.shared_gate) if family.shared_gate else None
    return ReplacedBlock(moe, shared, shared_gate)
