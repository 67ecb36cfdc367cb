"""Damaged, incomplete and malicious training checkpoints: named, refused, and nothing half-written."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from convert_helpers import convert, engine_of, feed, windows

import ruda_ds
from ruda_ds.checkpoint.pt_writer import write_pt
from ruda_ds.checkpoint.reader import PtFile
from ruda_ds.checkpoint.reshard_values import lazy
from ruda_ds.cli.ranks import run_ranks

OPTIM = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def save(folder, stock):
    """A checkpoint of ours in mid-window, and one that DeepSpeed alone has saved."""
    engine = engine_of("mixtral", [0, 2, 6])
    windows(engine, 0, 1)
    feed(engine, 2)
    ruda_ds.save_checkpoint(engine, folder, tag="t")
    engine.save_checkpoint(stock, tag="t")
    return dist.get_rank()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save, 2, str(root / "ours"), str(root / "stock"))
    return root


@pytest.fixture
def copies(saved, tmp_path):
    """Fresh copies of both."""
    for name in ("ours", "stock"):
        shutil.copytree(saved / name, tmp_path / name)
    return tmp_path


def refused(folder, out, capsys, *texts, commands=("to-hf", "reshard", "verify")):
    """Every command exits with 1, says this, and leaves nothing."""
    for command in commands:
        capsys.readouterr()
        words = [command, folder] if command == "verify" else [command, folder, out]
        assert convert(*words, *(["--world", 2] if command == "reshard" else [])) == 1, command
        message = capsys.readouterr().err
        for text in texts:
            assert text in message, (command, message)
        assert not out.exists()
        assert not [path for path in out.parent.iterdir() if path.name.startswith(".")]


def edit(path, change):
    """Rewrite one of DeepSpeed's files with its values changed."""
    root = lazy(PtFile(path).root)
    change(root)
    write_pt(path.with_name("new.pt"), root, lambda nbytes: None)
    path.with_name("new.pt").rename(path)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_files_of_other_ranks(kind, copies, tmp_path, capsys):
    tag, out = copies / kind / "t", tmp_path / "out"
    shutil.copy(tag / OPTIM, tag / OPTIM.replace("rank_1", "rank_2"))
    refused(copies / kind, out, capsys, OPTIM.replace("rank_1", "rank_2"))
    (tag / OPTIM.replace("rank_1", "rank_2")).unlink()
    shutil.copy(tag / OPTIM, tag / f"bf16_{OPTIM}")
    refused(copies / kind, out, capsys, OPTIM)
    (tag / f"bf16_{OPTIM}").unlink()
    (tag / OPTIM).unlink()
    refused(copies / kind, out, capsys, OPTIM if kind == "ours" else "none of rank 1")


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize("name", [OPTIM, MODEL])
def test_truncated_files(kind, name, copies, tmp_path, capsys):
    path = copies / kind / "t" / name
    os.truncate(path, path.stat().st_size - 1)
    refused(copies / kind, tmp_path / "out", capsys, name)


def test_a_flipped_byte_is_found_by_verify(copies, capsys):
    path = copies / "ours" / "t" / OPTIM
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    assert convert("verify", copies / "ours") == 1
    assert OPTIM in capsys.readouterr().err
    pending = copies / "ours" / "t" / "ruda_pending_00000-of-00002.safetensors"
    os.truncate(pending, 100)
    refused(copies / "ours", copies / "out", capsys, pending.name)


def test_counters_that_disagree(copies, tmp_path, capsys):
    path = copies / "stock" / "t" / MODEL
    edit(path, lambda root: root.update(global_steps=9))
    refused(copies / "stock", tmp_path / "out", capsys, MODEL, "global_steps 1", "found 9")
    shutil.copy(copies / "ours" / "t" / MODEL, path)

    def step(root):
        root["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["step"] = torch.tensor(5.0)

    edit(copies / "stock" / "t" / OPTIM, step)
    refused(copies / "stock", tmp_path / "out", capsys, OPTIM, "tensor(5.)", commands=["reshard"])


def test_other_shapes_and_lost_partitions(copies, tmp_path, capsys):
    def shape(root):
        name = next(iter(root["param_shapes"][0]))
        root["param_shapes"][0][name] = torch.Size([51, 32])

    edit(copies / "stock" / "t" / MODEL, shape)
    refused(copies / "stock", tmp_path / "out", capsys, MODEL, "(51, 32)", "embed_tokens")
    shutil.copy(copies / "ours" / "t" / MODEL, copies / "stock" / "t" / MODEL)
    edit(copies / "stock" / "t" / OPTIM, lambda root: root["optimizer_state_dict"]["fp32_flat_groups"].pop())
    refused(copies / "stock", tmp_path / "out", capsys, OPTIM, "flat partitions of")


def test_a_renamed_expert_and_another_window(copies, tmp_path, capsys):
    tag = copies / "ours" / "t"
    manifest = (tag / "ruda_manifest.json").read_text()
    (tag / "ruda_manifest.json").write_text(
        manifest.replace("layers.1.mlp.moe.experts.gate", "layers.1.mlp.moe.experts.gat")
    )
    refused(copies / "ours", tmp_path / "out", capsys, "layers.1.mlp.moe.experts.gat")
    (tag / "ruda_manifest.json").write_text(manifest.replace('"loss_scale": 1.0', '"loss_scale": 2.0'))
    refused(
        copies / "ours", tmp_path / "out", capsys, "ruda_pending_00000", "loss_scale", commands=["reshard", "verify"]
    )
    (tag / "ruda_manifest.json").write_text(manifest[:-20])
    refused(copies / "ours", tmp_path / "out", capsys, "ruda_manifest.json", "not a valid manifest")


def test_values_that_are_not_finite_are_named(copies, capsys):
    path = copies / "stock" / "t" / OPTIM
    length = PtFile(path).root["optimizer_state_dict"]["fp32_flat_groups"][0].numel

    def spoil(root):
        root["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"] = torch.full((length,), torch.inf)

    edit(path, spoil)
    assert convert("verify", copies / "stock") == 1
    message = capsys.readouterr().err
    assert "not finite in model.embed_tokens.weight (exp_avg)" in message
    assert convert("verify", copies / "stock", "--no-values") == 0


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_malicious_pickle_runs_nothing(copies, tmp_path, capsys):
    flag, out = tmp_path / "flag", tmp_path / "out"
    for kind in ("ours", "stock"):
        path = copies / kind / "t" / MODEL
        state = torch.load(path, weights_only=False)
        torch.save({**state, "evil": Touch(flag)}, path)
        manifest = copies / kind / "t" / "ruda_manifest.json"
        if kind == "ours":  # as whoever can write the folder can: a manifest that matches
            fields = json.loads(manifest.read_text())
            fields["files"][MODEL]["bytes"] = path.stat().st_size
            manifest.write_text(json.dumps(fields))
        refused(copies / kind, out, capsys, MODEL, "the global posix.system")
        assert convert("inspect", copies / kind) == (1 if kind == "stock" else 0)
    assert not flag.exists()


def test_inspect_says_what_is_in_it(copies, capsys):
    (copies / "ours" / "later.incomplete").mkdir()
    capsys.readouterr()
    assert convert("inspect", copies / "ours", "--json") == 0
    about = json.loads(capsys.readouterr().out)
    assert about["step"] == 1
    assert (about["world_size"], about["ep_size"], about["zero_stage"]) == (2, 2, 3)
    assert about["window"]["microbatches"] == 1
    assert about["window"]["tokens"] == 36
    assert about["ownership"]["model.layers.1.mlp.moe"] == [0, 2, 6]
    assert about["interrupted"] == ["later.incomplete"]
    assert about["bytes"] == sum(path.stat().st_size for path in (copies / "ours" / "t").iterdir())
    head = next(p for p in about["parameters"] if p["name"] == "lm_head.weight")
    assert head == {"name": "lm_head.weight", "shape": [50, 32], "dtype": "float32", "trained": False}
    assert convert("inspect", copies / "ours") == 0
    text = capsys.readouterr().out
    for part in ("tokens 36", "world size", "model.layers.0.mlp.moe.experts.gate", "frozen"):
        assert part in text
    assert convert("inspect", copies / "stock", "--json") == 0
    plain = json.loads(capsys.readouterr().out)
    for key in ("step", "ownership", "elements", "parameters", "trained_elements"):
        assert plain[key] == about[key], key
