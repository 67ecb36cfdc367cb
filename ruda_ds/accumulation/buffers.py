"""The pending sums of a window: one flat work buffer, a view for each parameter, and which of them were used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class PendingShards:
    """Sums of gradient shards, kept in a flat buffer whose padding is zero.

    A window needs no clearing pass: the first shard that arrives for a parameter is copied, later ones are added, and
    before a step only the slots that nothing arrived for are zeroed.

    Args:
        flat: 1-D buffer in the work dtype.
        views: name -> this rank's shard, a 1-D view of ``flat`` without padding; one for each trainable parameter.
    """

    def __init__(self, flat: torch.Tensor, views: Mapping[str, torch.Tensor]) -> None:
        self.flat = flat
        self.views = dict(views)
        self.touched: set[str] = set()

    def add(self, names: Sequence[str], shards: Sequence[torch.Tensor]) -> None:
        """Add summed shards, each of the length of its view, in any floating dtype.

        A view of no elements takes anything: on a rank without experts ZeRO reduces a placeholder in its place.
        """
        given = [(name, self.views[name], shard) for name, shard in zip(names, shards, strict=True)]
        fresh = [(view, shard) for name, view, shard in given if view.numel() and name not in self.touched]
        again = [(view, shard) for name, view, shard in given if view.numel() and name in self.touched]
        for view, shard in fresh:
            view.copy_(shard, non_blocking=True)
        if again and all(shard.device == view.device and shard.dtype == view.dtype for view, shard in again):
            torch._foreach_add_([view for view, _ in again], [shard for _, shard in again])
        else:
            for view, shard in again:
                view.add_(shard.to(view.device, view.dtype))
        self.touched.update(names)

    def zero_untouched(self) -> None:
        """Make the slots that no shard arrived for exactly zero: they hold an earlier window's values."""
        idle = [view for name, view in self.views.items() if name not in self.touched and view.numel()]
        if idle:
            torch._foreach_zero_(idle)

    def clear(self) -> None:
        """Begin a new window."""
        self.touched.clear()
