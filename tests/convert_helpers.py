"""What the tests of conversion share: tiny models of every family on disk, engines over them, and whole tensors."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from helpers import base_config
from test_moe_families import COMMON, KINDS

import ruda_ds
from ruda_ds import _deepspeed
from ruda_ds.cli.convert import main
from ruda_ds.moe import ExpertOwnership, replace_moe_blocks

# Narrow dense layers: the default width of deepseek's first layer makes 7 MB of a tiny model.
FAMILIES = {name: {**values, "intermediate_size": 20} for name, values in KINDS.items() if " raw" not in name}
FAMILIES["mixtral"] = KINDS["mixtral"]
FAMILIES["olmoe"] = KINDS["olmoe"]
FAMILIES["gpt_oss"] = {"num_local_experts": 6, "intermediate_size": 24, "head_dim": 16}
EXPERTS = dict.fromkeys(FAMILIES, 6) | {"deepseek_v3": 8}


def config_of(kind: str, **changes):
    """Configuration of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**COMMON, **FAMILIES[kind], **changes})


def tiny(kind: str, dtype: torch.dtype = torch.float32, **changes):
    """A random model; its routers, and biases that begin at zero, are random too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            torch.nn.init.normal_(tensor, std=0.2)
    return model


def save_hf(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **changes) -> Path:
    """The same as transformers saves it; the folder."""
    tiny(kind, dtype, **changes).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return folder


def convert(*words: object) -> int:
    """Run ``ruda-convert``; its exit code."""
    return main([*map(str, words), "-q"])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def adamw(parameters):
    """A torch AdamW over two groups, so that groups and their order are put to the test."""
    parameters = list(parameters)
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def engine_of(kind: str, prefix: list[int], stage: int = 3, bf16: bool = False, **changes):
    """An engine over a tiny model whose experts are split by ``prefix``, with a frozen head and a schedule."""
    model = tiny(kind, torch.bfloat16 if bf16 else torch.float32, **changes)
    ep_size = len(prefix) - 1
    replace_moe_blocks(model, ExpertOwnership(prefix), rank=dist.get_rank() % ep_size, balance_loss=0.01)
    if not changes.get("tie_word_embeddings"):
        model.lm_head.weight.requires_grad_(False)
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    settings = {"zero_optimization": {"stage": stage}}
    if bf16:
        settings["bf16"] = {"enabled": True}
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.StepLR(inner, 2, 0.5),
        config=base_config(**settings),
    )
    return engine


def microbatch(index: int, rows: int = 4) -> torch.Tensor:
    """Tokens [rows, 9] of a micro-batch, the same whatever the world."""
    return torch.randint(50, (rows, 9), generator=torch.Generator().manual_seed(100 + index))


def feed(engine, index: int) -> None:
    """One micro-batch into the window, its 4 rows dealt to the ranks; a rank without rows has no tokens."""
    rows = microbatch(index)[dist.get_rank() :: dist.get_world_size()]
    empty = not len(rows)
    logits = engine(microbatch(index)[:1] if empty else rows).logits.float()
    loss = logits.sin().sum() * (0.0 if empty else 1.0)
    engine.accumulator.backward_sum(loss, local_count=0 if empty else rows.numel())


def windows(engine, first: int, count: int) -> None:
    """``count`` windows of two micro-batches."""
    for index in range(2 * first, 2 * (first + count)):
        feed(engine, index)
        if index % 2:
            engine.accumulator.step()


def whole(engine) -> dict[str, torch.Tensor]:
    """Every parameter whole and flat, on every rank: float32 masters, moments as "name exp_avg", frozen ones too."""
    optimizer = _deepspeed.zero_optimizer(engine)
    mine = []
    for place in engine.accumulator.placement:
        parameter = dict(engine.module.named_parameters())[place.name]
        kinds = {"": None, " exp_avg": "exp_avg", " exp_avg_sq": "exp_avg_sq"} if place.requires_grad else {"": None}
        base = place.experts[0] * parameter_row(place) if place.experts else 0
        begin, end = place.shard
        for suffix, kind in kinds.items():
            values = local_values(optimizer, parameter, kind, place)[: end - begin]
            mine.append((place.name + suffix, base + begin, values.clone()))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    parts: dict[str, list] = {}
    for rank_parts in everyone:
        for name, begin, values in rank_parts:
            if len(values):
                parts.setdefault(name, []).append((begin, values))
    return {n: torch.cat([v for _, v in sorted(p, key=lambda pair: pair[0])]) for n, p in parts.items()}


def parameter_row(place) -> int:
    """Elements of one expert of a cube."""
    count = 1
    for size in place.logical_shape[1:]:
        count *= size
    return count


def local_values(optimizer, parameter, kind, place) -> torch.Tensor:
    """This rank's flat values of a ZeRO-3 parameter (``kind`` None) or of a moment."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    if not place.requires_grad:
        return parameter.ds_tensor.detach().float().reshape(-1)
    if kind is None:
        return safe_get_local_fp32_param(parameter).detach().reshape(-1)
    state = safe_get_local_optimizer_state(parameter, kind)
    return torch.zeros(place.shard_numel) if state is None else state.detach().reshape(-1)
