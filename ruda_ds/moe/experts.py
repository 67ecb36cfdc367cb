"""The experts that one rank owns: cubes of SwiGLU weights, and what the layer asks of any kind of experts.

Letters: L experts owned here, E experts in all, R rows, H hidden width, F expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from ruda_ds.errors import OwnershipError
from ruda_ds.moe.ownership import ExpertOwnership
from ruda_ds.moe.partition import ExpertPartitionContext
from ruda_ds.ops import RowLayout, fused_experts


class ExpertGeometry(Protocol):
    """What the layer must know of its experts."""

    ownership: ExpertOwnership
    rank: int

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As a module's."""

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """(L, H, F); L is 0 on a rank without experts."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows that they take and give."""


class ReceivedExperts(ExpertGeometry, Protocol):
    """Experts that compute on received rows; any module with this protocol fits in the layer.

    The layer calls the module, so that ZeRO-3 gathers its parameters, and marks it as a leaf.
    """

    def __call__(
        self, rows: torch.Tensor, offsets: torch.Tensor, backend: str, layout: RowLayout | None
    ) -> torch.Tensor:
        """[R, H] rows, offsets [L + 1] -> [size, H]. Routing weights are not applied here.

        Experts that want their rows sorted by expert call ``layout.sort(rows)`` first and ``layout.spread(results)``
        last; None stands for rows and results that are.
        """


class ExpertParallelSwiGLUExperts(torch.nn.Module):
    """This rank's experts: ``gate`` and ``up`` [L, F, H], ``down`` [L, H, F].

    Args:
        gate, up, down: the owned cubes as leaves; on a rank without experts, placeholders of one element.
        ownership: of all experts.
        rank: this process's, in the expert-parallel group.
        hidden, inner: H and F, which a placeholder does not show.

    Raises:
        OwnershipError: shapes or dtypes that do not fit the ownership or each other.
    """

    def __init__(
        self,
        gate: torch.nn.Parameter,
        up: torch.nn.Parameter,
        down: torch.nn.Parameter,
        ownership: ExpertOwnership,
        rank: int,
        hidden: int,
        inner: int,
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.ownership, self.rank, self.hidden, self.inner = ownership, rank, hidden, inner
        owned = len(ownership.range(rank))
        shapes = {"gate": (owned, inner, hidden), "up": (owned, inner, hidden), "down": (owned, hidden, inner)}
        for name, shape in shapes.items():
            cube: torch.Tensor = getattr(self, name)
            if owned and tuple(cube.shape) != shape:
                raise OwnershipError(f"{name} of rank {rank} has shape {tuple(cube.shape)}, expected {shape}")
            if cube.dtype != gate.dtype:
                raise OwnershipError(f"{name} of rank {rank} is {cube.dtype}, expected {gate.dtype} as gate")

    @classmethod
    def from_full(
        cls,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        ownership: ExpertOwnership,
        rank: int,
        context: ExpertPartitionContext | None = None,
    ) -> ExpertParallelSwiGLUExperts:
        """Copy this rank's experts out of full cubes gate, up [E, F, H] and down [E, H, F].

        Args:
            context: shared by all layers of a model whose sources may be tied.
        """
        if gate.ndim != 3 or up.shape != gate.shape or down.shape != gate.transpose(1, 2).shape:
            raise OwnershipError(
                f"gate is {tuple(gate.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)}; expected [E, F, H], "
                "[E, F, H] and [E, H, F]"
            )
        context = context or ExpertPartitionContext()
        own_gate, own_up, own_down = (context.parameter(cube, ownership, rank) for cube in (gate, up, down))
        return cls(own_gate, own_up, own_down, ownership, rank, hidden=gate.shape[2], inner=gate.shape[1])

    @property
    def dimensions(self) -> tuple[int, int, int]:
        """(L, H, F)."""
        return len(self.ownership.range(self.rank)), self.hidden, self.inner

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights. Not read by name: ZeRO-3 would take that for a use of the cube, and gather it."""
        return next(iter(self._parameters.values())).dtype  # type: ignore[union-attr]

    def forward(
        self, rows: torch.Tensor, offsets: torch.Tensor, backend: str = "auto", layout: RowLayout | None = None
    ) -> torch.Tensor:
        """[R, H] rows sorted by owned expert, or by a layout, offsets [L + 1] int64 -> as many results."""
        if not self.dimensions[0]:  # none can have come
            return rows if layout is None else layout.spread(rows)
        return fused_experts(rows, offsets, self.gate, self.up, self.down, backend, layout=layout)

    def extra_repr(self) -> str:
        """What a printed model shows."""
        owned, hidden, inner = self.dimensions
        return f"rank={self.rank}, owned={owned} of {self.ownership.num_experts}, hidden={hidden}, inner={inner}"
