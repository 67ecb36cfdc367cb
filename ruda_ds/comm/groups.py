"""Expert-parallel groups. The only file that asks deepspeed.utils.groups, whose names are private."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ruda_ds.errors import OwnershipError


@dataclass(frozen=True)
class ExpertGroups:
    """Where the experts of one layer live.

    Attributes:
        name: DeepSpeed's name of the pair of groups, "ep_size_N".
        expert_parallel: the ranks among which the experts are split; rows are exchanged here.
        expert_data_parallel: the ranks that hold copies of the same experts; their gradients are summed here.
    """

    name: str
    expert_parallel: dist.ProcessGroup
    expert_data_parallel: dist.ProcessGroup


def expert_groups(ep_size: int, use_data_before_expert_parallel: bool = False) -> ExpertGroups:
    """DeepSpeed's groups for ``ep_size`` consecutive ranks, created at the first call; a collective then.

    Raises:
        OwnershipError: the world does not divide into groups of ``ep_size``.
    """
    from deepspeed.utils import groups

    world = dist.get_world_size()
    if ep_size < 1 or world % ep_size:
        raise OwnershipError(f"ep_size is {ep_size}, expected a divisor of the {world} ranks")
    name = f"ep_size_{ep_size}"
    groups._create_expert_and_data_parallel(ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel)
    return ExpertGroups(name, groups._get_expert_parallel_group(name), groups._get_expert_data_parallel_group(name))
