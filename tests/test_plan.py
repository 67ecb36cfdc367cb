"""Planning: its bytes are those that four real ranks hand to their collectives, and its memory adds up."""

import json
from dataclasses import replace

import pytest
import torch
from plan_helpers import count_a_window

from ruda_ds.cli import plan, plan_model
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import ConfigError

transformers = pytest.importorskip("transformers")
WORLD, ROWS, LENGTH, MICRO_BATCHES = 4, 2, 16, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    config = transformers.Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[],
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    path = tmp_path_factory.mktemp("model")
    config.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("ep_size", "dtype", "kept"), [(4, "float32", True), (2, "bfloat16", True), (2, "float32", False)]
)
def test_bytes_are_those_of_four_real_ranks(folder, ep_size, dtype, kept, monkeypatch):
    element = 2 if dtype == "bfloat16" else 4
    shape = plan_model.read_shape(folder)
    run = plan_model.Run(WORLD, ep_size, ROWS, LENGTH, MICRO_BATCHES, element)
    if not kept:
        monkeypatch.setattr(plan_model, "MAX_LIVE", 0)
    planned = {entry.name: entry for entry in plan_model.traffic(shape, run)}
    counted = run_ranks(count_a_window, WORLD, folder, ep_size, dtype, ROWS, LENGTH, MICRO_BATCHES, kept, timeout_s=200)

    def measured(collective: str, kind: str, ranks: int) -> float:
        """Mean over the ranks: routing is uneven, but alike on all ranks, which have the same tokens."""
        return sum(table.get((collective, kind, ranks), 0) for table in counted) / WORLD

    exchanged = [entry.given for name, entry in planned.items() if name.startswith("all-to-all-v of rows")]
    assert sum(exchanged) == measured("all-to-all-v", dtype, ep_size) > 0
    assert planned["all-to-all-v of headers"].given == measured("all-to-all-v", "int64", ep_size)
    assert planned["all-reduce of counts"].given == measured("all-reduce", "float64", WORLD)
    assert planned["all-gather of parameters, dense"].given == measured("all-gather", dtype, WORLD)
    assert planned["reduce-scatter of gradients, dense"].given == measured("reduce-scatter", "float32", WORLD)
    if ep_size < WORLD:
        assert planned["all-gather of parameters, experts"].given == measured("all-gather", dtype, WORLD // ep_size)
        reduced = measured("reduce-scatter", "float32", WORLD // ep_size)
        assert planned["reduce-scatter of gradients, experts"].given == reduced
    else:
        assert "all-gather of parameters, experts" not in planned


def test_shapes_of_a_model_with_dense_and_expert_layers(tmp_path):
    config = transformers.DeepseekV3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    config.save_pretrained(tmp_path)
    shape = plan_model.read_shape(str(tmp_path))
    assert (shape.layers, shape.moe_layers, shape.experts, shape.top_k, shape.expert_width) == (3, 2, 8, 2, 16)
    assert list(shape.cubes) == [8 * 16 * 32] * 6
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())


def test_what_many_ranks_hold_and_send():
    """A round example by hand: 2^20 dense elements, 64 experts of 3 * 2^16, 256 ranks in groups of 64."""
    shape = plan_model.Shape([2**20], [64 * 2**16] * 3, 256, 1, 1, 64, 8, 256, 256, 1000, 3072)
    run = plan_model.Run(256, 64, 2, 1024, 4)
    assert plan_model.shards(shape, run) == (2**12, 3 * 2**14)
    held = plan_model.memory(shape, run)
    cut = 2**12 + 3 * 2**14
    assert [value for name, value in held.items() if name.endswith("cut")] == [2 * cut, 4 * cut, 8 * cut, 4 * cut]
    moved = {entry.name: entry for entry in plan_model.traffic(shape, run)}
    forward = moved["all-to-all-v of rows, forward"]
    assert forward.given == forward.sent == 4 * (2 * 2 * 1024 * 8 * 63 // 64 + 63) * 256 * 2
    assert moved["reduce-scatter of gradients, experts"].sent == 4 * 4 * 3 * 2**16 * 3 / 4
    again = {entry.name: entry for entry in plan_model.traffic(shape, replace(run, checkpointing=True))}
    assert again["all-to-all-v of rows, forward"].given == 2 * forward.given
    assert again["all-to-all-v of rows, backward"].given == forward.given


def test_the_largest_micro_batch_fits_and_one_row_more_does_not():
    shape = plan_model.Shape([2**20], [64 * 2**16] * 3, 256, 1, 1, 64, 8, 256, 256, 1000, 3072)
    run = plan_model.Run(256, 64, 1, 1024, 1)
    limit = 2**30
    rows = plan_model.largest_rows(shape, run, limit)
    assert rows > 0
    assert sum(plan_model.memory(shape, replace(run, rows=rows)).values()) <= limit
    assert sum(plan_model.memory(shape, replace(run, rows=rows + 1)).values()) > limit
    assert plan_model.largest_rows(shape, run, 1000) == 0


def test_a_faster_network_lessens_the_share_of_the_exchange():
    shape = plan_model.Shape([2**20], [64 * 2**16] * 3, 256, 1, 1, 64, 8, 256, 256, 1000, 3072)
    run = plan_model.Run(256, 64, 1, 1024, 1)
    slow, fast = (plan_model.times(shape, run, 1e14, bandwidth, 0.0)["share in exchange"] for bandwidth in (1e9, 1e11))
    assert 0 < fast < slow < 1
    assert plan_model.times(shape, replace(run, ep_size=1), 1e14, 1e9, 1.0)["share in exchange"] == 0


def test_the_command(folder, capsys, tmp_path):
    given = ["--model", folder, "--bandwidth", "10", "--flops", "100", "--seq-length", "64"]
    assert plan.main([*given, "--world", "16", "--ep-size", "8"]) == 0
    said = capsys.readouterr().out
    assert "Largest micro-batch" in said
    assert "share in exchange" in said
    assert plan.main([*given, "--world", "16", "--ep-size", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["largest_micro_batch"] > 0
    assert plan.main([*given, "--world", "16", "--memory", "0.000001"]) == 1
    for wrong, words in (
        (["--world", "16", "--ep-size", "3"], "expected a divisor of the world, which is 16"),
        (["--world", "16", "--model", str(tmp_path)], "expected a folder with a causal model's config.json"),
        (["--world", "16", "--micro-batch", "0"], "'micro_batch' is 0"),
    ):
        capsys.readouterr()
        assert plan.main([*given, *wrong]) == 1
        assert words in capsys.readouterr().err


def test_a_dense_model_has_no_experts_to_share(tmp_path):
    transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(tmp_path)
    shape = plan_model.read_shape(str(tmp_path))
    assert (shape.experts, list(shape.cubes)) == (0, [])
    assert [entry.name for entry in plan_model.traffic(shape, plan_model.Run(4, 1, 1, 8, 1))] == [
        "all-gather of parameters, dense",
        "reduce-scatter of gradients, dense",
        "all-reduce of counts",
    ]
    with pytest.raises(ConfigError, match="expected 1: the model has no experts"):
        plan_model.check(shape, plan_model.Run(4, 2, 1, 8, 1))
