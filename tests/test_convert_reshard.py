"""A checkpoint on other ranks: bitwise the same after any chain of topologies, and the same next step."""

import errno
import pickle

import pytest
import torch
import torch.distributed as dist
from convert_helpers import convert, engine_of, feed, whole, windows
from helpers import Odd, base_config
from safetensors.torch import load_file

import ruda_ds
from ruda_ds.checkpoint import hf
from ruda_ds.checkpoint.journal import Journal
from ruda_ds.checkpoint.manifest import Manifest
from ruda_ds.checkpoint.reshard_disk import plan_reshard
from ruda_ds.checkpoint.unfinished import RESULT
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import UnfinishedError

KIND = "qwen2_moe"


def save(folder, prefix):
    """Two windows and half of a third; (whole state then, whole state after the third, its norm)."""
    engine = engine_of(KIND, prefix)
    windows(engine, 0, 2)
    feed(engine, 4)
    ruda_ds.save_checkpoint(engine, folder, tag="mid", client_state={"place": 7})
    now = whole(engine)
    feed(engine, 5)
    result = engine.accumulator.step()
    return now, whole(engine), result.grad_norm, result.count, result.loss


def load(folder, prefix):
    """The same of an engine that goes on from there."""
    engine = engine_of(KIND, prefix)
    _, client = ruda_ds.load_checkpoint(engine, folder)
    assert client == {"place": 7}
    assert engine.global_steps == 2
    assert engine.lr_scheduler.last_epoch == 2
    now = whole(engine)
    feed(engine, 5)
    result = engine.accumulator.step()
    return now, whole(engine), result.grad_norm, result.count, result.loss


def load_stock(folder, prefix):
    """DeepSpeed's own load."""
    engine = engine_of(KIND, prefix)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    assert client["place"] == 7
    return whole(engine)


def same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def farthest(found, wanted):
    """The largest relative error by norm: of the parameters, of the first and of the second moments."""
    errors = []
    for kind in ("", "exp_avg", "exp_avg_sq"):
        names = [name for name in wanted if name.partition(" ")[2] == kind]
        left, right = (torch.cat([values[name].double() for name in names]) for values in (found, wanted))
        errors.append(((left - right).norm() / right.norm()).item())
    return max(errors)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of a checkpoint in mid-window, what `save` tells of it)."""
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    return folder, run_ranks(save, 2, str(folder), [0, 2, 6])[0]


def reshard(source, target, world, prefix):
    ownership = ",".join(map(str, prefix))
    words = "--world", world, "--ep-size", len(prefix) - 1, "--ownership", ownership
    assert convert("reshard", source, target, *words) == 0


def test_topologies_there_and_back(saved, tmp_path):
    (tmp_path / "0").symlink_to(saved[0])
    now, after, norm, count, loss = saved[1]
    chain = [(4, [0, 0, 6]), (3, [0, 1, 1, 6]), (1, [0, 6]), (2, [0, 2, 6])]
    for place, (world, prefix) in enumerate(chain):
        source, target = tmp_path / str(place), tmp_path / str(place + 1)
        reshard(source, target, world, prefix)
        found, later, *rest = run_ranks(load, world, str(target), prefix)[0]
        assert same(found, now)
        assert farthest(later, after) <= 1e-6
        assert rest[0] == pytest.approx(norm, rel=1e-6)
        assert rest[1] == count
        assert rest[2] == pytest.approx(loss, rel=1e-6)
        if place == 0:
            assert same(run_ranks(load_stock, world, str(target), prefix)[0], now)
    assert same(later, after)
    assert rest == [norm, count, loss]
    for name in ("0", "4"):
        assert convert("verify", tmp_path / name) == 0
    equal_on_disk(tmp_path / "0" / "mid", tmp_path / "4" / "mid")


def equal_on_disk(first, last, shards=30, tensors=100):
    """The manifests say the same, and every tensor is the same to the bit; there are more than so many."""
    left, right = Manifest.read(first), Manifest.read(last)
    assert (left.groups, left.experts, left.window) == (right.groups, right.experts, right.window)
    for path in first.glob("ruda_pending*"):
        assert hf.read_header(last / path.name)[1] == hf.read_header(path)[1]
        assert equal_values(load_file(path), load_file(last / path.name)) > shards
    compared = 0
    for path in first.glob("*.pt"):
        states = [torch.load(folder / path.name, weights_only=False) for folder in (first, last)]
        compared += equal_values(*states)
    assert compared > tensors


def equal_values(left, right):
    """Compare nested values; how many tensors there were."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
        return 1
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        return sum(equal_values(value, right[key]) for key, value in left.items())
    if type(left) in (list, tuple):
        assert len(left) == len(right)
        return sum(map(equal_values, left, right))
    assert left == right or vars(left) == vars(right)
    return 0


def test_expert_parallel_sizes_there_and_back_on_disk(saved, tmp_path):
    (tmp_path / "0").symlink_to(saved[0])
    chain = [(2, [0, 6]), (4, [0, 1, 1, 5, 6]), (4, [0, 6, 6]), (2, [0, 2, 6])]
    for place, (world, prefix) in enumerate(chain):
        reshard(tmp_path / str(place), tmp_path / str(place + 1), world, prefix)
    assert convert("verify", tmp_path / "2") == 0
    equal_on_disk(tmp_path / "0" / "mid", tmp_path / "4" / "mid")


def dense(folder, momentum, load_it):
    """A dense model with a frozen and a tied parameter; small sub-groups; saved, or loaded, by DeepSpeed alone."""
    torch.manual_seed(5)
    model = Odd()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=momentum)
    config = base_config(zero_optimization={"sub_group_size": 100})
    engine, *_ = ruda_ds.initialize(model=model, optimizer=optimizer, config=config)
    if load_it:
        with torch.no_grad():
            assert engine.load_checkpoint(folder)[1]["rank"] == 0
    else:
        rows = torch.randn(6, 7, generator=torch.Generator().manual_seed(1))
        engine.accumulator.backward_sum(engine(rows).sum(), local_count=6)
        engine.accumulator.step()
        engine.save_checkpoint(folder, tag="stock", client_state={"rank": dist.get_rank()})
    return whole_of(engine, momentum)


def whole_of(engine, momentum):
    """Masters and momentum, whole."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter)
            if momentum:
                found[name + " momentum"] = safe_get_full_optimizer_state(parameter, "momentum_buffer")
        else:
            shards = [torch.empty_like(parameter.ds_tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, parameter.ds_tensor.detach())
            found[name] = torch.cat(shards)[: parameter.ds_numel]
    return found


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_dense_checkpoint_of_deepspeed_alone(momentum, tmp_path, capsys):
    wanted = run_ranks(dense, 2, str(tmp_path / "a"), momentum, False)[0]
    assert convert("reshard", tmp_path / "a", tmp_path / "b", "--world", 3) == 0
    assert "client state 'rank' differs from rank to rank" in capsys.readouterr().out
    assert same(run_ranks(dense, 3, str(tmp_path / "b"), momentum, True)[0], wanted)
    assert convert("reshard", tmp_path / "b", tmp_path / "c", "--world", 2) == 0
    for name in ("zero_pp_rank_0", "zero_pp_rank_1"):
        first, last = (
            torch.load(tmp_path / x / "stock" / f"{name}_mp_rank_00_optim_states.pt", weights_only=False) for x in "ac"
        )
        for key in ("fp32_flat_groups",):
            pairs = zip(first["optimizer_state_dict"][key], last["optimizer_state_dict"][key], strict=True)
            assert all(a.shape == b.shape for a, b in pairs)
        left, right = first["optimizer_state_dict"], last["optimizer_state_dict"]
        assert left["optimizer_state_dict"]["param_groups"] == right["optimizer_state_dict"]["param_groups"]
        assert pickle.dumps(left["loss_scaler"]) == pickle.dumps(right["loss_scaler"])


def files_of(folder):
    """Name -> bytes of all files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_interrupted_one_goes_on_and_makes_the_same_files(saved, tmp_path, capsys):
    reshard(saved[0], tmp_path / "whole", 3, [0, 1, 1, 6])
    plan = plan_reshard(saved[0], 3, 3, [0, 1, 1, 6])
    partial = tmp_path / ".out.partial"

    def advance(nbytes):
        if len(Journal.read(partial).complete) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UnfinishedError, match=r"No space left on device; \d of 6 files are complete in .*out.partial"):
        plan.run(tmp_path / "out", advance)
    assert not (tmp_path / "out").exists()
    found = Journal.read(partial).complete
    stamps = {name: (partial / RESULT / name).stat().st_ino for name in found}
    assert 2 <= len(found) < 6
    capsys.readouterr()
    reshard(saved[0], tmp_path / "out", 3, [0, 1, 1, 6])
    assert f"going on: {len(found)} of 6 files are complete\n" in capsys.readouterr().out
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in found} == stamps
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not partial.exists()


def test_topologies_that_do_not_fit_are_refused(saved, tmp_path, capsys):
    for words, text in {
        ("--world", 3, "--ep-size", 2): "whole groups",
        ("--world", 2, "--ep-size", 2, "--ownership", "0,2,5"): "does not fit 6 experts on 2 ranks",
        ("--world", 2, "--ep-size", 2, "--ownership", "0,6"): "does not fit 6 experts on 2 ranks",
        ("--world", 2, "-t", "other"): "no such tag",
    }.items():
        assert convert("reshard", saved[0], tmp_path / "out", *words) == 1
        assert text in capsys.readouterr().err
    assert convert("reshard", saved[0], tmp_path / "out", "--world", 4, "-n") == 0
    assert "zero_pp_rank_3_mp_rank_00_optim_states.pt" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
