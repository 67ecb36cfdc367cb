"""Cutting a rank's experts out of full cubes, one leaf for every tied source."""

from __future__ import annotations

import torch

from ruda_ds.errors import OwnershipError
from ruda_ds.moe.ownership import ExpertOwnership


def placeholder(like: torch.Tensor) -> torch.nn.Parameter:
    """What a rank without experts holds in place of a cube: one unused element, with as many dimensions.

    ZeRO-3 wants the same parameters in the same order on every rank and cannot partition an empty one. Who sorts
    parameters into optimizer groups by their number of dimensions, as for weight decay, must get the same groups too.
    """
    made = torch.zeros([1] * like.ndim, dtype=like.dtype, device=like.device)
    return torch.nn.Parameter(made, requires_grad=like.requires_grad)


class ExpertPartitionContext:
    """Cuts owned experts out of full cubes. A source that is met again (a tied one) gives the same leaf again.

    The leaves are copies, never views that would keep a full cube alive.
    """

    def __init__(self) -> None:
        # The source is kept with its leaf, so that its id cannot be given to another tensor meanwhile.
        self._leaves: dict[int, tuple[torch.Tensor, tuple[ExpertOwnership, int], torch.nn.Parameter]] = {}

    def parameter(self, cube: torch.Tensor, ownership: ExpertOwnership, rank: int) -> torch.nn.Parameter:
        """This rank's experts [L, ...] of a full cube [E, ...] as a leaf; a placeholder if it owns none.

        Raises:
            OwnershipError: the cube has another number of experts, or a tied source is to be cut in two ways.
        """
        if cube.shape[0] != ownership.num_experts:
            raise OwnershipError(f"a cube of shape {tuple(cube.shape)}, expected {ownership.num_experts} experts first")
        if id(cube) in self._leaves:
            _, cut, leaf = self._leaves[id(cube)]
            if cut != (ownership, rank):
                raise OwnershipError(f"one source is tied between ownerships {cut[0]} and {ownership}, expected one")
            return leaf
        owned = ownership.range(rank)
        if owned:
            leaf = torch.nn.Parameter(
                cube.detach()[owned.start : owned.stop].clone(memory_format=torch.contiguous_format),
                requires_grad=cube.requires_grad,
            )
        else:
            leaf = placeholder(cube)
        self._leaves[id(cube)] = (cube, (ownership, rank), leaf)
        return leaf
