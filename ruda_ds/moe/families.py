"""How the MoE families of transformers name their parts and route, read from their own code (5.24)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ruda_ds.moe.options import MoEOptions


@dataclass(frozen=True)
class Family:
    """One family's block.

    Attributes:
        block: class name of the MoE block. It has ``gate.weight`` [E, H] and ``experts.gate_up_proj`` [E, 2F, H] (gate
            rows first) and ``experts.down_proj`` [E, H, F].
        options: of a model's configuration.
        count: key of the number of experts in the configuration.
        router_dtype: dtype in which the router works; None: its input's.
        shared: name of the dense expert beside the routed ones; None if there is none.
        shared_gate: name of its sigmoid gate; None if there is none.
        bias: name of the selection bias inside the gate; None if there is none.
    """

    block: str
    options: Callable[[Any], MoEOptions]
    count: str
    router_dtype: torch.dtype | None = None
    shared: str | None = None
    shared_gate: str | None = None
    bias: str | None = None

    def num_experts(self, config: Any) -> int:
        """E of a model with this configuration."""
        return getattr(config, self.count)


def _mixtral(config: Any) -> MoEOptions:
    return MoEOptions(top_k=config.num_experts_per_tok)


def _softmax(config: Any) -> MoEOptions:
    return MoEOptions(top_k=config.num_experts_per_tok, renormalize=config.norm_topk_prob)


def _deepseek_v2(config: Any) -> MoEOptions:
    grouped = config.topk_method == "group_limited_greedy"
    return MoEOptions(
        top_k=config.num_experts_per_tok,
        selection="sigmoid_grouped" if grouped else "softmax",
        renormalize=False,
        scale=config.routed_scaling_factor,
        groups=config.n_group if grouped else 1,
        selected_groups=config.topk_group if grouped else 1,
        group_top_two=False,
    )


def _deepseek_v3(config: Any) -> MoEOptions:
    return MoEOptions(
        top_k=config.num_experts_per_tok,
        selection="sigmoid_grouped",
        scoring="sigmoid",
        renormalize=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        groups=config.n_group,
        selected_groups=config.topk_group,
    )


FAMILIES = {
    "mixtral": Family("MixtralSparseMoeBlock", _mixtral, "num_local_experts"),
    "qwen2_moe": Family(
        "Qwen2MoeSparseMoeBlock", _softmax, "num_experts", shared="shared_expert", shared_gate="shared_expert_gate"
    ),
    "qwen3_moe": Family("Qwen3MoeSparseMoeBlock", _softmax, "num_experts"),
    "olmoe": Family("OlmoeSparseMoeBlock", _softmax, "num_experts"),
    "deepseek_v2": Family(
        "DeepseekV2Moe", _deepseek_v2, "n_routed_experts", router_dtype=torch.float32, shared="shared_experts"
    ),
    "deepseek_v3": Family(
        "DeepseekV3MoE",
        _deepseek_v3,
        "n_routed_experts",
        router_dtype=torch.float32,
        shared="shared_experts",
        bias="e_score_correction_bias",
    ),
}
