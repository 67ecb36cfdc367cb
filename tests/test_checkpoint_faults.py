"""A damaged, foreign or interrupted checkpoint: every rank refuses it alike, names the file and changes nothing."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import differing, make, microbatch, run, state
from safetensors import safe_open
from safetensors.torch import save_file

import ruda_ds
from ruda_ds.checkpoint import Manifest, stock
from ruda_ds.checkpoint.manifest import MANIFEST, sha256_of
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import CheckpointError

OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_1_mp_rank_00_model_states.pt"
PENDING = "ruda_pending_00001-of-00002.safetensors"


class Hostile:
    """Unpickling it would leave a mark."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["HOSTILE"],))


# --- the tampering, each on a copy of a good tag ------------------------------------------------------------------


def rehash(folder: Path) -> None:
    """Let the manifest fit the files again, as someone who can write the folder could."""
    edit(folder, lambda m: m.update(files={p.name: entry(p) for p in folder.iterdir() if p.name != MANIFEST}))


def entry(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def edit(folder: Path, change) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite_pending(path: Path, **metadata) -> None:
    with safe_open(str(path), "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        old = file.metadata()
    window = json.loads(old["window"]) | metadata.pop("window", {})
    save_file(tensors, path, metadata={**old, "window": json.dumps(window), **metadata})


def resave(path: Path, change) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def rename_expert(content: dict) -> None:
    content["module"]["moe.experts.gates"] = content["module"].pop("moe.experts.gate")


def fewer_elements(content: dict) -> None:
    groups = content["optimizer_state_dict"]["fp32_flat_groups"]
    groups[0] = groups[0][:-1].clone()


def both(first, then=rehash):
    return lambda folder: (first(folder), then(folder))


FAULTS = {
    "truncated": (lambda f: os.truncate(f / PENDING, 100), f"{PENDING}: truncated, 100 bytes, expected"),
    "flipped": (lambda f: flip(f / OPTIMIZER), f"{OPTIMIZER}: content was altered"),
    "flipped_pending": (lambda f: flip(f / PENDING), f"{PENDING}: content was altered"),
    "missing": (lambda f: (f / MODEL).unlink(), f"{MODEL}: missing, expected a file of"),
    "unlisted": (both(lambda f: (f / MODEL).unlink()), r"no file for zero_pp_rank_1_mp_rank_00_model_states"),
    "too_many": (
        lambda f: shutil.copy(f / PENDING, f / "ruda_pending_00002-of-00003.safetensors"),
        "ruda_pending_00002-of-00003.safetensors: not in the manifest, which is of 2 ranks",
    ),
    "duplicate": (
        both(lambda f: shutil.copy(f / "ruda_pending_00000-of-00002.safetensors", f / PENDING)),
        f"{PENDING}: rank is 0, expected 1",
    ),
    "counters": (
        both(lambda f: rewrite_pending(f / PENDING, window={"global_count": 1})),
        f"{PENDING}: the window's global_count is 1, expected",
    ),
    "headerless": (both(lambda f: (f / PENDING).write_bytes(b"no safetensors")), f"{PENDING}: cannot be read"),
    "loss_scale": (lambda f: edit(f, lambda m: m["window"].update(loss_scale=2.0)), "loss_scale is 2.0, expected 1.0"),
    "dtype": (
        lambda f: edit(f, lambda m: m["window"].update(dtype="float64")),
        "accumulation dtype is torch.float64, expected torch.float32",
    ),
    "kind": (
        lambda f: edit(f, lambda m: m["window"].update(kind="WeightedAccumulationState", global_weight=1.0)),
        "kind of window is WeightedAccumulationState, expected AccumulationState",
    ),
    "window": (lambda f: edit(f, lambda m: m["window"].update(microbatches=0)), "not a valid manifest"),
    "world": (
        lambda f: edit(f, lambda m: m.update(world_size=3)),
        "saved on 3 ranks, expected 2: .*ruda-convert reshard",
    ),
    "ownership": (
        lambda f: edit(f, lambda m: m["experts"]["ownership"].update(moe=[0, 4, 8])),
        r"experts are .*4, 8.* expected .*3, 8.*ruda-convert reshard",
    ),
    "stage": (lambda f: edit(f, lambda m: m.update(zero_stage=2)), "ZeRO stage is 2, expected 3"),
    "optimizer": (lambda f: edit(f, lambda m: m.update(optimizer="SGD")), "optimizer is SGD, expected AdamW"),
    "scheduler": (lambda f: edit(f, lambda m: m.update(scheduler=None)), "scheduler is None, expected LambdaLR"),
    "shape": (
        lambda f: edit(f, lambda m: m["parameters"][0].update(shape=[13, 7])),
        r"another model.*'inlet.weight': logical_shape is \(13, 7\), expected \(12, 7\)",
    ),
    "name": (lambda f: edit(f, lambda m: m["parameters"][0].update(name="in")), "another model.*'in': presence"),
    "thawed": (
        lambda f: edit(f, lambda m: m["parameters"][1].update(requires_grad=True)),
        "'inlet.bias': requires_grad is True, expected False",
    ),
    "order": (
        lambda f: edit(f, lambda m: m["groups"][0].reverse()),
        "parameter group 0 of the optimizer differs at place 0",
    ),
    "renamed_expert": (
        both(lambda f: resave(f / MODEL, rename_expert)),
        rf"{MODEL}: another model: only one of them has \['moe.experts.gate', 'moe.experts.gates'\]",
    ),
    "partitions": (both(lambda f: resave(f / OPTIMIZER, fewer_elements)), f"{OPTIMIZER}: flat partitions of"),
    "hostile": (
        both(lambda f: (f / OPTIMIZER).write_bytes(pickle.dumps(Hostile()))),
        rf"{OPTIMIZER}: (holds more than tensors|cannot be read)",
    ),
    "hostile_zip": (
        both(lambda f: torch.save({"optimizer_state_dict": Hostile()}, f / OPTIMIZER)),
        f"{OPTIMIZER}: holds more than tensors and plain values",
    ),
    "outside": (lambda f: edit(f, lambda m: m["files"].update({"../x": m["files"][MODEL]})), r"names the file '../x'"),
    "version": (
        lambda f: edit(f, lambda m: m.update(version=2)),
        r"format and version are \('ruda_ds checkpoint', 2\)",
    ),
    "no_json": (lambda f: (f / MANIFEST).write_text("{"), "ruda_manifest.json: not a valid manifest"),
    "no_manifest": (lambda f: (f / MANIFEST).unlink(), "ruda_manifest.json: no such file: the tag is incomplete"),
    "gone": (shutil.rmtree, "gone: no such tag; folders there: .*good"),
    "killed": (lambda f: f.rename(f.with_name("killed.incomplete")), "killed.incomplete: the save was interrupted"),
}


def save_good(folder):
    """A tag in mid-window."""
    engine = make()
    run(engine, (0, 0), 1)
    for number in range(2):
        microbatch(engine, 1, number)
    ruda_ds.save_checkpoint(engine, folder, tag="good", client_state={"text": "mine", "tensor": torch.arange(3)})
    return state(engine)


def refusals(folder, names):
    """Load every damaged tag into one engine in mid-window; then the good one."""
    engine = make()
    microbatch(engine, 0, 1)
    before, said, changed = state(engine), {}, {}
    for name in names:
        try:
            ruda_ds.load_checkpoint(engine, folder, tag=name)
        except CheckpointError as error:
            said[name] = str(error)
        changed[name] = differing(state(engine), before)
    path, client = ruda_ds.load_checkpoint(engine, folder)
    assert path == Path(folder) / "good"
    assert (client["text"], client["tensor"].tolist(), len(client)) == ("mine", [0, 1, 2], 2)
    return said, changed, state(engine)


def test_each_fault_is_refused_on_every_rank_with_its_file_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTILE", str(tmp_path / "mark"))
    root = tmp_path / "checkpoints"
    good = run_ranks(save_good, 2, str(root))
    for name, (tamper, _) in FAULTS.items():
        shutil.copytree(root / "good", root / name)
        tamper(root / name)
    results = run_ranks(refusals, 2, str(root), list(FAULTS))
    assert not (tmp_path / "mark").exists()
    for rank, (said, changed, loaded) in enumerate(results):
        assert set(said) == set(FAULTS)
        assert {name: names for name, names in changed.items() if names} == {}
        assert differing(loaded, good[rank]) == []  # into an engine in mid-window, not a pristine one
    for name, (_, message) in FAULTS.items():
        assert results[0][0][name] == results[1][0][name]
        assert re.search(message, results[0][0][name]), results[0][0][name]


def clashing(folder):
    """DeepSpeed's own keys are those that we refuse, and its files need no more than we allow."""
    engine = make(prefix=[0, 8])
    engine.save_checkpoint(folder, tag="stock")
    with pytest.raises(CheckpointError, match="stock/ruda_manifest.json: no such file: .*engine.load_checkpoint"):
        ruda_ds.load_checkpoint(engine, folder)
    model = torch.load(f"{folder}/stock/zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    ruda_ds.save_checkpoint(engine, folder, tag="object", client_state={"mine": Path("x")})
    with pytest.raises(CheckpointError, match="trusted=True"):
        ruda_ds.load_checkpoint(engine, folder)
    assert ruda_ds.load_checkpoint(engine, folder, trusted=True)[1] == {"mine": Path("x")}
    assert Manifest.read(Path(folder) / "object").tag == "object"
    return set(model)


def test_a_stock_checkpoint_and_a_client_state_of_objects(tmp_path):
    assert run_ranks(clashing, 1, str(tmp_path))[0] <= stock.RESERVED
