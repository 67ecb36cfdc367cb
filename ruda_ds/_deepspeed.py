"""Every private or version-bound name of DeepSpeed that ruda_ds touches, each with the reason why.

Nothing else in the package may name them (a test looks). `require_supported_version` refuses a DeepSpeed whose
internals nobody has read; `tests/test_deepspeed_names.py` fails when a new version moves one of them.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from ruda_ds.errors import ConfigError, VersionError

KNOWN_FROM, KNOWN_BELOW = Version("0.19.8"), Version("0.20")

# Methods that the hooks replace or call, with the parameters that they had when they were read.
STAGE3_METHODS = {
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads": ["self", "params_to_reduce", "communication_data_type"],
    "partition_grads": ["self", "params_to_release", "grad_partitions"],
    "reduce_ready_partitions_and_remove_grads": ["self", "param"],
    "_get_norm_groups": ["self"],
    "unscale_and_clip_grads": ["self", "sub_group_id", "total_norm"],
    "_get_param_partition_group": ["self", "param"],
    "override_loss_scale": ["self", "loss_scale"],
}
STAGE12_METHODS = {
    "process_gradients": ["self", "param", "i"],
    "reduce_gradients": ["self", "pipeline_parallel"],
    "overlapping_partition_gradients_reduce_epilogue": ["self"],
    "finalize_gradient_accumulation_boundary": ["self"],
    "scaled_global_norm": ["self", "norm_type"],
    "unscale_and_clip_grads": ["self", "grad_groups_flat", "total_norm"],
    "override_loss_scale": ["self", "loss_scale"],
}
ENGINE_METHODS = {
    "backward": ["self", "loss", "retain_graph", "scale_wrt_gas"],
    "step": ["self", "lr_kwargs"],
    "set_gradient_accumulation_boundary": ["self", "is_boundary"],
    "is_gradient_accumulation_boundary": ["self"],
    "_configure_zero_optimizer": ["self", "optimizer"],
}


def require_supported_version() -> None:
    """Raise VersionError unless the installed DeepSpeed is one whose internals are listed here."""
    import deepspeed

    found = Version(deepspeed.__version__.split("+")[0])
    if not KNOWN_FROM <= found < KNOWN_BELOW:
        raise VersionError(
            f"DeepSpeed is {found}, expected >={KNOWN_FROM},<{KNOWN_BELOW}: the reduction hook depends on internals "
            "that are known for these versions only"
        )


def require_methods(owner: type, methods: dict[str, list[str]]) -> None:
    """Raise VersionError unless each method exists on ``owner`` with the parameters it is known to have."""
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            raise VersionError(f"{owner.__name__}.{name} is missing from this DeepSpeed; ruda_ds replaces it")
        found = list(inspect.signature(_undecorated(method)).parameters)
        if found != expected:
            raise VersionError(f"{owner.__name__}.{name} takes {found}, expected {expected}")


def _undecorated(method: Any) -> Any:
    """The function inside ``instrument_w_nvtx``, which hides its signature: the one that its wrapper closes over."""
    inner = [cell.cell_contents for cell in method.__closure__ or () if inspect.isfunction(cell.cell_contents)]
    return inner[0] if inner else method


# --- the engine -------------------------------------------------------------------------------------------------


def load_config(config: Any) -> dict[str, Any]:
    """A DeepSpeed config (a dict, a path or DeepSpeed's base64 text) as a dict."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    return config if isinstance(config, dict) else load_ds_config(config)


def raw_config(engine: Any) -> dict[str, Any]:
    """The JSON that the engine was given; only this shows which keys are absent, the resolved config hides it."""
    return engine._config._param_dict


def own_the_boundary(engine: Any) -> None:
    """Make every call of DeepSpeed's own ``step()`` the boundary, as `managed_gradient_accumulation: false` does.

    For engines that another library made, whose config we could not complete beforehand.
    """
    engine._config.managed_gradient_accumulation = False


def in_engine_step(engine: Any) -> bool:
    """Whether DeepSpeed's own step() is running; its is_gradient_accumulation_boundary() says the same."""
    return engine._running_engine_step


def refuse_pipeline(model: Any) -> None:
    """Raise ConfigError for a PipelineModule, before DeepSpeed makes a pipeline engine of it."""
    from deepspeed.runtime.pipe.module import PipelineModule

    if isinstance(model, PipelineModule):
        raise ConfigError(
            "pipeline", type(model).__name__, "pipeline parallelism is not supported: pass a plain module"
        )


# The folder of DeepSpeed's CPU collectives under torch's extension cache.
SHARED_MEMORY_OP = "deepspeed_shm_comm"


def load_shared_memory_op() -> None:
    """Build or load what DeepSpeed's gloo backend loads at its start; later loads in this process find it there."""
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()


def forget_shared_memory_buffer() -> None:
    """Unlink this rank's buffer of DeepSpeed's CPU collectives, 69 MB, which nothing removes when a process ends.

    A collective: every rank has mapped the buffers of all others then, and the mappings stay. A day of short runs
    filled the memory of a host otherwise.
    """
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu":
        return
    torch.distributed.barrier()
    name = "_".join(
        [
            "deepspeed_allreduce_buffer",
            str(os.getuid()),
            os.environ.get("MASTER_ADDR", ""),
            os.environ.get("MASTER_PORT", ""),
            str(torch.distributed.get_rank()),
        ]
    )
    (Path("/dev/shm") / name).unlink(missing_ok=True)


# --- both optimizers --------------------------------------------------------------------------------------------


def zero_optimizer(engine: Any) -> Any:
    """The ZeRO optimizer of an engine.

    Raises:
        ConfigError: ZeRO stage 0, pipeline parallelism, or a wrapper (BF16_Optimizer and the like) without the hooks.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    stage = int(engine.zero_optimization_stage())
    if isinstance(engine, PipelineEngine):
        raise ConfigError("pipeline", type(engine).__name__, "pipeline parallelism is not supported: use ZeRO")
    optimizer = engine.optimizer
    # Exact types: a subclass (SuperOffload, ZenFlow) replaces parts of the gradient path that the hook replaces.
    if type(optimizer) not in (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer):
        advice = "set zero_optimization.stage to 3 (or 1, 2) and pass an optimizer"
        if type(optimizer).__name__ == "BF16_Optimizer":
            advice = "DeepSpeed runs bf16 at stage 1 through BF16_Optimizer: set zero_optimization.stage to 2 or 3"
        raise ConfigError("zero_optimization.stage", f"{stage}, optimizer {type(optimizer).__name__}", advice)
    require_methods(type(optimizer), STAGE3_METHODS if is_stage3(optimizer) else STAGE12_METHODS)
    require_methods(type(engine), ENGINE_METHODS)
    return optimizer


def is_stage3(optimizer: Any) -> bool:
    """Whether this is the ZeRO-3 optimizer, which partitions parameters one by one."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    return isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)


def partition_group(optimizer: Any, parameter: torch.Tensor, fragment: FlatFragment | None) -> Any:
    """The process group over which a parameter (below stage 3: its gradient, lying at ``fragment``) is partitioned.

    Below stage 3 what is frozen lies in no flat buffer: it is copied over all ranks, an expert over those that have it.
    """
    if is_stage3(optimizer):
        return optimizer._get_param_partition_group(parameter)
    if fragment is not None:
        return stage12_group(optimizer, fragment.group_index)
    return getattr(parameter, "ds_zero_partition_process_group", optimizer.dp_process_group)


def logical_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the whole parameter, also while ZeRO-3 has released it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def data_parallel_group(optimizer: Any) -> Any:
    """The group over which losses and counts are summed."""
    return optimizer.dp_process_group


def neutralize_loss_scale(optimizer: Any) -> None:
    """Make DeepSpeed's own loss scale 1: the window's loss_scale is the only one, and our divisor takes it out."""
    optimizer.override_loss_scale(1.0)


def gradient_dtype(optimizer: Any) -> torch.dtype:
    """Dtype of DeepSpeed's accumulated gradients."""
    return optimizer.gradient_accumulation_dtype


def optimizer_groups(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """The trainable parameters, by sub-group, in the order of DeepSpeed's flat buffers."""
    return optimizer.fp16_groups if is_stage3(optimizer) else optimizer.round_robin_bit16_groups


def restore(target: Any, names: list[str]) -> None:
    """Take instance attributes that shadow methods away again."""
    for name in names:
        target.__dict__.pop(name, None)


def parameters_by_param_group(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """The trainable parameters by the optimizer's own param groups, in the order of the flat buffers."""
    groups: list[list[torch.nn.Parameter]] = [[] for _ in optimizer.optimizer.param_groups]
    for index, parameters in enumerate(optimizer_groups(optimizer)):
        groups[optimizer.sub_group_to_group_id[index] if is_stage3(optimizer) else index] += parameters
    return groups


def names_by_param_group(optimizer: Any, names: dict[int, str]) -> list[list[str]]:
    """The same by name; ``names``: id(parameter) -> name."""
    return [[names[id(parameter)] for parameter in group] for group in parameters_by_param_group(optimizer)]


def master_sizes(optimizer: Any) -> list[int]:
    """Elements of this rank's flat float32 partitions, as a checkpoint holds them: below ZeRO-3 without padding."""
    if is_stage3(optimizer):
        return [partition.numel() for partition in optimizer.fp32_partitioned_groups_flat]
    partitions = zip(optimizer.single_partition_of_fp32_groups, optimizer.groups_padding, strict=True)
    return [partition.numel() - padding for partition, padding in partitions]


def partition_metadata(optimizer: Any) -> Any:
    """What ZeRO-3 writes of its partition groups where experts have their own, and compares, late, when it loads."""
    return optimizer._zero3_partition_group_metadata() if is_stage3(optimizer) else None


@contextlib.contextmanager
def checkpoint_io(engine: Any, io: Any, failed: Callable[[Exception], None]) -> Iterator[None]:
    """Let the engine's checkpoint calls write and read through ``io``, a CheckpointEngine.

    An exception in the middle of them would leave the other ranks in a barrier for ever. ``io`` keeps its own; that of
    the one other place that writes, the copy of DeepSpeed's recovery scripts, is handed to ``failed``.
    """
    before, copy_scripts = engine.checkpoint_engine, engine._copy_recovery_script

    def copy_or_report(path: str) -> None:
        try:
            copy_scripts(path)
        except Exception as error:
            failed(error)

    engine.checkpoint_engine, engine._copy_recovery_script = io, copy_or_report
    try:
        yield
    finally:
        engine.checkpoint_engine = before
        restore(engine, ["_copy_recovery_script"])


# --- ZeRO-3 -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage3Hooks:
    """What the reduction hook puts in place of five methods of DeepSpeedZeroOptimizer_Stage3.

    Attributes:
        guard: called with each parameter whose gradient is ready; whether DeepSpeed is to put it into its bucket.
        scatter: (parameters, communication dtype) -> this rank's summed shard of each; replaces the averaging.
        partition: (parameters, shards) -> None; adds the shards to the pending sums and frees the gradients.
        norm: () -> the norm that DeepSpeed is to report for the step.
        divide: (gradient) -> None; turns a flat sum into the clipped mean, in place.
    """

    guard: Callable[[torch.nn.Parameter], bool]
    scatter: Callable[[list[torch.nn.Parameter], torch.dtype], list[torch.Tensor]]
    partition: Callable[[list[torch.nn.Parameter], list[torch.Tensor]], None]
    norm: Callable[[], torch.Tensor]
    divide: Callable[[torch.Tensor], None]


def install_stage3(optimizer: Any, hooks: Stage3Hooks) -> list[str]:
    """Shadow the methods on this instance; returns the shadowed names for `restore`."""
    ready = optimizer.reduce_ready_partitions_and_remove_grads

    def reduce_ready(parameter: torch.nn.Parameter) -> None:
        if hooks.guard(parameter):
            ready(parameter)

    def divide(sub_group_id: int, total_norm: Any) -> None:
        hooks.divide(optimizer.fp32_partitioned_groups_flat[sub_group_id].grad)

    shadows = {
        "reduce_ready_partitions_and_remove_grads": reduce_ready,
        # The name is mangled; there is no public place between the bucket and the division by the world size.
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads": hooks.scatter,
        "partition_grads": hooks.partition,
        # DeepSpeed's norm is a pass over the gradients that ours has made already, and is wrong for experts.
        "_get_norm_groups": lambda: [hooks.norm()],
        "unscale_and_clip_grads": divide,
        # The wire buffer is filled straight from the gradients, with the cast: the bucket would be a second copy.
        "contiguous_gradients": False,
    }
    vars(optimizer).update(shadows)
    for bucket in optimizer.ipg_buckets.values():
        bucket.buffer = None
    return [name for name in shadows if name != "contiguous_gradients"]


def stage3_flat_gradients(optimizer: Any) -> torch.Tensor:
    """DeepSpeed's flat buffer of gradient partitions, one padded slot after another."""
    return optimizer.grad_partitions_flat_buffer


def parameter_id(parameter: Any) -> int:
    """DeepSpeed's number of a ZeRO-3 parameter, unique in this process only."""
    return parameter.ds_id


def stage3_slot(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's padded slot for a parameter: a view of the flat buffer."""
    return optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter_id(parameter)]


def stage3_hand_over(optimizer: Any) -> None:
    """Let the step take every slot of the flat buffer.

    DeepSpeed lists the slots after a backward, of which a window of ready-made sums has none; under offload it copies
    only those that it saw reduced since the last step, and the rest of its host copy would be stale.
    """
    for index, group in enumerate(optimizer.fp16_groups):
        optimizer.averaged_gradients[index] = [stage3_slot(optimizer, parameter) for parameter in group]
    optimizer._offload_boundary_param_ids = {parameter_id(p) for group in optimizer.fp16_groups for p in group}


def release_gradient(parameter: torch.nn.Parameter) -> None:
    """Free a gradient that has been reduced; the caching allocator is told that the reduction stream still reads it."""
    from deepspeed.accelerator import get_accelerator

    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and not get_accelerator().is_synchronized_device():
        gradient.record_stream(get_accelerator().current_stream())


def synchronize_reduction(optimizer: Any) -> None:
    """Make the current stream wait for the reductions of the last backward (DeepSpeed reduces on its own stream)."""
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().resolves_data_dependency():
        stream = getattr(optimizer, "reduce_and_partition_stream", None)
        if stream is not None:
            get_accelerator().current_stream().wait_stream(stream)
    if offloads_gradients(optimizer) and not get_accelerator().is_synchronized_device():
        get_accelerator().synchronize()  # the host reads what the device wrote


def offloads_gradients(optimizer: Any) -> bool:
    """Whether the optimizer step runs on the host (CPU offload)."""
    return bool(getattr(optimizer, "offload_optimizer", False) or getattr(optimizer, "cpu_offload", False))


def drop_partial_backward(optimizer: Any) -> None:
    """After a backward that failed part-way: forget its bucketed gradients and leave the backward context."""
    if is_stage3(optimizer):
        for bucket in optimizer.ipg_buckets.values():
            bucket.clear_params()
    for group in optimizer_groups(optimizer):
        for parameter in group:
            parameter.grad = None
    while optimizer._backward_active_depth > 0:
        optimizer.exit_backward()
    optimizer.clear_backward_seen_flag()


# --- ZeRO-1 and 2 -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatFragment:
    """Where a parameter lies in the flat buffer of its group, which is cut evenly over the ranks.

    Attributes:
        group_index: index of the optimizer group.
        offset: first element of the parameter in the group's flat buffer.
        numel: elements of the parameter.
        partition_numel: elements of each rank's part of the flat buffer.
        rank: this process's rank in the group's process group.
    """

    group_index: int
    offset: int
    numel: int
    partition_numel: int
    rank: int

    def part_of(self, rank: int) -> tuple[int, int]:
        """Half-open range of the flattened parameter that lies in ``rank``'s part; empty ranges are (n, n)."""
        begin, end = rank * self.partition_numel - self.offset, (rank + 1) * self.partition_numel - self.offset
        return min(max(begin, 0), self.numel), min(max(end, 0), self.numel)

    @property
    def held(self) -> tuple[int, int]:
        """``part_of`` this process's rank."""
        return self.part_of(self.rank)


def flat_fragments(optimizer: Any) -> dict[int, FlatFragment]:
    """ZeRO-1/2: id(parameter) -> its fragment, for every trainable parameter."""
    fragments = {}
    for index, parameters in enumerate(optimizer.round_robin_bit16_groups):
        rank = torch.distributed.get_rank(optimizer.real_dp_process_group[index])
        for parameter, offset in zip(parameters, optimizer.round_robin_bit16_offsets[index], strict=True):
            fragments[id(parameter)] = FlatFragment(
                index, int(offset), parameter.numel(), int(optimizer.partition_size[index]), rank
            )
    return fragments


def stage12_partition_sizes(optimizer: Any) -> list[int]:
    """Elements of this rank's flat gradient partition, by optimizer group."""
    return [int(size) for size in optimizer.partition_size]


def stage12_group(optimizer: Any, index: int) -> Any:
    """Process group over which optimizer group ``index`` is partitioned."""
    return optimizer.real_dp_process_group[index]


@dataclass(frozen=True)
class Stage12Hooks:
    """What the reduction hook puts in place of methods of DeepSpeedZeroOptimizer; see Stage3Hooks."""

    guard: Callable[[torch.nn.Parameter], None]
    norm: Callable[[], torch.Tensor]
    divide: Callable[[torch.Tensor], None]


def install_stage12(optimizer: Any, hooks: Stage12Hooks) -> list[str]:
    """Shadow the methods on this instance; returns the shadowed names for `restore`."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Gradients stay in ``.grad`` until the backward has ended; the hook reduces them then."""

    def divide(grad_groups_flat: list[torch.Tensor], total_norm: Any) -> None:
        for gradient in grad_groups_flat:
            hooks.divide(gradient)

    shadows = {
        "process_gradients": lambda parameter, index: hooks.guard(parameter),
        "reduce_gradients": nothing,
        "overlapping_partition_gradients_reduce_epilogue": nothing,
        "finalize_gradient_accumulation_boundary": nothing,
        "scaled_global_norm": lambda norm_type=2: hooks.norm(),
        "unscale_and_clip_grads": divide,
    }
    vars(optimizer).update(shadows)
    return list(shadows)


def stage12_hand_over(optimizer: Any, partitions: list[torch.Tensor]) -> None:
    """Give the step this rank's flat float32 partition of every group, padding zero."""
    from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

    for index, flat in enumerate(partitions):
        if optimizer.cpu_offload:
            optimizer.single_partition_of_fp32_groups[index].grad.copy_(flat)
        else:
            optimizer.averaged_gradients[index] = GradPartitionBufferGroup([flat], flat)


def gradient_device(optimizer: Any) -> torch.device:
    """Device of the model's gradients."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def book_skipped_step(engine: Any) -> None:
    """Book a step that was decided against, as DeepSpeed books an overflow: counted, the scheduler left alone."""
    engine.skipped_steps += 1
    engine.global_steps += 1
    engine.micro_steps += 1
    engine._step_applied = False
    engine._unmanaged_backward_count = 0
    engine.optimizer.zero_grad()


def count_backwards(engine: Any, backwards: int) -> None:
    """Say how many backwards the window has had: the next step advances ``global_samples`` by them."""
    engine._unmanaged_backward_count = backwards


# --- experts ----------------------------------------------------------------------------------------------------


def mark_expert_parameter(
    name: str, parameter: torch.nn.Parameter, group_name: str, edp_group: Any, owned: range
) -> None:
    """Tell ZeRO that a parameter is one rank's own, partitioned over the ranks that hold a copy of it.

    With ``allreduce`` and ``group_name`` alone, ZeRO-3 broadcast rank 0's experts to all.

    Args:
        owned: the experts that it holds; none makes it a placeholder.

    Raises:
        ConfigError: the parameter was made under zero.Init, which partitioned it over all ranks already.
    """
    if hasattr(parameter, "ds_id"):
        raise ConfigError(
            f"expert parameter {name}",
            "made under deepspeed.zero.Init",
            "build the experts outside of zero.Init (on the meta device, or from owned slices): it has partitioned "
            "this rank's own experts over all ranks",
        )
    marks = {
        "allreduce": False,
        "group_name": group_name,
        "ds_zero_placement_family": "autoep_expert",
        "ds_zero_partition_group_name": group_name,
        "ds_zero_partition_process_group": edp_group,
        "ruda_experts": (owned.start, owned.stop),
    }
    for mark, value in marks.items():
        setattr(parameter, mark, value)


@contextlib.contextmanager
def expert_groups_below_stage3() -> Iterator[None]:
    """While an engine is made below ZeRO-3: let the optimizer partition experts over the ranks that hold a copy.

    DeepSpeed does so for its own expert layers, which it recognises by class (``has_moe_layers``), and from optimizer
    groups of experts alone. The engine is told so only while it makes the ZeRO optimizer: elsewhere the word means
    that the layers are DeepSpeed's.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    configure = DeepSpeedEngine._configure_zero_optimizer

    def configure_with_experts(engine: Any, optimizer: Any) -> Any:
        if optimizer is not None and split_expert_groups(optimizer):
            engine.has_moe_layers = True
        try:
            return configure(engine, optimizer)
        finally:
            engine.has_moe_layers = False

    DeepSpeedEngine._configure_zero_optimizer = configure_with_experts
    try:
        yield
    finally:
        DeepSpeedEngine._configure_zero_optimizer = configure


def split_expert_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Give marked expert parameters optimizer groups of their own, after the others; whether there are any.

    A group keeps the settings of the one that it came from, and gets the two keys that DeepSpeed looks for.
    """
    found = False
    for group in list(optimizer.param_groups):
        kinds: dict[str | None, list] = {}
        for parameter in group["params"]:
            kinds.setdefault(None if expert_range(parameter) is None else parameter.group_name, []).append(parameter)
        found = found or set(kinds) != {None}
        parts: list[dict[str, Any]] = [{"params": kinds.pop(None)}] if None in kinds else []
        parts += [{"params": experts, "moe": True, "name": name} for name, experts in kinds.items()]
        optimizer.param_groups += [{**group, **part} for part in parts[1:]]
        group.update(parts[0])
    return found


def partitions_experts(optimizer: Any) -> bool:
    """Whether a ZeRO-1 or 2 optimizer was made with experts in groups of their own."""
    return bool(optimizer.has_moe_layers)


def expert_range(parameter: Any) -> tuple[int, int] | None:
    """Half-open range of the experts that a parameter holds; None if it is not an expert's."""
    return getattr(parameter, "ruda_experts", None)


def mark_leaf_module(module: torch.nn.Module) -> None:
    """Let ZeRO-3 gather and reduce all parameters of a module at once, whatever its forward uses of them.

    Without it a rank without rows or experts hangs the others.
    """
    from deepspeed.utils import set_z3_leaf_module

    set_z3_leaf_module(module, True)
