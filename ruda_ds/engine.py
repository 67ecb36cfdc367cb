"""The two ways in: make an engine with an accumulator, or give one to an engine that another library made."""

from __future__ import annotations

import copy
import logging
from typing import Any

from ruda_ds import _deepspeed, config
from ruda_ds.accumulation import GradientAccumulator
from ruda_ds.moe import chain_exchanges

logger = logging.getLogger("ruda_ds")


def initialize(args: Any = None, **keywords: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, with ``engine.accumulator`` attached.

    Takes what DeepSpeed takes and returns its (engine, optimizer, dataloader, scheduler). Settings that exact
    accumulation needs are filled in where the config is silent; those that it cannot honour are refused before
    anything is built.

    Raises:
        ConfigError: by key, value and what to set instead.
        VersionError: the installed DeepSpeed is not a known one.
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
    if given is not None:
        keywords["config"] = config.complete(_deepspeed.load_config(given))
    engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, **keywords)
    attach(engine)
    return engine, optimizer, loader, scheduler


def attach(engine: Any) -> GradientAccumulator:
    """Bind a GradientAccumulator to a DeepSpeed engine and return it; it is ``engine.accumulator`` from then on.

    For engines that another library made (Accelerate, Lightning): put `"data_types": {"grad_accum_dtype": "fp32"}`
    into the config that it hands to DeepSpeed.

    Raises:
        ConfigError, BindingError, VersionError, HookError: see GradientAccumulator.
    """
    accumulator = GradientAccumulator(engine)
    chain_exchanges(engine.module)
    settings = accumulator.config
    if engine.global_rank == 0:
        logger.info(
            "exact accumulation: ZeRO stage %d, sums in %s, loss scale %g, gradient clipping %g",
            int(engine.zero_optimization_stage()),
            settings.dtype,
            settings.loss_scale,
            settings.gradient_clipping,
        )
    return accumulator
