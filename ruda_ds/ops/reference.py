"""The obvious torch version of the experts' arithmetic: the oracle of every faster one.

Letters: R rows sorted by expert, L experts, H hidden width, F expert width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F


def reference_experts(
    rows: torch.Tensor, offsets: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """down_e(silu(gate_e x) * up_e x) for the rows x of each expert e (SwiGLU, arXiv:2002.05202, section 2).

    Args:
        rows: [R, H], sorted by expert.
        offsets: [L + 1] int64, expert e has rows offsets[e] .. offsets[e + 1] - 1.
        gate, up: [L, F, H].
        down: [L, H, F].

    Returns:
        [R, H] in the rows' dtype. Differentiable in everything floating.
    """
    bounds = offsets.tolist()
    # unbind, not W[e]: the backward of L separate selections from one cube is quadratic in L.
    cubes = zip(gate.unbind(), up.unbind(), down.unbind(), strict=True)
    pieces = []
    for (start, stop), (w_gate, w_up, w_down) in zip(pairwise(bounds), cubes, strict=True):
        x = rows[start:stop]
        pieces.append(F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down))
    if not pieces:  # no expert, so no rows: still a function of all inputs, whose gradients are zero
        return rows + 0 * (gate.sum() + up.sum() + down.sum())
    return torch.cat(pieces)
