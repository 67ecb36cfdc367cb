"""From router logits to chosen experts and their weights. No communication.

Letters: T tokens, E experts, K experts a token, G groups.
"""

from __future__ import annotations

import torch

from ruda_ds.moe.options import MoEOptions

# Keeps a renormalisation finite where every chosen sigmoid underflows.
TINY = 1e-20


def top_k_lowest_id(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [T, k] of the k largest of each row, int64, best first; equal values go to the lower index.

    torch.topk leaves ties open, which would make a choice depend on the machine.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def choose(
    logits: torch.Tensor, options: MoEOptions, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and weigh them.

    Args:
        logits: [T, E], floating; scores are taken in float32, or float64 if the logits are.
        options: selection and weights.
        correction_bias: [E], float32; added to the scores for the SELECTION only.

    Returns:
        (experts [T, K] int64, ascending within a token; weights [T, K] in the scores' dtype, differentiable).
    """
    scores_dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logits = logits.to(scores_dtype)
    with torch.no_grad():
        scores = logits.softmax(-1) if options.selection == "softmax" else logits.sigmoid()
        if correction_bias is not None:
            scores = scores + correction_bias.to(scores_dtype)
        if options.groups > 1:
            scores = mask_groups(scores, options)
        experts = top_k_lowest_id(scores, options.top_k).sort(-1).values
    weights = (logits.softmax(-1) if options.scoring == "softmax" else logits.sigmoid()).gather(-1, experts)
    if options.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return experts, weights * options.scale if options.scale != 1.0 else weights


def mask_groups(scores: torch.Tensor, options: MoEOptions) -> torch.Tensor:
    """[T, E] scores with those outside the ``selected_groups`` best groups at -inf."""
    grouped = scores.unflatten(-1, (options.groups, -1))  # [T, G, E / G]
    best = min(2 if options.group_top_two else 1, grouped.shape[-1])
    group_scores = grouped.topk(best, dim=-1).values.sum(-1)  # [T, G]
    chosen = top_k_lowest_id(group_scores, options.selected_groups)
    keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, chosen, True)
    return grouped.masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(-2)
