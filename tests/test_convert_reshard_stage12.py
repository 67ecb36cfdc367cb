"""A checkpoint of ZeRO-1 or 2 on other ranks: bitwise the same after a chain of topologies, and the same next step."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from convert_helpers import convert, engine_of, feed, microbatch, parameter_row, tensors_of, tiny, windows
from helpers import base_config, fill, make_model
from safetensors.torch import load_file
from test_convert_faults import edit, refused
from test_convert_reshard import equal_on_disk, equal_values, farthest, reshard, same

import ruda_ds
from ruda_ds import _deepspeed
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.moe import ExpertOwnership, replace_moe_blocks

KIND = "qwen2_moe"


def whole(engine):
    """Every parameter whole and flat on every rank: float32 masters, moments as "name exp_avg"; and as "name stored"
    the model's own weights, frozen ones too."""
    optimizer = _deepspeed.zero_optimizer(engine)
    fragments, named, mine = _deepspeed.flat_fragments(optimizer), dict(engine.module.named_parameters()), []
    for place in engine.accumulator.placement:
        base = place.experts[0] * parameter_row(place) if place.experts else 0
        if place.experts is None or place.experts[1] > place.experts[0]:
            mine.append((f"{place.name} stored", base, named[place.name].detach().reshape(-1).clone()))
        if not place.shard_numel:
            continue
        fragment = fragments[id(named[place.name])]
        start = max(fragment.offset - fragment.rank * fragment.partition_numel, 0)
        master = optimizer.single_partition_of_fp32_groups[fragment.group_index]
        state = optimizer.optimizer.state[master]
        for suffix, flat in {"": master, " exp_avg": state["exp_avg"], " exp_avg_sq": state["exp_avg_sq"]}.items():
            values = flat.detach()[start : start + place.shard_numel].clone()
            mine.append((place.name + suffix, base + place.shard[0], values))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    parts: dict = {}
    for name, begin, values in (part for rank_parts in everyone for part in rank_parts):
        other = parts.setdefault(name, {}).setdefault(begin, values)
        assert torch.equal(other, values), name  # copies are the same on every rank
    return {name: torch.cat([part[b] for b in sorted(part)]) for name, part in parts.items()}


# --- a mixture of experts -----------------------------------------------------------------------------------------


def finish(engine, bf16):
    """The window's last micro-batch and step. With bf16 rank 0 alone has tokens: which rows stand together in a matrix
    must not differ from world to world, as bf16 rounds."""
    if not bf16:
        feed(engine, 5)
    else:
        rows = microbatch(5) if dist.get_rank() == 0 else microbatch(5)[:1]
        weight = float(dist.get_rank() == 0)
        loss = engine(rows).logits.float().sin().sum() * weight
        engine.accumulator.backward_sum(loss, local_count=int(rows.numel() * weight))
    result = engine.accumulator.step()
    return whole(engine), result.grad_norm, result.count, result.loss


def save(folder, prefix, stage, bf16):
    """Two windows and half of a third, saved; (whole state then, after the third, its norm, count and loss)."""
    engine = engine_of(KIND, prefix, stage, bf16)
    windows(engine, 0, 2)
    feed(engine, 4)
    ruda_ds.save_checkpoint(engine, folder, tag="mid", client_state={"place": 7})
    return whole(engine), *finish(engine, bf16)


def load(folder, prefix, stage, bf16):
    """The same of an engine that goes on from there."""
    engine = engine_of(KIND, prefix, stage, bf16)
    _, client = ruda_ds.load_checkpoint(engine, folder)
    assert client == {"place": 7}
    assert engine.global_steps == 2
    assert engine.lr_scheduler.last_epoch == 2
    assert len(engine.lr_scheduler.get_last_lr()) == len(engine.optimizer.param_groups)
    return whole(engine), *finish(engine, bf16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of a bf16 ZeRO-2 checkpoint in mid-window, what `save` tells of it)."""
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    return folder, run_ranks(save, 2, str(folder), [0, 2, 6], 2, True)[0]


def test_experts_of_stage2_there_and_back(saved, tmp_path):
    (tmp_path / "0").symlink_to(saved[0])
    now, after, norm, count, loss = saved[1]
    chain = [(4, [0, 0, 6]), (3, [0, 1, 1, 6]), (1, [0, 6]), (2, [0, 2, 6])]
    for place, (world, prefix) in enumerate(chain):
        source, target = tmp_path / str(place), tmp_path / str(place + 1)
        reshard(source, target, world, prefix)
        found, later, *rest = run_ranks(load, world, str(target), prefix, 2, True)[0]
        assert same(found, now)
        assert farthest({n: v for n, v in later.items() if "stored" not in n}, after) <= 1e-6
        assert rest[0] == pytest.approx(norm, rel=1e-6)
        assert rest[1] == count
        assert rest[2] == pytest.approx(loss, rel=1e-6)
    assert same(later, after)
    assert rest == [norm, count, loss]
    for name in ("0", "1", "4"):
        assert convert("verify", tmp_path / name) == 0
    first, last = tmp_path / "0" / "mid", tmp_path / "4" / "mid"
    equal_on_disk(first, last, shards=10, tensors=50)
    equal_fragments(first, last)
    for path in first.glob("ruda_experts*"):
        assert equal_values(load_file(path), load_file(last / path.name)) == 6


def test_experts_of_stage1_and_ranks_without_any(tmp_path):
    now, after, norm, *rest = run_ranks(save, 2, str(tmp_path / "0"), [0, 0, 6], 1, False)[0]
    reshard(tmp_path / "0", tmp_path / "1", 4, [0, 1, 6])
    found, later, other_norm, count, loss = run_ranks(load, 4, str(tmp_path / "1"), [0, 1, 6], 1, False)[0]
    assert same(found, now)
    assert farthest({n: v for n, v in later.items() if "stored" not in n}, after) <= 1e-6
    assert [other_norm, count, loss] == pytest.approx([norm, *rest], rel=1e-6)
    reshard(tmp_path / "1", tmp_path / "2", 2, [0, 0, 6])
    equal_on_disk(tmp_path / "0" / "mid", tmp_path / "2" / "mid", shards=10, tensors=50)


def test_expert_parallel_sizes_there_and_back_on_disk(saved, tmp_path):
    (tmp_path / "0").symlink_to(saved[0])
    chain = [(2, [0, 6]), (4, [0, 1, 1, 5, 6]), (8, [0, 6, 6]), (2, [0, 2, 6])]
    for place, (world, prefix) in enumerate(chain):
        reshard(tmp_path / str(place), tmp_path / str(place + 1), world, prefix)
        assert convert("verify", tmp_path / str(place + 1)) == 0
    equal_on_disk(tmp_path / "0" / "mid", tmp_path / "4" / "mid", shards=10, tensors=50)


def equal_fragments(first, last):
    """What each rank's own file says of where its shards begin and end."""
    for path in first.glob("ruda_rank*"):
        left, right = (json.loads((folder / path.name).read_text())["fragments"] for folder in (first, last))
        assert left == right


def adapters(folder, prefix, do):
    """Adapters on frozen experts, saved in mid-window after a step; or loaded. Whole weights and moments."""
    from ruda_ds.moe.adapters import LoRAExperts

    model = tiny("qwen3_moe", num_hidden_layers=1)
    replace_moe_blocks(model, ExpertOwnership(prefix), rank=dist.get_rank() % (len(prefix) - 1))
    model.requires_grad_(False)
    for block in model.modules():
        if hasattr(block, "experts") and hasattr(block, "router"):
            block.experts = LoRAExperts(block.experts, rank=3, alpha=6.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = base_config(zero_optimization={"stage": 2})
    engine, *_ = ruda_ds.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=0.1), config=config)
    if do == "save":
        windows(engine, 0, 1)
        feed(engine, 2)
        ruda_ds.save_checkpoint(engine, folder, tag="mid")
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        ruda_ds.load_checkpoint(engine, folder)
    return whole(engine)


def test_adapters_on_frozen_experts(tmp_path):
    now = run_ranks(adapters, 2, str(tmp_path / "0"), [0, 2, 6], "save")[0]
    chain = [(3, [0, 1, 1, 6]), (1, [0, 6]), (2, [0, 2, 6])]
    for place, (world, prefix) in enumerate(chain):
        reshard(tmp_path / str(place), tmp_path / str(place + 1), world, prefix)
    assert same(run_ranks(adapters, 3, str(tmp_path / "1"), [0, 1, 1, 6], "load")[0], now)
    equal_on_disk(tmp_path / "0" / "mid", tmp_path / "3" / "mid", shards=1, tensors=20)
    for place in (0, 1, 2):
        assert convert("to-hf", tmp_path / str(place), tmp_path / f"hf{place}") == 0
    first, *others = [tensors_of(tmp_path / f"hf{place}") for place in (0, 1, 2)]
    assert all(equal_values(first, other) > 10 for other in others)


# --- dense --------------------------------------------------------------------------------------------------------

DENSE = {
    "fp32, stage 1": {"stage": 1},
    "fp32, stage 2, dealt and aligned": {"stage": 2, "round_robin_gradients": True, "parameter_alignment": True},
}


def dense(folder, zero, do):
    """An engine over the odd model (a frozen and a tied weight, two optimizer groups); saved or loaded in a window."""
    model = make_model(seed=1 if do == "save" else 2)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[::3]}, {"params": [p for i, p in enumerate(trained) if i % 3], "weight_decay": 0.1}]
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.02),
        lr_scheduler=lambda inner: torch.optim.lr_scheduler.MultiStepLR(inner, [1, 2, 2]),
        config=base_config(zero_optimization=zero),
    )
    if do == "load by DeepSpeed":
        with torch.no_grad():
            assert engine.load_checkpoint(folder)[1]["place"] == 7
        return whole(engine)
    if do == "save":
        fill(engine, 0, 2)
        engine.accumulator.step()
        fill(engine, 1, 2)
        ruda_ds.save_checkpoint(engine, folder, tag="mid", client_state={"place": 7})
    else:
        assert ruda_ds.load_checkpoint(engine, folder)[1] == {"place": 7}
    now = whole(engine)
    fill(engine, 2, 1)
    result = engine.accumulator.step()
    return now, whole(engine), result.grad_norm, result.count, result.loss, engine.get_lr()


@pytest.mark.parametrize("zero", DENSE.values(), ids=DENSE)
def test_dense_there_and_back(zero, tmp_path):
    now, after, norm, *rest = run_ranks(dense, 2, str(tmp_path / "0"), zero, "save")[0]
    worlds = (4, 3, 1, 2) if zero["stage"] == 1 else (3, 2)
    for place, world in enumerate(worlds):
        target = tmp_path / str(place + 1)
        assert convert("reshard", tmp_path / str(place), target, "--world", world) == 0
        found, later, other_norm, count, loss, rates = run_ranks(dense, world, str(target), zero, "load")[0]
        assert same(found, now)
        assert farthest({n: v for n, v in later.items() if "stored" not in n}, after) <= 1e-6
        assert [other_norm, loss] == pytest.approx([norm, rest[1]], rel=1e-6)
        assert [count, rates] == [rest[0], rest[2]]
        if not place:
            assert same(run_ranks(dense, world, str(target), zero, "load by DeepSpeed")[0], now)
    assert same(later, after)
    assert convert("verify", target) == 0
    equal_on_disk(tmp_path / "0" / "mid", target / "mid", shards=2, tensors=20)
    equal_fragments(tmp_path / "0" / "mid", target / "mid")


# --- faults -------------------------------------------------------------------------------------------------------

OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"
EXPERTS = "ruda_experts_00001-of-00002.safetensors"
RANK = "ruda_rank_00001-of-00002.json"


@pytest.fixture
def copied(saved, tmp_path):
    """(folder of a fresh copy, its tag, a target's name)."""
    shutil.copytree(saved[0], tmp_path / "ckpt")
    return tmp_path / "ckpt", tmp_path / "ckpt" / "mid", tmp_path / "out"


def accept(tag, *names):
    """Sizes as they are now, as whoever can write the folder can make them: what the files say must then tell."""
    fields = json.loads((tag / "ruda_manifest.json").read_text())
    for name in names:
        fields["files"][name]["bytes"] = (tag / name).stat().st_size
    (tag / "ruda_manifest.json").write_text(json.dumps(fields))


def test_a_missing_rank_and_missing_experts_are_named(copied, capsys):
    folder, tag, out = copied
    for name in (OPTIM, EXPERTS):
        (tag / name).rename(folder / name)
        refused(folder, out, capsys, name, "missing", commands=["reshard"])
        (folder / name).rename(tag / name)
    (tag / "ruda_manifest.json").unlink()  # as DeepSpeed alone would have saved it: nobody knows whose experts
    counts = "found [2, 2, 1, 1], expected partition counts [2, 2, 2, 2]"
    refused(folder, out, capsys, "zero_pp_rank_0", counts, commands=["reshard"])
    (tag / OPTIM).unlink()
    refused(folder, out, capsys, "none of rank 1", commands=["reshard"])


def test_counters_and_parts_that_disagree(copied, capsys):
    folder, tag, out = copied

    def check(name, change, *texts):
        before = (tag / name).read_bytes()
        change(tag / name)
        accept(tag, name)
        refused(folder, out, capsys, name, *texts, commands=["reshard"])
        (tag / name).write_bytes(before)
        accept(tag, name)

    def of_optimizer(change):
        return lambda path: edit(path, lambda root: change(root["optimizer_state_dict"]))

    def step(zero):
        zero["base_optimizer_state"]["state"][2]["step"] = torch.tensor(5.0)

    check(OPTIM, of_optimizer(step), "tensor(5.)", "tensor(2.)")
    check(OPTIM, of_optimizer(lambda zero: zero["partition_count"].__setitem__(0, 3)), "partition_count [2, 2, 1, 1]")
    check(OPTIM, of_optimizer(lambda zero: zero["single_partition_of_fp32_groups"].pop()), "4 optimizer groups")
    check(OPTIM, of_optimizer(lambda zero: zero["group_paddings"].__setitem__(1, 9)), "elements and padding")
    check(OPTIM, of_optimizer(lambda zero: zero.update(base_optimizer_state=[])), "elastic_checkpoint")
    check(MODEL, lambda path: edit(path, lambda root: root.update(global_steps=9)), "global_steps 2", "found 9")
    shapes = {"model.embed_tokens.weight": torch.Size([51, 32])}
    check(MODEL, lambda path: edit(path, lambda root: root["param_shapes"][0].update(shapes)), "(51, 32)")
    fields = json.loads((tag / RANK).read_text())
    fields["fragments"]["model.embed_tokens.weight"] = [0, 1]
    check(RANK, lambda path: path.write_text(json.dumps(fields)), "fragment", "model.embed_tokens.weight")
    assert convert("reshard", folder, out, "--world", 2) == 0
