"""The ZeRO-3 reduction hook: true sums into DeepSpeed's own gradient partitions.

[Note: the path of a gradient]
DeepSpeed collects gradients in buckets while the backward runs. Where it would divide a bucket by the world size and
reduce-scatter it in the communication dtype, the hook reduce-scatters the sum in the work dtype. Where DeepSpeed would
copy or add the result by its own counter of micro-batches, the hook adds it to the pending sums of the window. At the
step DeepSpeed flattens its partitions, and where it would multiply by 1 / scale the hook divides by the window's
divisor. Buckets, streams, gathers, offload and the optimizer stay DeepSpeed's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch

from ruda_ds import _deepspeed
from ruda_ds.accumulation.buffers import PendingShards
from ruda_ds.accumulation.division import divide_
from ruda_ds.accumulation.placement import ParameterPlacement
from ruda_ds.comm.reduce import scatter_sum
from ruda_ds.errors import CallingStyleError, HookError
from ruda_ds.shapes import shard_range


class Gate:
    """Lets gradients through only while an accumulator runs a backward that it counts."""

    def __init__(self) -> None:
        self.is_open = False
        self.admitted = 0

    def admit(self, parameter: torch.nn.Parameter) -> None:
        """Count a ready gradient; raise CallingStyleError, and drop it, if nobody announced a backward."""
        if self.is_open:
            self.admitted += 1
            return
        parameter.grad = None
        raise CallingStyleError(
            "loss.backward() was called directly: its gradients would enter the window without a count. "
            "Call accumulator.backward_sum(loss_sum, local_count=...) or engine.backward(loss_sum) after "
            "accumulator.count(...)"
        )

    def open(self) -> None:
        """Begin a backward."""
        self.is_open, self.admitted = True, 0

    def close(self) -> None:
        """End a backward that went through; raise HookError if no gradient came."""
        self.is_open = False
        if not self.admitted:
            raise HookError(
                "a backward ended and DeepSpeed handed no gradient to the reduction hook, expected one for each "
                "parameter used: does the loss depend on a trainable parameter of this engine?"
            )


class StepTerms:
    """The divisor and the norm of the step at hand, as DeepSpeed's replaced methods read them."""

    def __init__(self, device: torch.device) -> None:
        self.divisor = 1.0
        self.norm = torch.zeros((), dtype=torch.float64, device=device)

    def set(self, divisor: float, norm: float) -> None:
        """``norm`` is float64: DeepSpeed skips a step whose norm overflows."""
        self.divisor = divisor
        self.norm = torch.tensor(norm, dtype=torch.float64, device=self.norm.device)


class GradientReduction(ABC):
    """What an accumulator asks of the hook on a ZeRO optimizer; the parts that do not depend on the stage.

    Args:
        engine: a DeepSpeed engine.
        dtype: torch.float32 or torch.float64, of the sums and of the wire.
    """

    pending: PendingShards
    _shadows: list[str]

    def __init__(self, engine: Any, dtype: torch.dtype) -> None:
        self.optimizer = _deepspeed.zero_optimizer(engine)
        self.dtype = dtype
        self.gate = Gate()
        self.terms = StepTerms(_deepspeed.gradient_device(self.optimizer))

    def begin_backward(self) -> None:
        """Let gradients in: until `end_backward`, they belong to this micro-batch."""
        self.gate.open()

    def end_backward(self) -> None:
        """Every gradient of the micro-batch is in the pending sums; raises HookError if there was none."""
        self.gate.close()

    def abandon_backward(self) -> bool:
        """A backward failed: forget what DeepSpeed still holds of it; whether any of its gradients had come in."""
        self.gate.is_open = False
        _deepspeed.drop_partial_backward(self.optimizer)
        return self.gate.admitted > 0

    @abstractmethod
    def used_by_any_rank(self) -> set[str]:
        """Names of the parameters that a rank used in the window; may be a collective."""

    def clear(self) -> None:
        """Begin a new window."""
        self.pending.clear()

    @abstractmethod
    def hand_over(self, divisor: float, norm: float) -> None:
        """Before the engine's step: the sums, to be divided once, and the norm of the result, to be reported."""

    def divide(self, gradient: torch.Tensor) -> None:
        """In place of DeepSpeed's unscaling: a flat float32 sum becomes the mean; with float64 work it is one."""
        if self.dtype == torch.float32:
            divide_(gradient, self.terms.divisor)

    def remove(self) -> None:
        """Give the optimizer its own methods back."""
        _deepspeed.restore(self.optimizer, self._shadows)


class Stage3Reduction(GradientReduction):
    """`GradientReduction` for ZeRO-3. With float32 work the pending sums are DeepSpeed's buffer itself.

    Args:
        engine: a DeepSpeed engine at ZeRO stage 3.
        placement: its parameters.
        dtype: torch.float32 or torch.float64, of the sums and of the wire.
    """

    def __init__(self, engine: Any, placement: Sequence[ParameterPlacement], dtype: torch.dtype) -> None:
        super().__init__(engine, dtype)
        trainable = {p.name: p for p in placement if p.requires_grad}
        parameters = dict(engine.module.named_parameters())
        self.names = {_deepspeed.parameter_id(parameters[name]): name for name in trainable}
        theirs = _deepspeed.stage3_flat_gradients(self.optimizer)
        flat = theirs if dtype == theirs.dtype else torch.zeros_like(theirs, dtype=dtype)
        begins = {n: _deepspeed.stage3_slot(self.optimizer, parameters[n]).storage_offset() for n in trainable}
        views = {name: flat[begins[name] :][: place.shard_numel] for name, place in trainable.items()}
        self.pending = PendingShards(flat, views)
        self._bucketed: set[int] = set()
        hooks = _deepspeed.Stage3Hooks(
            guard=self._admit,
            scatter=self._scatter,
            partition=self._partition,
            norm=lambda: self.terms.norm,
            divide=self.divide,
        )
        self._shadows = _deepspeed.install_stage3(self.optimizer, hooks)
        self._verify()

    def _admit(self, parameter: torch.nn.Parameter) -> bool:
        """A parameter used in two checkpointed regions becomes ready twice. If its first gradient still waits in the
        bucket, autograd has added the second to it, and DeepSpeed must not list it again."""
        self.gate.admit(parameter)
        number = _deepspeed.parameter_id(parameter)
        if number in self._bucketed:
            return False
        self._bucketed.add(number)
        return True

    def _scatter(self, parameters: list[torch.nn.Parameter], _: torch.dtype) -> list[torch.Tensor]:
        group = _deepspeed.partition_group(self.optimizer, parameters[0], None)
        return scatter_sum([cast(torch.Tensor, p.grad) for p in parameters], self.dtype, group)

    def _partition(self, parameters: list[torch.nn.Parameter], shards: list[torch.Tensor]) -> None:
        self.pending.add([self.names[_deepspeed.parameter_id(parameter)] for parameter in parameters], shards)
        for parameter in parameters:
            _deepspeed.release_gradient(parameter)
            self._bucketed.discard(_deepspeed.parameter_id(parameter))

    def _verify(self) -> None:
        """Reduce-scatter known values in odd shapes; HookError if the shards are not the exact sums."""
        group = _deepspeed.data_parallel_group(self.optimizer)
        world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        sizes = [2 * world + 1, 1, world]
        gradients = [
            torch.arange(n, dtype=torch.float32, device=_deepspeed.gradient_device(self.optimizer)) + rank
            for n in sizes
        ]
        for size, shard in zip(sizes, scatter_sum(gradients, self.dtype, group), strict=True):
            want = [world * index + world * (world - 1) / 2 for index in range(*shard_range(size, world, rank))]
            if shard.tolist() != want:
                self.remove()
                raise HookError(
                    f"self-test of the reduction on rank {rank}: a gradient of {size} elements gave {shard.tolist()}, "
                    f"expected the sum {want} over {world} ranks"
                )

    def abandon_backward(self) -> bool:
        """See `GradientReduction`."""
        self._bucketed.clear()
        return super().abandon_backward()

    def used_by_any_rank(self) -> set[str]:
        """See `GradientReduction`. Local: ZeRO-3 ranks reduce the same parameters or could not have gone on."""
        return set(self.pending.touched)

    def hand_over(self, divisor: float, norm: float) -> None:
        """See `GradientReduction`."""
        self.terms.set(divisor, norm)
        if self.dtype == torch.float64:
            divide_(self.pending.flat, divisor)
            _deepspeed.stage3_flat_gradients(self.optimizer).copy_(self.pending.flat)
        _deepspeed.stage3_hand_over(self.optimizer)
