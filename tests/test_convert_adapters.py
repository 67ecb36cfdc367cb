"""Adapters of a training checkpoint written apart: with the base they are what merging writes, or they are refused."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.distributed as dist
from convert_helpers import config_of, convert, save_hf, tensors_of, tiny, windows
from helpers import base_config
from safetensors.torch import load_file

import ruda_ds
from ruda_ds.checkpoint.adapters_disk import adapter_config, plan_adapters
from ruda_ds.checkpoint.to_hf import open_origin
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import CheckpointError
from ruda_ds.moe import ExpertOwnership, replace_moe_blocks
from ruda_ds.moe.adapters import TARGETS, LoRAExperts

HIDDEN, INNER, ALPHA = 32, 24, 6.0
PREFIXES = {"qwen3_moe": [0, 2, 6], "mixtral": [0, 5, 6], "deepseek_v3": [0, 0, 8]}
NAMES = {kind: dict(zip(TARGETS, ("gate_proj", "up_proj", "down_proj"), strict=True)) for kind in PREFIXES}
NAMES["mixtral"] = {"gate": "w1", "up": "w3", "down": "w2"}


def train(folder, kind="qwen3_moe", targets=TARGETS, ranks=(3, 3), unfrozen=None, bf16=False):
    """Two steps of adapters over two ranks under ZeRO-3, saved.

    Args:
        ranks: of the adapters, layer by layer.
        unfrozen: part of the names of base parameters that are trained too.
    """
    model = tiny(kind, torch.bfloat16 if bf16 else torch.float32)
    replace_moe_blocks(model, ExpertOwnership(PREFIXES[kind]), rank=dist.get_rank())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(unfrozen is not None and unfrozen in name)
    blocks = [block for block in model.modules() if hasattr(block, "experts") and hasattr(block, "router")]
    torch.manual_seed(dist.get_rank())  # no two experts alike
    for block, rank in zip(blocks, ranks, strict=False):
        block.experts = LoRAExperts(block.experts, rank, ALPHA, targets=targets)
        for factor in block.experts.up_factors.values():  # of experts that see no token too
            torch.nn.init.normal_(factor, std=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = base_config(**({"bf16": {"enabled": True}} if bf16 else {}))
    engine, *_ = ruda_ds.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=0.1), config=config)
    windows(engine, 0, 2)
    ruda_ds.save_checkpoint(engine, folder, tag="t")


def modules(kind) -> list[str]:
    """Names on disk of the experts of all layers that have some."""
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"
    layers = (1,) if kind == "deepseek_v3" else (0, 1)
    return [f"model.layers.{layer}.{block}.experts.{e}" for layer in layers for e in range(PREFIXES[kind][-1])]


@pytest.mark.parametrize(
    ("kind", "targets", "bf16"),
    [("qwen3_moe", TARGETS, False), ("mixtral", ("down", "gate"), True), ("deepseek_v3", TARGETS, False)],
)
def test_base_and_adapters_are_what_merging_writes(kind, targets, bf16, tmp_path, capsys):
    run_ranks(train, 2, str(tmp_path / "ckpt"), kind, targets, (3, 3), None, bf16)
    wide = ("--dtype", "fp32")
    assert convert("to-hf", tmp_path / "ckpt", tmp_path / "merged", *wide) == 0
    capsys.readouterr()
    assert convert("to-hf", tmp_path / "ckpt", tmp_path / "out", "--lora", "adapter", *wide) == 0
    printed = capsys.readouterr().out
    assert ("note: selection biases are not" in printed) is (kind == "deepseek_v3")
    assert ("note: not all of gate, up and down" in printed) is (len(targets) < 3)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    base = tensors_of(save_hf(kind, tmp_path / "base", torch.bfloat16 if bf16 else torch.float32))
    merged, found = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "out")
    changed = set()
    for module in modules(kind):
        for target in targets:
            name = f"{module}.{NAMES[kind][target]}"
            a, b = (found.pop(f"base_model.model.{name}.{half}.weight") for half in ("lora_A", "lora_B"))
            inner, out = (INNER, HIDDEN) if target == "down" else (HIDDEN, INNER)
            assert (a.shape, b.shape, a.dtype, b.dtype) == ((3, inner), (out, 3), torch.float32, torch.float32)
            together = base[f"{name}.weight"].float() + (ALPHA / 3) * (b @ a)
            torch.testing.assert_close(merged[f"{name}.weight"], together, rtol=1e-6, atol=1e-6)
            changed.add(f"{name}.weight")
    assert not found
    assert {name for name in base if (merged[name] - base[name].float()).abs().max() > 1e-3} == changed
    assert all(torch.equal(merged[name], base[name].float()) for name in base.keys() - changed)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": 3,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "target_modules": sorted(NAMES[kind][target] for target in targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    assert isinstance(config["lora_alpha"], int)
    assert convert("to-hf", tmp_path / "ckpt", tmp_path / "own", "--lora", "adapter") == 0
    assert {t.dtype for t in tensors_of(tmp_path / "own").values()} == {torch.bfloat16 if bf16 else torch.float32}


# --- refusals -------------------------------------------------------------------------------------------------------


def train_some(root):
    """Checkpoints: of adapters alone, of adapters of two ranks, and with norms and routers trained too."""
    train(f"{root}/plain")
    train(f"{root}/ranks", ranks=(3, 2))
    train(f"{root}/routers", unfrozen="router")
    train(f"{root}/norms", unfrozen="norm")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    run_ranks(train_some, 2, str(root))
    return root


def refused(checkpoint, capsys, *texts, words=()):
    """Exit code 1, these texts, and nothing under the name or beside it."""
    out = checkpoint.parent / "out" / "adapter"
    capsys.readouterr()
    assert convert("to-hf", checkpoint, out, "--lora", "adapter", *words) == 1
    message = capsys.readouterr().err
    assert all(text in message for text in texts), message
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_trained_parameters_beside_adapters_are_named(saved, capsys):
    routers = [f"model.layers.{layer}.mlp.moe.router.weight" for layer in (0, 1)]
    refused(saved / "routers", capsys, f"an adapter would lose: {', '.join(routers)}, expected adapters to be all")
    assert convert("to-hf", saved / "routers", saved / "routers-merged", "--lora", "merge") == 0
    norms = sorted(name for name, _ in tiny("qwen3_moe").named_parameters() if "norm" in name)
    assert len(norms) == 9
    refused(saved / "norms", capsys, f"an adapter would lose: {', '.join(norms[:8])} and 1 more, expected")


def test_the_check_of_what_is_lost_follows_what_was_trained(saved):
    """The same checkpoint passes once its routers count as frozen, so it is they that were refused."""
    origin = open_origin(saved / "routers")
    with pytest.raises(CheckpointError, match="would lose"):
        plan_adapters(origin)
    adapters = tuple(name for name in origin.trained if "router" not in name)
    assert len(adapters) == len(origin.trained) - 2
    assert plan_adapters(dataclasses.replace(origin, trained=adapters)).nbytes > 0


def test_one_configuration_cannot_say_two_ranks_or_scales(saved, tmp_path, capsys):
    def halve_one(adapters):
        next(iter(adapters.values()))["scale"] = 1.0

    shutil.copytree(saved / "plain", tmp_path / "scales")
    change_adapters(tmp_path / "scales", halve_one)
    refused(tmp_path / "scales", capsys, "found [1.0, 2.0], expected one scale of all adapters")
    refused(saved / "ranks", capsys, "found [2, 3], expected one rank of all adapters")


def change_adapters(checkpoint, change):
    """Rewrite what the manifest says of adapters."""
    path = checkpoint / "t" / "ruda_manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest["adapters"])
    path.write_text(json.dumps(manifest))


def test_merged_adapters_are_refused(saved, tmp_path, capsys):
    def merge_one(adapters):
        adapters["model.layers.1.mlp.moe.experts"]["merged"] = True

    shutil.copytree(saved / "plain", tmp_path / "merged")
    change_adapters(tmp_path / "merged", merge_one)
    refused(tmp_path / "merged", capsys, "merged already into model.layers.1.mlp.moe.experts")


def test_weights_without_adapters_are_refused(tmp_path, capsys):
    source = save_hf("qwen3_moe", tmp_path / "hf")
    assert convert("from-hf", source, tmp_path / "split", "--ownership", "0,2,6") == 0
    refused(tmp_path / "split", capsys, "found none, expected LoRA adapters of experts")


@pytest.mark.parametrize("kind", ["gpt_oss", "llama"])
def test_families_without_a_form_per_expert_are_refused(kind, saved, tmp_path, capsys):
    text = config_of(kind).to_json_string() if kind == "gpt_oss" else json.dumps({"model_type": kind})
    (tmp_path / "config.json").write_text(text)
    words = ("--hf-files", tmp_path)
    refused(saved / "plain", capsys, f"found model type {kind}, expected a family", "qwen3_moe", words=words)


def test_the_fused_layout_is_refused(saved, capsys):
    refused(saved / "plain", capsys, "--layout is fused, expected per-expert", words=("--layout", "fused"))


def test_half_a_pair_is_not_accounted_for(saved):
    origin = open_origin(saved / "plain")
    lost = "model.layers.0.mlp.moe.experts.up_factors.up"
    del origin.source.known[lost]
    with pytest.raises(CheckpointError, match=r"experts\.down_factors\.up: not used"):
        plan_adapters(origin)


# --- the command ----------------------------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing(saved, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert("to-hf", saved / "plain", out, "--lora", "adapter", "-n") == 0
    numel = 2 * 6 * 3 * 3 * (HIDDEN + INNER)  # layers, experts, targets, rank
    assert f"adapter_model.safetensors  {4 * numel:,} bytes, 72 tensors" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_progress_is_of_the_bytes_that_are_written_in_the_dtype_asked_for(saved, tmp_path):
    plan = plan_adapters(open_origin(saved / "plain"), torch.bfloat16)
    told: list[int] = []
    plan.run(tmp_path / "out", told.append)
    assert sum(told) == plan.nbytes == 2 * 2 * 6 * 3 * 3 * (HIDDEN + INNER)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    with pytest.raises(CheckpointError, match="something there already"):
        plan.run(tmp_path / "out", told.append)


def test_the_base_model_is_named_where_the_configuration_names_it(saved, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "_name_or_path": "a/base"}))
    plan = plan_adapters(open_origin(saved / "plain", side_files=tmp_path))
    assert plan.config["base_model_name_or_path"] == "a/base"


@pytest.mark.parametrize(("alpha", "rank"), [(1, 49), (16, 8), (10, 3), (2.5, 4)])
def test_alpha_over_rank_is_the_scale_again(alpha, rank):
    found = adapter_config(rank, alpha / rank, [], {})["lora_alpha"]
    assert found == alpha
    assert isinstance(found, int if float(alpha).is_integer() else float)
    assert found / rank == alpha / rank
