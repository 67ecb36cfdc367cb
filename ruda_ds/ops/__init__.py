"""The experts' arithmetic."""

from ruda_ds.ops.fused_experts import fused_experts
from ruda_ds.ops.layout import RowLayout
from ruda_ds.ops.reference import reference_experts

__all__ = ["RowLayout", "fused_experts", "reference_experts"]
