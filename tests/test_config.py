"""Settings: what is filled in, what is refused by key, value and advice, and what a live engine is held to."""

import copy

import pytest
import torch
from helpers import base_config, make_engine, make_model

import ruda_ds
from ruda_ds import config
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import ConfigError

REFUSED = {
    "zero_optimization.offload_optimizer.device": "nvme",
    "zero_optimization.offload_param.device": "nvme",
    "zero_optimization.offload_optimizer.super_offload": True,
    "zero_optimization.offload_optimizer.ratio": 0.3,
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.zero_quantized_gradients": True,
    "zero_optimization.zero_quantized_weights": True,
    "zero_optimization.zero_quantized_nontrainable_weights": True,
    "zero_optimization.zero_hpz_partition_size": 2,
    "zero_optimization.mics_shard_size": 2,
    "zero_optimization.reduce_scatter": False,
    "zero_optimization.stage": 0,
    "torch_autocast": {"enabled": True},
    "amp": {"enabled": True},
    "compile.deepcompile": True,
    "optimizer.type": "Muon",
    "fp16": {"enabled": True},
    "fp16.fp16_master_weights_and_grads": True,
    "bf16.bf16_master_weights_and_grads": True,
    "sequence_parallel_size": 2,
    "tensor_parallel.autotp_size": 2,
    "expert_parallel": {"enabled": True},
    "hybrid_engine": {"enabled": True},
    "sparse_gradients": True,
    "prescale_gradients": True,
    "gradient_predivide_factor": 2.0,
    "communication_data_type": "bf16",
    "data_types.grad_accum_dtype": "bf16",
    "managed_gradient_accumulation": True,
    "zero_optimization.stage ": 1,
    "ruda.accumulation.loss_scale": 0,
    "ruda.accumulation.dtype": "bfloat16",
    "ruda.accumulation.losscale": 1.0,
    "ruda.acumulation": {},
    "ruda": 3,
}


def with_value(path: str, value: object) -> dict:
    changed = base_config()
    if path == "zero_optimization.stage ":  # a second case of one key
        changed["bf16"] = {"enabled": True}
    *outer, last = path.strip().split(".")
    section = changed
    for key in outer:
        section = section.setdefault(key, {})
    section[last] = value
    return changed


@pytest.mark.parametrize(("path", "value"), REFUSED.items(), ids=list(REFUSED))
def test_refused_settings_name_key_value_and_advice(path, value):
    with pytest.raises(ConfigError, match="set|remove|use|leave|expected|should") as caught:
        config.complete(with_value(path, value))
    named = "fp16.loss_scale" if path == "fp16" else path.strip()
    assert caught.value.key == named
    assert repr(named) in str(caught.value)


def test_two_loss_scales_are_refused_before_anything_is_built():
    both = with_value("ruda.accumulation.loss_scale", 8)
    both["fp16"] = {"enabled": True, "loss_scale": 64}
    with pytest.raises(ConfigError, match="leave one of them out"):
        config.complete(both)
    both["ruda"]["accumulation"]["loss_scale"] = 64
    config.complete(both)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.zero_hpz_partition_size", "auto"),
        ("sequence_parallel_size", "2"),
    ],
)
def test_values_of_another_type_are_refused_by_key(path, value):
    with pytest.raises(ConfigError, match="another type") as caught:
        config.complete(with_value(path, value))
    assert caught.value.key == path
    assert "set it to 1" in caught.value.expected


@pytest.mark.parametrize("path", [refusal.path for refusal in config.REFUSALS])
def test_every_refusal_is_tried(path):
    assert path in REFUSED


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("torch_autocast", {"enabled": False}),
        ("zero_optimization.zenflow", None),
        ("zero_optimization.offload_optimizer.device", "cpu"),
        ("fp16", {"enabled": False}),
        ("fp16", {"loss_scale": 0}),
        ("torch_autocast", {"dtype": "bfloat16"}),
        ("data_types", None),
        ("fp16", {"enabled": True, "loss_scale": 64}),
        ("communication_data_type", "fp32"),
        ("managed_gradient_accumulation", False),
    ],
)
def test_the_harmless_value_of_the_same_keys_is_accepted(path, value):
    config.complete(with_value(path, value))


def test_what_is_absent_is_filled_in_and_the_original_left_alone():
    given = base_config(data_types={})
    before = copy.deepcopy(given)
    completed = config.complete(given)
    assert completed["communication_data_type"] == "fp32"
    assert completed["data_types"]["grad_accum_dtype"] == "fp32"
    assert given == before


def engines():
    import deepspeed

    model = make_model().bfloat16()
    plain = base_config(bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"})
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), config=plain
    )
    with pytest.raises(ConfigError, match=r"grad_accum_dtype.*fp32"):
        ruda_ds.attach(engine)
    with pytest.raises(ConfigError, match=r"stage.*2 or 3"):
        make_engine(base_config(zero_optimization={"stage": 1}, bf16={"enabled": True}), model=make_model().bfloat16())
    settings = make_engine(base_config()).accumulator.config
    assert (settings.dtype, settings.loss_scale, settings.gradient_clipping) == (torch.float32, 1.0, 0.0)
    default = base_config()
    del default["gradient_clipping"]
    assert make_engine(default).accumulator.config.gradient_clipping == 1.0
    return True


def test_live_engines_are_held_to_the_same():
    assert run_ranks(engines, 1) == [True]


def by_path(path: str):
    import argparse

    args = argparse.Namespace(deepspeed_config=path, local_rank=0)
    model = make_model()
    engine, *_ = ruda_ds.initialize(
        args=args, model=model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    )
    return args.deepspeed_config == path and engine.accumulator.config.skip_empty_window is False


def test_the_config_may_come_by_the_launchers_argument(tmp_path):
    import json

    path = tmp_path / "config.json"
    path.write_text(json.dumps(base_config(ruda={"accumulation": {"skip_empty_window": False}})))
    assert run_ranks(by_path, 1, str(path)) == [True]
