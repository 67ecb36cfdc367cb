"""Reductions of gradients that are sums: nothing is divided, and the wire has the precision of the sums.

Letters: N elements of a parameter, W ranks of the group, C = ceil(N / W) its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ruda_ds.comm.collectives import reduce_scatter_single
from ruda_ds.shapes import padded_shard_length, shard_range


def scatter_sum(gradients: Sequence[torch.Tensor], dtype: torch.dtype, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Sum gradients over the ranks; each rank keeps its shard. One reduce-scatter for all of them.

    Args:
        gradients: whole local gradients, [N] elements each in any shape and floating dtype; the same list of sizes
            on every rank.
        dtype: precision of the wire and of the result.
        group: the ranks that partition these parameters.

    Returns:
        This rank's shards, 1-D, without padding; views of one buffer.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if world == 1:
        return [gradient.reshape(-1).to(dtype) for gradient in gradients]
    slots = [padded_shard_length(gradient.numel(), world) for gradient in gradients]
    wire = torch.empty(world, sum(slots), dtype=dtype, device=gradients[0].device)
    offset = 0
    for gradient, slot in zip(gradients, slots, strict=True):
        column = wire[:, offset : offset + slot]
        flat, offset = gradient.reshape(-1), offset + slot
        full = flat.numel() // slot if slot else 0
        column[:full].copy_(flat[: full * slot].view(full, slot))  # casts on the way
        rest = flat.numel() - full * slot
        if rest:
            column[full, :rest].copy_(flat[full * slot :])
        # The padding is sent as it is: the shard that comes back is cut before it.
    summed = torch.empty(sum(slots), dtype=dtype, device=wire.device)
    reduce_scatter_single(summed, wire.view(-1), group=group)
    shards, offset = [], 0
    for gradient, slot in zip(gradients, slots, strict=True):
        start, stop = shard_range(gradient.numel(), world, rank)
        shards.append(summed[offset : offset + stop - start])
        offset += slot
    return shards


def owners_sum(payloads: Sequence[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """A reduce-scatter with uneven shards: ``payloads[r]`` of every rank is summed on rank r, in place.

    Args:
        payloads: one 1-D tensor for each rank of the group, the same sizes on every rank; some may be empty.

    Returns:
        ``payloads[rank]``, now the sum over all ranks.
    """
    if dist.get_world_size(group) > 1:
        pending = [
            dist.reduce(payload, dist.get_global_rank(group, owner), group=group, async_op=True)
            for owner, payload in enumerate(payloads)
            if payload.numel()
        ]
        for handle in pending:
            handle.wait()
    return payloads[dist.get_rank(group)]
