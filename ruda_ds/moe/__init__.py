"""Dropless expert parallelism with any contiguous ownership of experts."""

from ruda_ds.moe.adapters import LoRAExperts
from ruda_ds.moe.balance import (
    RouterReport,
    expert_layers,
    take_expert_counts,
    take_router_losses,
    uncounted,
    update_correction_biases,
)
from ruda_ds.moe.chain import chain_exchanges
from ruda_ds.moe.experts import ExpertParallelSwiGLUExperts
from ruda_ds.moe.layer import ExpertParallelMoE, ExpertParallelMoEOutput
from ruda_ds.moe.options import MoEOptions
from ruda_ds.moe.ownership import ExpertOwnership, ownership_of
from ruda_ds.moe.partition import ExpertPartitionContext
from ruda_ds.moe.replace import replace_moe_blocks

__all__ = [
    "ExpertOwnership",
    "ExpertParallelMoE",
    "ExpertParallelMoEOutput",
    "ExpertParallelSwiGLUExperts",
    "ExpertPartitionContext",
    "LoRAExperts",
    "MoEOptions",
    "RouterReport",
    "chain_exchanges",
    "expert_layers",
    "ownership_of",
    "replace_moe_blocks",
    "take_expert_counts",
    "take_router_losses",
    "uncounted",
    "update_correction_biases",
]
