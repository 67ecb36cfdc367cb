"""How tokens choose experts, as one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ruda_ds.errors import OwnershipError


@dataclass(frozen=True)
class MoEOptions:
    """Selection of experts and weights of their outputs.

    Attributes:
        top_k: K, experts a token.
        selection: "softmax": the K largest of softmax(logits) (+ correction bias). "sigmoid_grouped": the K largest of
            sigmoid(logits) (+ bias) within the ``selected_groups`` best groups of experts (DeepSeek-V3,
            arXiv:2412.19437, section 2.1.2; with ``group_top_two`` False the group score is its maximum, as in V2,
            where softmax and sigmoid order alike).
        scoring: which score of the chosen experts becomes the weight.
        renormalize: divide a token's K weights by their sum.
        scale: multiplies the weights at last.
        groups: equal, contiguous groups of experts.
        selected_groups: groups that a token may choose from.
        group_top_two: group score is the sum of its two best experts, not its maximum.
        backend: of the experts' arithmetic; see ruda_ds.ops.
        balance_loss: coefficient of the load-balancing loss, 0 for none; see losses.py. The layer adds it to the
            gradient itself, so that it works under every kind of activation checkpointing.
        z_loss: coefficient of the router's z-loss, 0 for none.
        check_finite: refuse an input with NaN or Inf, on every rank, naming the one that has it. One more pass.
    """

    top_k: int = 2
    selection: Literal["softmax", "sigmoid_grouped"] = "softmax"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    selected_groups: int = 1
    group_top_two: bool = True
    backend: str = "auto"
    balance_loss: float = 0.0
    z_loss: float = 0.0
    check_finite: bool = False

    def check(self, num_experts: int) -> None:
        """Raise OwnershipError unless these options can be met with ``num_experts`` experts."""
        if not 1 <= self.top_k <= num_experts:
            raise OwnershipError(f"top_k is {self.top_k}, expected 1..{num_experts}, the number of experts")
        if self.selection not in ("softmax", "sigmoid_grouped") or self.scoring not in ("softmax", "sigmoid"):
            raise OwnershipError(
                f"selection is {self.selection!r} and scoring {self.scoring!r}, expected softmax or sigmoid_grouped, "
                "and softmax or sigmoid"
            )
        for name in ("balance_loss", "z_loss"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise OwnershipError(f"{name} is {value}, expected a finite coefficient of 0 or more")
        if self.groups < 1 or num_experts % self.groups:
            raise OwnershipError(f"{num_experts} experts do not divide into groups={self.groups}")
        if not 1 <= self.selected_groups <= self.groups:
            raise OwnershipError(f"selected_groups is {self.selected_groups}, expected 1..{self.groups}")
        if self.top_k > self.selected_groups * (num_experts // self.groups):
            raise OwnershipError(
                f"top_k is {self.top_k}, more than the {self.selected_groups * (num_experts // self.groups)} experts "
                f"of {self.selected_groups} selected groups"
            )
