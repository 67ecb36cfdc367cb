"""The two ways in: make an engine with an accumulator, or give one to an engine that another library made."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import torch

from ruda_ds import _deepspeed, config
from ruda_ds.accumulation import GradientAccumulator
from ruda_ds.accumulation.one_model import require_one_model
from ruda_ds.comm.start import meeting_within
from ruda_ds.comm.watchdog import Watchdog
from ruda_ds.errors import ConfigError
from ruda_ds.moe import ExpertParallelMoE, chain_exchanges, ownership_of, replace_moe_blocks
from ruda_ds.moe.families import FAMILIES

logger = logging.getLogger("ruda_ds")


def initialize(args: Any = None, **keywords: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, with ``engine.accumulator`` attached.

    Takes what DeepSpeed takes and returns its (engine, optimizer, dataloader, scheduler). Settings that exact
    accumulation needs are filled in where the config is silent; those that it cannot honour are refused before
    anything is built.

    Raises:
        ConfigError: by key, value and what to set instead.
        VersionError: the installed DeepSpeed is not a known one.
        RankDisagreementError: on every rank; one has another model, or other optimizer groups, than the rest.
    """
    _deepspeed.require_supported_version()
    import deepspeed

    given = keywords.pop("config", None)
    given = keywords.pop("config_params", None) if given is None else given
    if given is None:
        given = getattr(args, "deepspeed_config", None)
        if given is not None:  # DeepSpeed refuses to be told twice
            args = copy.copy(args)
            args.deepspeed_config = None
    model = keywords.get("model")
    _deepspeed.refuse_pipeline(model)
    if given is not None:
        keywords["config"] = config.complete(_deepspeed.load_config(given))
        limit_s = config.check(keywords["config"]).timeout_s
        with meeting_within(limit_s, "the first meeting of the ranks"):
            deepspeed.init_distributed()
        _deepspeed.forget_shared_memory_buffer()
        _watch(limit_s)  # from here on: a rank may be lost while engines are made
        if isinstance(model, torch.nn.Module):
            split_experts(model, config.check(keywords["config"]).experts, keywords.get("optimizer"))
            compare_ranks(model, keywords)
    with expert_partitions(keywords):
        engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, **keywords)
    attach(engine)
    return engine, optimizer, loader, scheduler


def compare_ranks(model: torch.nn.Module, keywords: dict[str, Any]) -> None:
    """`require_one_model`, with the optimizer's groups: now if it is made, else once DeepSpeed has it made."""
    optimizer, world = keywords.get("optimizer"), torch.distributed.group.WORLD
    assert world is not None  # init_distributed has been called

    def compared(made: Any) -> Any:
        groups = [list(group["params"]) for group in getattr(made, "param_groups", ())]
        require_one_model(model, groups, world)
        return made

    compared(optimizer)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        keywords["optimizer"] = lambda parameters: compared(optimizer(parameters))


def _watch(limit_s: float) -> None:
    if torch.distributed.get_world_size() > 1:
        Watchdog.of_this_process(limit_s)


def expert_partitions(keywords: dict[str, Any]) -> contextlib.AbstractContextManager:
    """What must hold while DeepSpeed makes an engine from these keywords, so that ranks keep their own experts.

    Raises:
        ConfigError: below ZeRO-3, a scheduler made for an optimizer whose groups will be split.
    """
    model, scheduler = keywords.get("model"), keywords.get("lr_scheduler")
    layers = model.modules() if isinstance(model, torch.nn.Module) else ()
    split = any(isinstance(layer, ExpertParallelMoE) and layer.experts.ownership.world_size > 1 for layer in layers)
    if not split or config.lookup(keywords.get("config") or {}, "zero_optimization.stage") == 3:
        return contextlib.nullcontext()
    if scheduler is not None and not callable(scheduler):
        raise ConfigError(
            "zero_optimization.stage",
            config.lookup(keywords["config"], "zero_optimization.stage"),
            "pass lr_scheduler as a callable that takes the optimizer: below stage 3 the experts get optimizer groups "
            "of their own, which a scheduler made before would not know",
        )
    return _deepspeed.expert_groups_below_stage3()


def split_experts(model: torch.nn.Module, experts: config.ExpertsConfig | None, optimizer: Any) -> None:
    """Apply `ruda.experts` to a model: replace a transformers model's blocks, or check those that are ours already.

    Raises:
        ConfigError: layers of ours with another ownership; or blocks to replace whose parameters an optimizer holds.
        OwnershipError: see `replace_moe_blocks`.
    """
    if experts is None:
        return
    layers = [module for module in model.modules() if isinstance(module, ExpertParallelMoE)]
    for layer in layers:
        found = layer.experts.ownership
        if found != ownership_of(experts.ownership, found.num_experts, experts.ep_size):
            raise ConfigError(
                "ruda.experts", experts.ownership, f"a layer of the model has {found}, ep_size {found.world_size}"
            )
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    if layers or family is None:
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "ruda.experts",
            experts.ownership,
            "the optimizer holds the parameters of the blocks that would be replaced: call replace_moe_blocks before "
            "making it, or pass a callable that makes it from parameters",
        )
    count = family.num_experts(model.config)
    ownership = ownership_of(experts.ownership, count, experts.ep_size)
    replace_moe_blocks(model, ownership, balance_loss=experts.balance_loss, z_loss=experts.z_loss)


def attach(engine: Any) -> GradientAccumulator:
    """Bind a GradientAccumulator to a DeepSpeed engine and return it; it is ``engine.accumulator`` from then on.

    For engines that another library made (Accelerate, Lightning): put `"data_types": {"grad_accum_dtype": "fp32"}`
    into the config that it hands to DeepSpeed.

    Raises:
        ConfigError, BindingError, VersionError, HookError, RankDisagreementError: see GradientAccumulator.
    """
    accumulator = GradientAccumulator(engine)
    chain_exchanges(engine.module)
    settings = accumulator.config
    _watch(settings.timeout_s)
    if engine.global_rank == 0:
        logger.info(
            "exact accumulation: ZeRO stage %d, sums in %s, loss scale %g, gradient clipping %g",
            int(engine.zero_optimization_stage()),
            settings.dtype,
            settings.loss_scale,
            settings.gradient_clipping,
        )
    return accumulator
