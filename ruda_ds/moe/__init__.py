"""Dropless expert parallelism with any contiguous ownership of experts.

Importing this package is light: a module loads when a name of it is first used; what reads experts from disk
needs their ownership, not the layer and its ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ruda_ds import lazy

_HOME = {
    "ExpertOwnership": "ruda_ds.moe.ownership",
    "ExpertParallelMoE": "ruda_ds.moe.layer",
    "ExpertParallelMoEOutput": "ruda_ds.moe.layer",
    "ExpertParallelSwiGLUExperts": "ruda_ds.moe.experts",
    "ExpertPartitionContext": "ruda_ds.moe.partition",
    "LoRAExperts": "ruda_ds.moe.adapters",
    "MoEOptions": "ruda_ds.moe.options",
    "RouterReport": "ruda_ds.moe.balance",
    "chain_exchanges": "ruda_ds.moe.chain",
    "expert_layers": "ruda_ds.moe.balance",
    "ownership_of": "ruda_ds.moe.ownership",
    "replace_moe_blocks": "ruda_ds.moe.replace",
    "take_expert_counts": "ruda_ds.moe.balance",
    "take_router_losses": "ruda_ds.moe.balance",
    "uncounted": "ruda_ds.moe.balance",
    "update_correction_biases": "ruda_ds.moe.balance",
}

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

if TYPE_CHECKING:
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
else:  # Unseen by a type checker, which would take any name as known.
    __getattr__, __dir__ = lazy.attributes(__name__, _HOME)
