"""A live engine as a manifest, and a manifest against a live engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import ruda_ds
from ruda_ds import _deepspeed
from ruda_ds.accumulation.placement import compare
from ruda_ds.accumulation.record import PendingGradientsRecord, window_fields
from ruda_ds.checkpoint.manifest import ExpertsEntry, Manifest, ModelEntry, ParameterEntry
from ruda_ds.errors import CheckpointError, PlacementError, RecordError
from ruda_ds.moe import ExpertParallelMoE, LoRAExperts


def expert_modules(module: torch.nn.Module) -> dict[str, ExpertParallelMoE]:
    """Module name -> expert layer, in order; a layer that stands twice is listed once."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, ExpertParallelMoE)}


def homes_of_experts(module: torch.nn.Module) -> dict[str, str]:
    """Name of each expert parameter -> module name of its expert layer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    homes: dict[str, str] = {}
    for home, layer in expert_modules(module).items():
        for _, parameter in layer.experts.named_parameters():
            homes.setdefault(names[id(parameter)], home)
    return homes


def whole_expert_shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    """Name -> [E, ...] of the expert parameters whose shape this rank must tell: it is their first owner's to say."""
    optimizer = _deepspeed.zero_optimizer(engine)
    rank = torch.distributed.get_rank(_deepspeed.data_parallel_group(optimizer))
    layers, parameters = expert_modules(engine.module), dict(engine.module.named_parameters())
    shapes = {}
    for name, home in homes_of_experts(engine.module).items():
        prefix = layers[home].experts.ownership.prefix
        first = next(owner for owner, (start, stop) in enumerate(pairwise(prefix)) if stop > start)
        if rank == first:
            shapes[name] = (prefix[-1], *_deepspeed.logical_shape(parameters[name])[1:])
    return shapes


def experts_entry(module: torch.nn.Module) -> ExpertsEntry | None:
    """Ownership of every expert layer; None without one.

    Raises:
        CheckpointError: layers that are split over different numbers of ranks.
    """
    ownership = {name: layer.experts.ownership.prefix for name, layer in expert_modules(module).items()}
    if not ownership:
        return None
    sizes = sorted({len(prefix) - 1 for prefix in ownership.values()})
    if len(sizes) > 1:
        raise CheckpointError(f"expert layers are split over {sizes} ranks, expected one ep_size in a model")
    return ExpertsEntry(sizes[0], ownership)


def adapters_of(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Module name -> scale and state of each LoRAExperts: what a conversion must know to fold them in, once."""
    return {
        name: {"scale": layer.scale, "merged": layer.merged}
        for name, layer in module.named_modules()
        if isinstance(layer, LoRAExperts)
    }


def describe(
    engine: Any, tag: str, record: PendingGradientsRecord, expert_shapes: Mapping[str, tuple[int, ...]]
) -> Manifest:
    """The manifest of a live engine, without its files.

    Args:
        expert_shapes: `whole_expert_shapes` of all ranks together.
    """
    import deepspeed

    module, optimizer = engine.module, _deepspeed.zero_optimizer(engine)
    homes = homes_of_experts(module)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = tuple(
        ParameterEntry(
            name=name,
            shape=tuple(expert_shapes.get(name, _deepspeed.logical_shape(parameter))),
            dtype=str(parameter.dtype).removeprefix("torch."),
            requires_grad=parameter.requires_grad,
            experts=homes.get(name),
            index=index,
        )
        for index, (name, parameter) in enumerate(module.named_parameters())
        if parameter.dtype.is_floating_point
    )
    aliases = module.named_parameters(remove_duplicate=False)
    return Manifest(
        tag=tag,
        zero_stage=int(engine.zero_optimization_stage()),
        world_size=torch.distributed.get_world_size(_deepspeed.data_parallel_group(optimizer)),
        window=window_fields(record.state, record.loss),
        global_steps=int(engine.global_steps),
        micro_steps=int(engine.micro_steps),
        parameters=parameters,
        groups=tuple(map(tuple, _deepspeed.names_by_param_group(optimizer, names))),
        tied={alias: names[id(parameter)] for alias, parameter in aliases if alias != names[id(parameter)]},
        experts=experts_entry(module),
        model=_model_entry(module),
        optimizer=type(optimizer.optimizer).__name__,
        scheduler=None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__,
        adapters=adapters_of(module),
        versions={"ruda_ds": ruda_ds.__version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__},
    )


def _model_entry(module: torch.nn.Module) -> ModelEntry:
    """With the first transformers configuration that is found, the module's own or that of one inside it."""
    for prefix, inner in module.named_modules():
        to_dict = getattr(getattr(inner, "config", None), "to_dict", None)
        if to_dict is not None:
            return ModelEntry(type(inner).__name__, json.loads(json.dumps(to_dict(), default=str)), prefix)
    return ModelEntry(type(module).__name__)


# --- against an engine ------------------------------------------------------------------------------------------

RESHARD = "take it there with `ruda-convert reshard`"


def check_run(engine: Any, manifest: Manifest, where: Path) -> None:
    """Compare a manifest with a live engine: everything but the parameters, which `check_placement` compares.

    Raises:
        CheckpointError: another world, ZeRO stage, ownership, optimizer, scheduler or kind of window; the message says
            what was expected (of this engine) and what was found.
    """
    optimizer, experts = _deepspeed.zero_optimizer(engine), experts_entry(engine.module)
    world = torch.distributed.get_world_size(_deepspeed.data_parallel_group(optimizer))
    if manifest.world_size != world:
        raise CheckpointError(
            f"{where}: saved on {manifest.world_size} ranks, expected {world}: {RESHARD} CHECKPOINT OUT --world {world}"
        )
    if manifest.experts != experts:
        advice = RESHARD if manifest.experts and experts else "another model"
        raise CheckpointError(f"{where}: experts are {manifest.experts}, expected {experts}: {advice}")
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups = tuple(map(tuple, _deepspeed.names_by_param_group(optimizer, names)))
    scheduler = None if engine.lr_scheduler is None else type(engine.lr_scheduler).__name__
    own = engine.accumulator.state
    wanted = {
        "ZeRO stage": (manifest.zero_stage, int(engine.zero_optimization_stage())),
        "kind of window": (manifest.window["kind"], type(own).__name__),
        "accumulation dtype": (manifest.state.dtype, own.dtype),
        "loss_scale": (manifest.state.loss_scale, own.loss_scale),
        "adapters": (manifest.adapters, adapters_of(engine.module)),
        "optimizer": (manifest.optimizer, type(optimizer.optimizer).__name__),
        "scheduler": (manifest.scheduler, scheduler),
        "number of parameter groups": (len(manifest.groups), len(groups)),
    }
    for field, (found, expected) in wanted.items():
        if found != expected:
            raise CheckpointError(f"{where}: {field} is {found}, expected {expected}")


def check_placement(
    engine: Any, manifest: Manifest, where: Path, rank: int, fragments: Mapping[str, tuple[int, int]] | None
) -> None:
    """Compare a manifest's parameters with this rank's; raises CheckpointError naming the first that differs."""
    try:
        compare(engine.accumulator.placement, manifest.placement(rank, fragments))
    except (PlacementError, RecordError) as error:
        raise CheckpointError(f"{where}: another model, or another way of splitting it: {error}") from None
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    groups = _deepspeed.names_by_param_group(_deepspeed.zero_optimizer(engine), names)
    for index, (found, expected) in enumerate(zip(manifest.groups, groups, strict=True)):
        if list(found) != expected:
            place = next(
                n for n, pair in enumerate(zip([*found, None], [*expected, None], strict=False)) if len({*pair}) > 1
            )
            raise CheckpointError(
                f"{where}: parameter group {index} of the optimizer differs at place {place}: "
                f"{(*found, None)[place]}, expected {(*expected, None)[place]}"
            )
