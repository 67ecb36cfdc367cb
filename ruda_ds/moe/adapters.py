"""LoRA on expert cubes: the base frozen, a low-rank pair for each owned expert (arXiv:2106.09685, section 4.1).

Letters: L experts owned here, R rows, H hidden width, F expert width, Q adapter rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ruda_ds.errors import OwnershipError
from ruda_ds.moe.experts import ExpertParallelSwiGLUExperts
from ruda_ds.moe.partition import placeholder
from ruda_ds.ops import RowLayout

TARGETS = ("gate", "up", "down")


class LoRAExperts(torch.nn.Module):
    """SwiGLU experts whose cubes W are frozen and act as W + (alpha / Q) * B A.

    Same ownership and same exchange as the experts it wraps; a rank without experts holds placeholders. The adapters
    are applied to activations, so no full-size gradient of W is ever made.

    Args:
        base: the experts; their parameters are frozen.
        rank: Q, 1 or more.
        alpha: numerator of the scale.
        dropout: probability of zeroing an adapter's input in training.
        targets: which of gate, up and down get an adapter.

    Raises:
        OwnershipError: a rank, dropout or target out of its range.
    """

    def __init__(
        self,
        base: ExpertParallelSwiGLUExperts,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        targets: Sequence[str] = TARGETS,
    ) -> None:
        super().__init__()
        if rank < 1 or not 0 <= dropout < 1 or not targets or not set(targets) <= set(TARGETS):
            raise OwnershipError(
                f"adapter rank is {rank}, dropout {dropout}, targets {tuple(targets)}; expected a rank of 1 or more, a "
                f"dropout in [0, 1), and targets among {', '.join(TARGETS)}"
            )
        self.base = base.requires_grad_(False)
        self.scale, self.dropout, self.targets = alpha / rank, dropout, tuple(targets)
        self.merged = False
        self.ownership, self.rank = base.ownership, base.rank
        owned, hidden, inner = base.dimensions
        self.down_factors, self.up_factors = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for target in self.targets:
            out_width, in_width = (hidden, inner) if target == "down" else (inner, hidden)
            like = base.gate
            if owned:
                a = torch.empty(owned, rank, in_width, dtype=like.dtype, device=like.device)
                for expert in a:  # as torch initialises a Linear
                    torch.nn.init.kaiming_uniform_(expert, a=math.sqrt(5))
                b = torch.zeros(owned, out_width, rank, dtype=like.dtype, device=like.device)
                self.down_factors[target], self.up_factors[target] = torch.nn.Parameter(a), torch.nn.Parameter(b)
            else:
                self.down_factors[target] = placeholder(like).requires_grad_()
                self.up_factors[target] = placeholder(like).requires_grad_()

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """(L, H, F) of the base."""
        return self.base.dimensions

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the base."""
        return self.base.dtype

    def forward(
        self, rows: torch.Tensor, offsets: torch.Tensor, backend: str = "auto", layout: RowLayout | None = None
    ) -> torch.Tensor:
        """[R, H] rows sorted by owned expert, or by a layout, offsets [L + 1] int64 -> as many results."""
        if self.merged or not self.dimensions[0]:
            return self.base(rows, offsets, backend, layout)
        if layout is None:
            return self._adapted(rows, offsets)
        return layout.spread(self._adapted(layout.sort(rows), offsets))

    def _adapted(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        bounds = offsets.tolist()
        pieces = []
        cubes = {target: getattr(self.base, target).unbind() for target in TARGETS}
        factors = {t: (self.down_factors[t].unbind(), self.up_factors[t].unbind()) for t in self.targets}
        for expert in range(len(bounds) - 1):
            x = rows[bounds[expert] : bounds[expert + 1]]

            def apply(target: str, value: torch.Tensor, expert: int = expert) -> torch.Tensor:
                out = F.linear(value, cubes[target][expert])
                if target not in factors:
                    return out
                a, b = (factor[expert] for factor in factors[target])
                dropped = F.dropout(value, self.dropout, self.training)
                return out + F.linear(F.linear(dropped, a), b) * self.scale

            pieces.append(apply("down", F.silu(apply("gate", x)) * apply("up", x)))
        return torch.cat(pieces)

    @torch.no_grad()
    def delta(self, target: str) -> torch.Tensor:
        """(alpha / Q) * B A of a target, [L, out, in], in float32 or wider."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.bmm(self.up_factors[target].to(wide), self.down_factors[target].to(wide)) * self.scale

    def merge(self) -> None:
        """Add the adapters to the cubes, exactly but for one rounding; the forward is then the base's."""
        self._fold(1.0, merged=True)

    def unmerge(self) -> None:
        """Take them out again."""
        self._fold(-1.0, merged=False)

    @torch.no_grad()
    def _fold(self, sign: float, merged: bool) -> None:
        if self.merged == merged:
            raise OwnershipError(f"the adapters are {'merged' if merged else 'not merged'} already")
        if self.dimensions[0]:
            for target in self.targets:
                cube = getattr(self.base, target)
                delta = self.delta(target)
                cube.copy_((cube.to(delta.dtype) + sign * delta).to(cube.dtype))
        self.merged = merged
