"""Each family's tiny random model, before and after its blocks are replaced: the same logits and the same gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from moe_helpers import relative

from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import OwnershipError
from ruda_ds.moe import ExpertOwnership, replace_moe_blocks

COMMON = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
KINDS = {
    "mixtral": {"num_local_experts": 6, "intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16},
    "qwen3_moe raw": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": False, "head_dim": 16},
    "olmoe": {"num_experts": 6, "intermediate_size": 24, "norm_topk_prob": True},
    "deepseek_v2": {
        "n_routed_experts": 6,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 3,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        **LATENT,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        **LATENT,
    },
}


def tiny(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind.split()[0], **{**COMMON, **KINDS[kind]})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "gate.weight" in name or "e_score_correction_bias" in name:
            torch.nn.init.normal_(tensor, std=0.3)  # some of them begin at zero, where every choice is a tie
    return model


def compare(kind, prefix):
    rank = dist.get_rank()
    model = tiny(kind)
    reference = copy.deepcopy(model)
    before = replace_moe_blocks(model, ExpertOwnership(prefix), group=dist.group.WORLD)
    tokens = torch.randint(50, (1, 7 + 4 * rank), generator=torch.Generator().manual_seed(rank))
    wanted = reference(tokens).logits
    found = model(tokens).logits
    errors = {"blocks": float(before < 1), "logits": relative(found, wanted)}
    found.sin().sum().backward()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tokens)
    reference.zero_grad()
    sum(reference(other).logits.sin().sum() for other in everyone).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if ".moe.experts." in name:
            if parameter.numel() == 1:
                continue
            block, _, cube = name.partition(".moe.experts.")
            fused = theirs[f"{block}.experts.{'down_proj' if cube == 'down' else 'gate_up_proj'}"].grad
            half = fused.shape[1] // 2
            full = {"gate": fused[:, :half], "up": fused[:, half:], "down": fused}[cube]
            errors[name] = relative(gradient, full[prefix[rank] : prefix[rank + 1]])
            continue
        original = name.replace(".moe.router.", ".gate.").replace(".shared_gate.", ".shared_expert_gate.")
        if original not in theirs:
            original = next(
                o
                for o in (
                    original.replace(".shared.", ".shared_expert."),
                    original.replace(".shared.", ".shared_experts."),
                )
                if o in theirs
            )
        gradient = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        dist.all_reduce(gradient)
        errors[name] = relative(gradient, theirs[original].grad)
    return errors


@pytest.mark.parametrize("kind", list(KINDS))
def test_replaced_blocks_equal_transformers(kind):
    experts = KINDS[kind].get("num_local_experts") or KINDS[kind].get("num_experts") or KINDS[kind]["n_routed_experts"]
    for errors in run_ranks(compare, 2, kind, [0, 2, experts]):
        assert max(errors.values()) <= 2e-5, {name: error for name, error in errors.items() if error > 2e-5}


def refused():
    model = tiny("mixtral")
    with pytest.raises(OwnershipError, match="expected 5 experts"):
        replace_moe_blocks(model, [0, 5], group=dist.group.WORLD)
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    with pytest.raises(OwnershipError, match="'llama', expected one of deepseek_v2"):
        replace_moe_blocks(llama, [0, 4])
    llama.config.model_type = "gpt_oss"
    with pytest.raises(OwnershipError, match=r"gpt_oss.*sigmoid\(1.702 gate\).*expected SwiGLU"):
        replace_moe_blocks(llama, [0, 4])
    with torch.device("meta"):
        meta = tiny("mixtral")
    replace_moe_blocks(meta, [0, 6], group=dist.group.WORLD)
    return all(parameter.is_meta for parameter in meta.parameters())


def test_unknown_families_and_other_numbers_of_experts_are_refused():
    assert run_ranks(refused, 1) == [True]
