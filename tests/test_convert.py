"""Hugging Face folders of every family to weights split by owner and back: to the byte, and what is refused."""

import json
import resource
import shutil
import signal

import pytest
import torch
from convert_helpers import EXPERTS, FAMILIES, convert, save_hf, tensors_of, tiny
from safetensors.torch import load_file, save_file

OWNERSHIP = {6: "0,1,1,6", 8: "0,3,8"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of each family as transformers saved it."""
    root = tmp_path_factory.mktemp("families")
    return {kind: save_hf(kind, root / kind) for kind in FAMILIES}


def no_leftovers(folder):
    return not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_there_and_back_is_byte_equal_in_both_layouts(kind, folders, tmp_path):
    source, prefix = folders[kind], OWNERSHIP[EXPERTS[kind]]
    assert convert("from-hf", source, tmp_path / "split", "--ownership", prefix) == 0
    assert convert("to-hf", tmp_path / "split", tmp_path / "back") == 0
    whole = (source / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == whole
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert convert("to-hf", tmp_path / "split", tmp_path / "fused", "--layout", "fused") == 0
    assert convert("from-hf", tmp_path / "fused", tmp_path / "split2", "--ownership", "even", "--ep-size", 4) == 0
    assert convert("to-hf", tmp_path / "split2", tmp_path / "fused2") == 0
    fused = (tmp_path / "fused" / "model.safetensors").read_bytes()
    assert (tmp_path / "fused2" / "model.safetensors").read_bytes() == fused
    assert (fused == whole) == (kind == "gpt_oss")
    assert convert("to-hf", tmp_path / "split2", tmp_path / "again", "--layout", "per-expert") == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_transformers_loads_both_layouts(kind, folders, tmp_path):
    from transformers import AutoModelForCausalLM

    assert convert("from-hf", folders[kind], tmp_path / "split", "--ownership", OWNERSHIP[EXPERTS[kind]]) == 0
    reference = tiny(kind).eval()
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        wanted = reference(tokens).logits
    for layout in ("per-expert", "fused"):
        assert convert("to-hf", tmp_path / "split", tmp_path / layout, "--layout", layout) == 0
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / layout, output_loading_info=True)
        assert not any(info.values()), info
        for (name, found), expected in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
            assert torch.equal(found, expected), name
        with torch.no_grad():
            assert (model.eval()(tokens).logits - wanted).abs().max() <= 1e-6


def test_owned_experts_are_in_the_files_of_their_ranks(folders, tmp_path):
    assert convert("from-hf", folders["mixtral"], tmp_path / "split", "--ownership", "0,0,2,6") == 0
    files = sorted(path.name for path in (tmp_path / "split").glob("ruda_experts*"))
    assert files == ["ruda_experts_00001-of-00003.safetensors", "ruda_experts_00002-of-00003.safetensors"]
    cubes, source = load_file(tmp_path / "split" / files[1]), tensors_of(folders["mixtral"])
    gate = cubes["model.layers.1.mlp.moe.experts.gate"]
    assert gate.shape[0] == 4
    assert torch.equal(gate[3], source["model.layers.1.block_sparse_moe.experts.5.w1.weight"])
    assert torch.equal(
        cubes["model.layers.0.mlp.moe.experts.down"][0], source["model.layers.0.block_sparse_moe.experts.2.w2.weight"]
    )


def test_interleaved_experts_are_taken_apart(folders, tmp_path):
    assert convert("from-hf", folders["gpt_oss"], tmp_path / "split", "--ownership", "0,6") == 0
    cubes, source = tensors_of(tmp_path / "split"), tensors_of(folders["gpt_oss"])
    there, here = "model.layers.0.mlp.experts", "model.layers.0.mlp.moe.experts"
    assert torch.equal(cubes[f"{here}.gate"], source[f"{there}.gate_up_proj"][..., 0::2].transpose(1, 2))
    assert torch.equal(cubes[f"{here}.up"], source[f"{there}.gate_up_proj"][..., 1::2].transpose(1, 2))
    assert torch.equal(cubes[f"{here}.up_bias"], source[f"{there}.gate_up_proj_bias"][:, 1::2])
    assert torch.equal(cubes[f"{here}.down"], source[f"{there}.down_proj"].transpose(1, 2))


def test_tied_weights_shards_and_dtype(tmp_path):
    source = save_hf("qwen3_moe", tmp_path / "tied", torch.bfloat16, tie_word_embeddings=True)
    assert convert("from-hf", source, tmp_path / "split", "--ownership", "0,3,6") == 0
    assert convert("to-hf", tmp_path / "split", tmp_path / "small", "--max-shard-size", "20KB") == 0
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text())
    wanted, found = tensors_of(source), tensors_of(tmp_path / "small")
    assert "lm_head.weight" not in wanted
    assert set(index["weight_map"]) == set(found) == set(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    for name, shard in index["weight_map"].items():
        assert name in load_file(tmp_path / "small" / shard)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in wanted.values())
    assert convert("to-hf", tmp_path / "split", tmp_path / "wide", "--dtype", "fp32") == 0
    assert all(torch.equal(t, wanted[name].float()) for name, t in tensors_of(tmp_path / "wide").items())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    # A folder of shards is read like one of a single file.
    assert convert("from-hf", tmp_path / "small", tmp_path / "split2", "--ownership", "0,3,6") == 0
    assert all(torch.equal(t, tensors_of(tmp_path / "split2")[n]) for n, t in tensors_of(tmp_path / "split").items())


def change(folder, target, edit):
    """A copy of a folder with its tensors edited."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("layout", ["per-expert", "fused"])
def test_a_missing_or_renamed_expert_is_named_and_nothing_is_written(layout, folders, tmp_path, capsys):
    source = folders["qwen2_moe"]
    if layout == "fused":
        assert convert("from-hf", source, tmp_path / "s", "--ownership", "0,6") == 0
        assert convert("to-hf", tmp_path / "s", tmp_path / "f", "--layout", "fused") == 0
        source = tmp_path / "f"
    key = "model.layers.1.mlp.experts." + ("4.up_proj.weight" if layout == "per-expert" else "down_proj")

    def rename(tensors):
        tensors["model.layers.1.mlp.experts.4.middle.weight"] = tensors.pop(key)

    edits = {"deleted": lambda tensors: tensors.pop(key), "renamed": rename}
    for name, edit in edits.items():
        capsys.readouterr()
        broken = change(source, tmp_path / name, edit)
        assert convert("from-hf", broken, tmp_path / "out", "--ownership", "0,3,6") == 1
        message = capsys.readouterr().err
        assert key in message
        assert name in message
        if name == "renamed":
            assert "experts.4.middle.weight" in message
        assert not (tmp_path / "out").exists()
        assert no_leftovers(tmp_path / "out")


def test_wrong_shapes_experts_and_routers_are_named(folders, tmp_path, capsys):
    def shrink(tensors):
        tensors["model.layers.0.mlp.experts.2.gate_proj.weight"] = torch.zeros(3, 32)

    def extra(tensors):
        tensors["model.layers.0.mlp.experts.6.gate_proj.weight"] = torch.zeros(24, 32)

    def no_router(tensors):
        del tensors["model.layers.0.mlp.gate.weight"]

    for name, (edit, text) in {
        "shrunk": (shrink, "experts.2.gate_proj.weight"),
        "extra": (extra, "experts.6.gate_proj.weight"),
        "router": (no_router, "model.layers.0.mlp.gate.weight"),
    }.items():
        broken = change(folders["qwen2_moe"], tmp_path / name, edit)
        assert convert("from-hf", broken, tmp_path / "out", "--ownership", "0,6") == 1
        assert text in capsys.readouterr().err
    assert convert("from-hf", folders["qwen2_moe"], tmp_path / "out", "--ownership", "0,5") == 1
    assert "does not fit 6 experts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_named(folders, tmp_path, capsys):
    source = folders["olmoe"]
    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    whole = (cut / "model.safetensors").read_bytes()
    for length in (4, 900, len(whole) - 1):
        (cut / "model.safetensors").write_bytes(whole[:length])
        assert convert("from-hf", cut, tmp_path / "out", "--ownership", "0,6") == 1
        assert "model.safetensors: found" in capsys.readouterr().err
    assert convert("from-hf", source, tmp_path / "split", "--ownership", "0,2,6") == 0
    part = tmp_path / "split" / "ruda_experts_00001-of-00002.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-8])
    assert convert("to-hf", tmp_path / "split", tmp_path / "out") == 1
    assert "ruda_experts_00001-of-00002.safetensors" in capsys.readouterr().err
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert convert("verify", tmp_path / "split") == 1
    assert "ruda_experts_00001-of-00002.safetensors: found sha256" in capsys.readouterr().err
    part.unlink()
    assert convert("to-hf", tmp_path / "split", tmp_path / "out") == 1
    assert "ruda_experts_00001-of-00002.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_and_a_full_target_change_nothing(folders, tmp_path, capsys):
    assert convert("from-hf", folders["mixtral"], tmp_path / "split", "--ownership", "0,2,6", "-n") == 0
    assert "ruda_experts_00001-of-00002.safetensors" in capsys.readouterr().out
    assert not (tmp_path / "split").exists()
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "mine").write_text("keep")
    assert convert("from-hf", folders["mixtral"], tmp_path / "split", "--ownership", "0,2,6") == 1
    assert "split" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "split").iterdir()] == ["mine"]


def test_a_write_that_fails_leaves_nothing(folders, tmp_path, capsys):
    assert convert("from-hf", folders["mixtral"], tmp_path / "split", "--ownership", "0,2,6") == 0
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert convert("to-hf", tmp_path / "split", tmp_path / "out") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["split"]


def test_inspect_and_verify_of_folders(folders, tmp_path, capsys):
    assert convert("from-hf", folders["deepseek_v3"], tmp_path / "split", "--ownership", "0,3,8") == 0
    capsys.readouterr()
    assert convert("inspect", tmp_path / "split", "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["ownership"] == [0, 3, 8]
    bias = next(p for p in about["parameters"] if p["name"].endswith("correction_bias"))
    assert (bias["dtype"], bias["shape"]) == ("float32", [8])
    assert convert("inspect", folders["deepseek_v3"]) == 0
    assert "model.layers.1.mlp.experts" in capsys.readouterr().out
    for folder in (tmp_path / "split", folders["deepseek_v3"]):
        assert convert("verify", folder) == 0

    def poison(tensors):
        tensors["model.norm.weight"][3] = torch.nan

    broken = change(folders["deepseek_v3"], tmp_path / "nan", poison)
    assert convert("verify", broken) == 1
    assert "1 values that are not finite in model.norm.weight" in capsys.readouterr().err
