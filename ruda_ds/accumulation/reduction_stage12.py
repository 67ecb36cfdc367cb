"""The reduction hook for ZeRO-1 and 2: true sums into this rank's part of each flat group.

DeepSpeed's buckets at these stages are filled in the order in which gradients become ready, so ranks that use
different parameters mix them up or hang. The hook lets gradients stay in ``.grad`` until the backward has ended and
reduces them in the order of the flat groups, zeros for what this rank did not use. The price is the memory of one
micro-batch's local gradients until then, which stage 1 holds anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ruda_ds import _deepspeed
from ruda_ds.accumulation.buffers import PendingShards
from ruda_ds.accumulation.division import divide_
from ruda_ds.accumulation.placement import ParameterPlacement
from ruda_ds.accumulation.reduction import GradientReduction
from ruda_ds.comm.reduce import owners_sum

# Elements reduced at a time; bounds the wire buffer.
BUCKET_ELEMENTS = 1 << 25


class Stage12Reduction(GradientReduction):
    """`GradientReduction` for ZeRO-1 and 2. DeepSpeed has no lasting buffer there, so the pending sums are ours.

    Args:
        engine: a DeepSpeed engine at ZeRO stage 1 or 2.
        placement: its parameters.
        dtype: torch.float32 or torch.float64, of the sums and of the wire.
    """

    def __init__(self, engine: Any, placement: Sequence[ParameterPlacement], dtype: torch.dtype) -> None:
        super().__init__(engine, dtype)
        self.device = _deepspeed.gradient_device(self.optimizer)
        self.fragments = _deepspeed.flat_fragments(self.optimizer)
        self.names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        sizes = _deepspeed.stage12_partition_sizes(self.optimizer)
        flat = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
        self.partitions = list(flat.split(sizes))
        lengths = {p.name: p.shard_numel for p in placement}  # of a rank's placeholder for experts: 0
        views = {}
        for parameters in _deepspeed.optimizer_groups(self.optimizer):
            for parameter in parameters:
                fragment = self.fragments[id(parameter)]
                name = self.names[id(parameter)]
                begin = max(fragment.offset - fragment.rank * fragment.partition_numel, 0)
                views[name] = self.partitions[fragment.group_index][begin : begin + lengths[name]]
        self.pending = PendingShards(flat, views)
        self.used: set[str] = set()
        hooks = _deepspeed.Stage12Hooks(guard=self.gate.admit, norm=lambda: self.terms.norm, divide=self.divide)
        self._shadows = _deepspeed.install_stage12(self.optimizer, hooks)

    def end_backward(self) -> None:
        """See `GradientReduction`."""
        super().end_backward()
        for index, parameters in enumerate(_deepspeed.optimizer_groups(self.optimizer)):
            bucket: list[torch.nn.Parameter] = []
            elements = 0
            for parameter in parameters:
                if bucket and elements + parameter.numel() > BUCKET_ELEMENTS:
                    self._reduce(index, bucket)
                    bucket, elements = [], 0
                bucket.append(parameter)
                elements += parameter.numel()
            if bucket:
                self._reduce(index, bucket)

    def _reduce(self, index: int, bucket: list[torch.nn.Parameter]) -> None:
        """Sum a bucket on the owners of its elements, with a flag for each parameter that says whether it was used."""
        group = _deepspeed.stage12_group(self.optimizer, index)
        flags = torch.tensor([float(p.grad is not None) for p in bucket], dtype=self.dtype).to(self.device)
        payloads = []
        for owner in range(torch.distributed.get_world_size(group)):
            pieces = [self._piece(parameter, owner) for parameter in bucket]
            is_owner = any(piece.numel() for piece in pieces)
            payloads.append(torch.cat([*pieces, flags]) if is_owner else flags[:0])
        summed = owners_sum(payloads, group)
        held = [stop - start for start, stop in (self.fragments[id(p)].held for p in bucket)]
        if summed.numel():
            *shards, used = summed.split([*held, len(bucket)])
            arrived = [
                (self.names[id(p)], shard)
                for p, shard, flag in zip(bucket, shards, used.tolist(), strict=True)
                if flag and shard.numel()
            ]
            self.pending.add([name for name, _ in arrived], [shard for _, shard in arrived])
        for parameter in bucket:
            if parameter.grad is not None:
                self.used.add(self.names[id(parameter)])
                parameter.grad = None

    def _piece(self, parameter: torch.nn.Parameter, owner: int) -> torch.Tensor:
        start, stop = self.fragments[id(parameter)].part_of(owner)
        if parameter.grad is None:
            return torch.zeros(stop - start, dtype=self.dtype, device=self.device)
        return parameter.grad.reshape(-1)[start:stop].to(self.dtype)

    def used_by_any_rank(self) -> set[str]:
        """See `GradientReduction`. A collective: here ranks may use different parameters."""
        names = sorted(self.pending.views)
        seen = self.used | self.pending.touched
        flags = torch.tensor([name in seen for name in names], dtype=torch.uint8, device=self.device)
        group = _deepspeed.data_parallel_group(self.optimizer)
        torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=group)
        return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}

    def clear(self) -> None:
        """See `GradientReduction`."""
        super().clear()
        self.used.clear()

    def hand_over(self, divisor: float, norm: float) -> None:
        """See `GradientReduction`."""
        self.terms.set(divisor, norm)
        partitions = self.partitions
        if self.dtype == torch.float64:
            partitions = [
                partition.float()
                for partition in divide_(self.pending.flat, divisor).split([p.numel() for p in self.partitions])
            ]
        _deepspeed.stage12_hand_over(self.optimizer, partitions)
