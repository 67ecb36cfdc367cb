"""The `"ruda"` section of the DeepSpeed JSON, and the settings of DeepSpeed that exact accumulation cannot honour."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import Field, ValidationError

from ruda_ds import _deepspeed
from ruda_ds.errors import ConfigError

SECTION = "ruda"
FLOAT32_NAMES = ("fp32", "float32", "float")

logger = logging.getLogger("ruda_ds")


class AccumulationConfig(DeepSpeedConfigModel):
    """`ruda.accumulation`: precision of the pending sums, fixed loss scale, and what a window without a token does."""

    dtype: Literal["float32", "float64"] = "float32"
    # None: fp16.loss_scale if fp16 is on, else 1.
    loss_scale: float | None = Field(None, gt=0, allow_inf_nan=False)
    # True: the step is skipped and reported. False: the optimizer steps with zero gradients.
    skip_empty_window: bool = True


class ExpertsConfig(DeepSpeedConfigModel):
    """`ruda.experts`: how the experts of every MoE block are split over groups of ``ep_size`` consecutive ranks."""

    ep_size: int = Field(1, ge=1)
    # "even", or the prefix of an ExpertOwnership: ep_size + 1 numbers from 0 to the number of experts.
    ownership: Literal["even"] | list[int] = "even"
    # Of the blocks that are replaced in a transformers model; see MoEOptions.
    balance_loss: float = Field(0.0, ge=0)
    z_loss: float = Field(0.0, ge=0)


class RudaSection(DeepSpeedConfigModel):
    """The whole section; a key that is not here is refused."""

    accumulation: AccumulationConfig = AccumulationConfig()
    experts: ExpertsConfig | None = None
    # Seconds within which every rank has ended after one has failed; see comm/watchdog.py.
    timeout_s: float = Field(1800.0, gt=0)


@dataclass(frozen=True)
class RudaConfig:
    """The settings in force for one engine.

    Attributes:
        dtype: of the pending sums.
        loss_scale: fixed multiplier of every loss.
        skip_empty_window: whether a window without a token leaves the optimizer alone.
        gradient_clipping: maximum norm of the mean gradient; 0 for none. DeepSpeed's key, done by our norm.
        steps_per_window: how many ``engine.step()`` calls make a window, where those drive it.
        timeout_s: seconds within which every rank has ended after one has failed.
    """

    dtype: torch.dtype
    loss_scale: float
    skip_empty_window: bool
    gradient_clipping: float
    steps_per_window: int
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class Refusal:
    """One setting that is refused.

    Attributes:
        path: dotted key in the DeepSpeed JSON.
        refused: whether a value found there is refused; not asked if the key is absent.
        advice: what to set instead, and why.
    """

    path: str
    refused: Callable[[Any], bool]
    advice: str


def _is_set(value: Any) -> bool:
    return bool(value) and value != {"enabled": False}


def _enabled(value: Any) -> bool:
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


_ZERO = "zero_optimization"
REFUSALS = (
    Refusal(f"{_ZERO}.offload_optimizer.device", lambda v: v == "nvme", "set it to cpu or none: NVMe is not tested"),
    Refusal(f"{_ZERO}.offload_param.device", lambda v: v == "nvme", "set it to cpu or none: NVMe is not tested"),
    Refusal(f"{_ZERO}.offload_optimizer.super_offload", bool, "remove it: SuperOffload replaces the gradient path"),
    Refusal(f"{_ZERO}.offload_optimizer.ratio", lambda v: v != 1.0, "set it to 1.0: partial offload is not tested"),
    Refusal(f"{_ZERO}.zenflow", _is_set, "remove it: ZenFlow steps on gradients before the window ends"),
    Refusal(f"{_ZERO}.zero_quantized_gradients", bool, "set it to false: a quantized wire is not an exact sum"),
    Refusal(f"{_ZERO}.zero_quantized_weights", bool, "set it to false: it is not tested"),
    Refusal(f"{_ZERO}.zero_quantized_nontrainable_weights", bool, "set it to false: it is not tested"),
    Refusal(f"{_ZERO}.zero_hpz_partition_size", lambda v: v > 1, "set it to 1: hpZ is not tested"),
    Refusal(f"{_ZERO}.mics_shard_size", lambda v: v > 0, "remove it: MiCS has another optimizer"),
    Refusal(f"{_ZERO}.reduce_scatter", lambda v: not v, "set it to true: the sum is a reduce-scatter"),
    Refusal("torch_autocast", _enabled, "remove it and set bf16 or fp16: autocast brings a scaler of its own"),
    Refusal("amp", _enabled, "remove it and set bf16 or fp16"),
    Refusal("compile.deepcompile", bool, "set it to false: DeepCompile reduces gradients inside the graph"),
    Refusal(
        "optimizer.type",
        lambda v: str(v).lower() in ("muon", "onebitadam", "zerooneadam", "onebitlamb"),
        "use AdamW or another element-wise optimizer: this one takes over the gradient's communication",
    ),
    Refusal("fp16.fp16_master_weights_and_grads", bool, "set it to false: pending sums are float32 or float64"),
    Refusal("bf16.bf16_master_weights_and_grads", bool, "set it to false: pending sums are float32 or float64"),
    Refusal("sequence_parallel_size", lambda v: v > 1, "set it to 1: sequence parallelism is not tested"),
    Refusal("tensor_parallel.autotp_size", lambda v: v > 1, "set it to 0: tensor parallelism is not tested"),
    Refusal("expert_parallel", _enabled, "remove it: DeepSpeed's AutoEP divides expert gradients by the world"),
    Refusal("hybrid_engine", _enabled, "remove it: the hybrid engine is not tested"),
    Refusal("sparse_gradients", bool, "set it to false: gradients are reduced as dense sums"),
    Refusal("prescale_gradients", bool, "set it to false: a sum is divided once, at the window's end"),
    Refusal("gradient_predivide_factor", lambda v: v != 1.0, "set it to 1.0: a sum is divided once"),
    Refusal(
        "communication_data_type",
        lambda v: str(v).lower() not in FLOAT32_NAMES,
        "set it to fp32 or leave it out: the wire carries float32 or float64 sums",
    ),
    Refusal(
        "data_types.grad_accum_dtype",
        lambda v: str(v).lower() not in FLOAT32_NAMES,
        "set it to fp32 or leave it out: 256 + 0.5 is 256 in bf16",
    ),
    Refusal(
        "managed_gradient_accumulation",
        bool,
        "leave it out: the window's end is gradient_accumulation_steps, the boundary flag or accumulator.step()",
    ),
)


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if a key on the way is absent."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def check(config: Mapping[str, Any]) -> RudaSection:
    """The parsed `"ruda"` section of a DeepSpeed config.

    Raises:
        ConfigError: an unknown key of the section, or a setting of DeepSpeed that is not supported.
    """
    for refusal in REFUSALS:
        value = lookup(config, refusal.path)
        try:
            refused = value is not None and refusal.refused(value)
        except TypeError:  # "auto", or a number in quotes
            raise ConfigError(refusal.path, value, f"expected a value of another type; {refusal.advice}") from None
        if refused:
            raise ConfigError(refusal.path, value, refusal.advice)
    stage = lookup(config, f"{_ZERO}.stage")
    if stage not in (1, 2, 3):
        raise ConfigError(
            f"{_ZERO}.stage", stage, "set it to 1, 2 or 3: without ZeRO there are no shards to account for"
        )
    if stage == 1 and lookup(config, "bf16.enabled") and lookup(config, f"{_ZERO}.offload_optimizer.device") != "cpu":
        raise ConfigError(
            f"{_ZERO}.stage", 1, "set it to 2 or 3: DeepSpeed runs bf16 at stage 1 through BF16_Optimizer"
        )
    if lookup(config, "fp16.enabled") and not lookup(config, "fp16.loss_scale"):
        raise ConfigError(
            "fp16.loss_scale",
            lookup(config, "fp16.loss_scale"),
            "set a fixed scale such as 128: a dynamic one changes in mid-window, and the sums with it",
        )
    try:
        section = RudaSection(**config.get(SECTION, {}))
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join([SECTION, *map(str, first["loc"])])
        message = first["msg"].replace("Input should be", "expected")
        expected = "remove this key: it is unknown" if first["type"] == "extra_forbidden" else message
        raise ConfigError(path, first["input"], expected) from None
    except TypeError as error:
        raise ConfigError(SECTION, config.get(SECTION), f"expected an object ({error})") from None
    loss_scale(config, section.accumulation)
    experts = section.experts
    if experts is not None and experts.ownership != "even" and len(experts.ownership) != experts.ep_size + 1:
        raise ConfigError(
            "ruda.experts.ownership",
            experts.ownership,
            f"expected {experts.ep_size + 1} numbers for an ep_size of {experts.ep_size}: it is a prefix",
        )
    return section


def loss_scale(config: Mapping[str, Any], accumulation: AccumulationConfig) -> float:
    """The one loss scale of a config: the section's, else fp16's static one, else 1.

    Raises:
        ConfigError: both are there and differ.
    """
    fp16_scale = lookup(config, "fp16.loss_scale") if lookup(config, "fp16.enabled") else None
    if fp16_scale and accumulation.loss_scale not in (None, fp16_scale):
        raise ConfigError(
            "ruda.accumulation.loss_scale",
            accumulation.loss_scale,
            f"fp16.loss_scale is {fp16_scale}: leave one of them out, there is one scale in a window",
        )
    return float(accumulation.loss_scale or fp16_scale or 1.0)


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checked copy of a DeepSpeed config with what exact accumulation needs filled in where it is absent."""
    check(config)
    result = copy.deepcopy(dict(config))
    result.setdefault("communication_data_type", "fp32")
    result["data_types"] = {"grad_accum_dtype": "fp32", **(result.get("data_types") or {})}
    return result


def check_engine(engine: Any) -> RudaConfig:
    """The settings in force for a live engine, whoever made it.

    Raises:
        ConfigError: as `check`; or its gradients are not accumulated in float32; or two loss scales contradict.
    """
    raw = _deepspeed.raw_config(engine)
    whole = check(raw)
    section = whole.accumulation
    optimizer = _deepspeed.zero_optimizer(engine)
    found = _deepspeed.gradient_dtype(optimizer)
    if found != torch.float32:
        raise ConfigError(
            "data_types.grad_accum_dtype", str(found), "set it to fp32 in the config that the engine is made from"
        )
    below = not _deepspeed.is_stage3(optimizer) and not _deepspeed.partitions_experts(optimizer)
    if below and any(_deepspeed.expert_range(parameter) for parameter in engine.module.parameters()):
        raise ConfigError(
            "zero_optimization.stage",
            int(engine.zero_optimization_stage()),
            "set it to 3, or make the engine with ruda_ds.initialize: DeepSpeed has partitioned each rank's own "
            "experts over all ranks",
        )
    clipping = float(engine.gradient_clipping())
    if "gradient_clipping" not in raw:
        logger.warning(
            "gradient_clipping is not in the config: DeepSpeed's default of %s is in force; 0 turns it off", clipping
        )
    caller_owns = raw.get("managed_gradient_accumulation") is False
    return RudaConfig(
        dtype=getattr(torch, section.dtype),
        loss_scale=loss_scale(raw, section),
        skip_empty_window=section.skip_empty_window,
        gradient_clipping=clipping,
        steps_per_window=1 if caller_owns else int(engine.gradient_accumulation_steps()),
        timeout_s=whole.timeout_s,
    )
