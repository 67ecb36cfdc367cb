"""The router's own losses, which do not depend on ranks or micro-batches. No communication.

[Note: losses from global counts]
The load-balancing loss of a window is E * sum over e of share_e * P_e, where P_e is the mean probability of expert e
and share_e the rows of expert e by token, both over ALL tokens of the window (arXiv:2101.03961, equation 4, with
shares that sum to K, as transformers takes them). Only share_e couples the tokens, and it has no derivative. So each
token contributes share . p on its own, as a SUM that the accumulator divides once like the loss, if share is known
when the token passes. The window's own shares are not known before its last micro-batch, and the mean of the shares of
each micro-batch and rank is another function, which changes with the split. The shares of the window BEFORE are exact,
global and the same for every split: those are used, and for the first window the even ones, whose gradient is zero.
What is reported at the window's end is the loss with its own shares.
"""

from __future__ import annotations

import torch

from ruda_ds.moe.options import MoEOptions


def router_losses(
    logits: torch.Tensor, shares: torch.Tensor | None, options: MoEOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted losses of these tokens, summed, and what their report needs.

    Args:
        logits: [T, E].
        shares: [E] float32, rows of each expert by token in the window before; see [Note: losses from global counts].
            None without a balancing loss.
        options: its coefficients, and how scores become probabilities: a softmax, or sigmoids divided by their sum
            (DeepSeek-V3, arXiv:2412.19437, equation 19).

    Returns:
        (sum over tokens of balance_loss * E * share . p + z_loss * logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906,
        equation 5); [E + 1] detached sums over tokens of p and of logsumexp^2, float64).
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if options.scoring == "softmax":
        probabilities = logits.softmax(-1)
    else:
        scores = logits.sigmoid()
        probabilities = scores / scores.sum(-1, keepdim=True)
    squares = logits.logsumexp(-1).square()
    term = options.z_loss * squares.sum()
    if shares is not None:
        term = term + options.balance_loss * len(shares) * (probabilities @ shares.to(logits)).sum()
    sums = torch.cat([probabilities.detach().double().sum(0), squares.detach().double().sum().view(1)])
    return term, sums
