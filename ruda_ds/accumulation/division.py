"""The one division of a window."""

from __future__ import annotations

import torch

# Elements converted to float64 at a time: small enough to stay in a core's cache.
CHUNK = 1 << 16


def divide_(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Divide in place so that each element is the correctly rounded quotient by a float64 divisor.

    A float32 divisor gives the same bits with a plain division: the quotient of two float32 numbers, taken in
    float64 and rounded to float32, is the float32 quotient (53 >= 2 * 24 + 2 bits, so rounding twice is harmless).
    torch multiplies by a rounded reciprocal when the divisor is a Python number on some devices; a 0-dim tensor on the
    device divides. Any other divisor, such as a count above 2^24 or one that holds a clipping coefficient, is
    applied in float64.

    Args:
        values: float32 or float64, any shape.
        divisor: above 0, or inf to zero the values.
    """
    scalar = torch.tensor(divisor, dtype=values.dtype, device=values.device)
    if values.dtype == torch.float64 or torch.tensor(divisor, dtype=torch.float32).item() == divisor:
        return values.div_(scalar)
    exact = torch.tensor(divisor, dtype=torch.float64, device=values.device)
    if values.device.type != "cpu":
        return values.copy_(values.double().div_(exact))
    for chunk in values.view(-1).split(CHUNK):
        chunk.copy_(chunk.double().div_(exact))
    return values
