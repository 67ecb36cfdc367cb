"""Training checkpoints to Hugging Face folders, and training from such folders: real ranks, uneven ownership."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from convert_helpers import (
    EXPERTS,
    config_of,
    convert,
    engine_of,
    save_hf,
    tensors_of,
    tiny,
    whole,
    windows,
)
from helpers import base_config

import ruda_ds
from ruda_ds.checkpoint.pretrained import load_pretrained
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import CheckpointError
from ruda_ds.moe import ExpertOwnership, replace_moe_blocks


def original_name(name: str) -> str:
    """Our name of a parameter that is not a cube as transformers has it in memory."""
    return name.replace(".moe.router.", ".gate.")


def compare_with_model(folder, gathered) -> int:
    """A folder loaded by transformers against whole float32 parameters; how many were compared."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    found = dict(model.named_parameters())
    count = 0
    for name, values in gathered.items():
        block, _, cube = name.partition(".moe.experts.")
        if cube:
            fused = found[f"{block}.experts." + ("down_proj" if cube == "down" else "gate_up_proj")].detach()
            half = fused.shape[1] // 2
            wanted = {"gate": fused[:, :half], "up": fused[:, half:], "down": fused}[cube]
        else:
            name = original_name(name)
            names = [name, name.replace(".shared.", ".shared_expert."), name.replace(".shared.", ".shared_experts.")]
            names += [name.replace(".shared_gate.", ".shared_expert_gate.")]
            wanted = found[next(n for n in names if n in found)].detach()
        assert torch.equal(wanted.reshape(-1), values.float()), name
        count += 1
    return count


def train_and_save(folder, kind, prefix, stage, bf16, tied):
    engine = engine_of(kind, prefix, stage=stage, bf16=bf16, **({"tie_word_embeddings": True} if tied else {}))
    windows(engine, 0, 3)
    ruda_ds.save_checkpoint(engine, folder, tag="three")
    if stage < 3:
        return masters_below_stage3(engine)
    return {name: values for name, values in whole(engine).items() if " exp_" not in name}


def masters_below_stage3(engine):
    """Whole float32 masters of a ZeRO-1 or 2 engine, and frozen parameters, gathered from all ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    experts = {place.name: place.experts for place in engine.accumulator.placement}
    mine = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter) if parameter.requires_grad else parameter
        mine[name] = (full.detach().float().reshape(-1).clone(), experts[name])
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    made = {}
    for name, (values, owned) in everyone[0].items():
        if owned is None:
            made[name] = values
        else:
            parts = {rank[name][1]: rank[name][0] for rank in everyone if rank[name][1][1] > rank[name][1][0]}
            made[name] = torch.cat([parts[key] for key in sorted(parts)])
    return made


@pytest.mark.parametrize(
    ("kind", "world", "prefix", "stage", "bf16", "tied"),
    [
        ("qwen2_moe", 2, [0, 2, 6], 3, True, False),
        ("deepseek_v3", 2, [0, 0, 8], 3, False, False),
        ("mixtral", 2, [0, 5, 6], 3, True, True),
        ("olmoe", 2, [0, 6], 2, True, False),
        ("qwen3_moe", 3, [0, 6], 1, False, False),
        ("deepseek_v2", 2, [0, 2, 6], 2, True, False),
    ],
)
def test_after_training_to_hf_equals_the_engine(kind, world, prefix, stage, bf16, tied, tmp_path):
    gathered = run_ranks(train_and_save, world, str(tmp_path / "ckpt"), kind, prefix, stage, bf16, tied)[0]
    assert convert("to-hf", tmp_path / "ckpt", tmp_path / "wide", "--dtype", "fp32") == 0
    assert compare_with_model(tmp_path / "wide", gathered) == len(gathered)
    assert convert("to-hf", tmp_path / "ckpt", tmp_path / "own", "--layout", "fused") == 0
    dtype = torch.bfloat16 if bf16 else torch.float32
    assert {t.dtype for n, t in tensors_of(tmp_path / "own").items() if "correction_bias" not in n} == {dtype}
    assert compare_with_model(tmp_path / "own", {n: v.to(dtype) for n, v in gathered.items()}) == len(gathered)
    names = set(tensors_of(tmp_path / "wide"))
    assert ("lm_head.weight" in names) is not tied
    assert convert("verify", tmp_path / "ckpt") == 0


def stock_dense(folder, stage):
    """A dense model saved by DeepSpeed alone, small sub-groups; its whole parameters."""
    from helpers import Odd

    torch.manual_seed(5)
    model = Odd()
    config = base_config(zero_optimization={"stage": stage, "sub_group_size": 200})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine, *_ = ruda_ds.initialize(model=model, optimizer=optimizer, config=config)
    engine.accumulator.backward_sum(engine(torch.randn(3, 7)).sum(), local_count=3)
    engine.accumulator.step()
    engine.save_checkpoint(folder, tag="stock")
    return whole(engine) if stage == 3 else masters_below_stage3(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_deepspeed_alone_with_a_model_of_no_family(stage, tmp_path):
    gathered = run_ranks(stock_dense, 2, str(tmp_path / "ckpt"), stage)[0]
    assert convert("to-hf", tmp_path / "ckpt", tmp_path / "out") == 0
    found = tensors_of(tmp_path / "out")
    names = {name for name in gathered if " exp_" not in name}
    assert set(found) == names
    assert all(torch.equal(found[name].reshape(-1), gathered[name]) for name in names)


def lora(folder):
    """Adapters on cubes, trained; the merged cubes in float32 as the layer's own merge makes them."""
    from ruda_ds.moe.adapters import LoRAExperts

    model = tiny("qwen3_moe")
    replace_moe_blocks(model, ExpertOwnership([0, 2, 6]), rank=dist.get_rank() % 2)
    model.requires_grad_(False)
    for block in model.modules():
        if hasattr(block, "experts") and hasattr(block, "router"):
            block.experts = LoRAExperts(block.experts, rank=3, alpha=6.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ruda_ds.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=0.1), config=base_config())
    windows(engine, 0, 3)
    ruda_ds.save_checkpoint(engine, folder)
    return {name: values for name, values in whole(engine).items() if " exp_" not in name}


def test_adapters_are_merged(tmp_path, capsys):
    gathered = run_ranks(lora, 2, str(tmp_path / "ckpt"))[0]
    assert convert("to-hf", tmp_path / "ckpt", tmp_path / "out") == 0  # alpha / rank is in the manifest
    merged = {n: v for n, v in gathered.items() if "_factors." not in n and ".base." not in n}
    for name, values in gathered.items():
        prefix, _, cube = name.partition(".base.")
        if cube:
            out, inner = (32, 24) if cube == "down" else (24, 32)
            a = gathered[f"{prefix}.down_factors.{cube}"].view(6, 3, inner)
            b = gathered[f"{prefix}.up_factors.{cube}"].view(6, out, 3)
            merged[f"{prefix}.{cube}"] = torch.stack(
                [w + (y @ x) * 2.0 for w, x, y in zip(values.view(6, out, inner), a, b, strict=True)]
            ).reshape(-1)
            assert not torch.equal(merged[f"{prefix}.{cube}"], values)
    assert compare_with_model(tmp_path / "out", merged) == len(merged)
    assert not [name for name in tensors_of(tmp_path / "out") if "factors" in name]


# --- training from a folder -----------------------------------------------------------------------------------------


def begin(cases):
    """Of each case (kind, folder, prefix, whether on the meta device): bytes read, and the largest error of logits."""
    from transformers import AutoModelForCausalLM

    found = []
    for kind, folder, prefix, meta in cases:
        reference = tiny(kind, torch.bfloat16).float()
        if meta:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
        else:
            model = tiny(kind)
            for parameter in model.parameters():
                torch.nn.init.zeros_(parameter)
        with torch.device("meta") if meta else contextlib.nullcontext():
            replace_moe_blocks(model, ExpertOwnership(prefix), group=dist.group.WORLD, balance_loss=0.01)
        loaded = load_pretrained(model, folder)
        assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        tokens = torch.arange(12).view(1, 12)
        with torch.no_grad():
            worst = (model.eval()(tokens).logits - reference.eval()(tokens).logits).abs().max().item()
        found.append((loaded.nbytes, worst))
    return found


def test_training_starts_from_a_folder_and_reads_what_it_owns(tmp_path):
    cases, wanted = [], []
    for kind in ("mixtral", "qwen2_moe", "deepseek_v3"):
        source, count = save_hf(kind, tmp_path / kind, torch.bfloat16), EXPERTS[kind]
        split = tmp_path / f"{kind}-split"
        assert convert("from-hf", source, split, "--ownership", "even", "--ep-size", 3) == 0
        sizes = {name: t.numel() * t.element_size() for name, t in tensors_of(source).items()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        for folder, prefix, meta in (
            (source, [0, 1, count], True),
            (source, [0, 0, count], False),
            (split, [0, 2, count], True),
        ):
            cases.append((kind, str(folder), prefix, meta))
            dense = sum(sizes.values()) - experts
            wanted.append([dense + experts * (prefix[rank + 1] - prefix[rank]) // count for rank in range(2)])
    for rank, found in enumerate(run_ranks(begin, 2, cases)):
        assert [nbytes for nbytes, _ in found] == [sizes[rank] for sizes in wanted]
        assert max(worst for _, worst in found) <= 1e-6


def refused(folder):
    with torch.device("meta"):
        model = tiny("qwen3_moe", num_hidden_layers=3)
    replace_moe_blocks(model, [0, 6], group=dist.group.WORLD)
    with pytest.raises(CheckpointError, match=r"not model\.layers\.2\.input_layernorm"):
        load_pretrained(model, folder)
    with torch.device("meta"):
        model = tiny("qwen3_moe", num_hidden_layers=1)
    replace_moe_blocks(model, [0, 6], group=dist.group.WORLD)
    with pytest.raises(CheckpointError, match=r"found model\.layers\.1"):
        load_pretrained(model, folder)
    with torch.device("meta"):
        model = tiny("qwen3_moe", vocab_size=51)
    replace_moe_blocks(model, [0, 6], group=dist.group.WORLD)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight of shape \(50, 32\), expected \(51, 32\)"):
        load_pretrained(model, folder)
    return True


def test_a_folder_of_another_model_is_refused(tmp_path):
    assert run_ranks(refused, 1, str(save_hf("qwen3_moe", tmp_path / "hf"))) == [True]
