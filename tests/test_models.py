"""Kinds of model and of engine: low precision, offload, checkpointing, tied, frozen, unused and overlapping uses."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from helpers import (
    base_config,
    fill,
    full_parameters,
    gather,
    local_batch,
    make_engine,
    make_model,
    oracle,
    oracle_mean,
    worst,
)
from torch.utils.checkpoint import checkpoint

from ruda_ds.cli.ranks import run_ranks

LOW = {
    "bfloat16": ({"bf16": {"enabled": True}}, 2e-2),
    "float16": ({"fp16": {"enabled": True, "loss_scale": 128}}, 4e-3),
}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def trained(dtype_name: str, stage: int, offload: bool, windows: int = 3):
    """Gradient error against float64, and the parameters after a few windows, of an engine of some kind."""
    dtype = getattr(torch, dtype_name)
    if dtype == torch.float16:
        # DeepSpeed asks whether oneDNN has fast fp16 here and refuses otherwise; torch computes it on any CPU.
        get_accelerator().is_fp16_supported = lambda: True
    extra = LOW[dtype_name][0] if dtype_name in LOW else {}
    zero = {"stage": stage, **(OFFLOAD if offload else {})}
    config = base_config(zero_optimization=zero, zero_force_ds_cpu_optimizer=False, gradient_clipping=0.3, **extra)
    engine = make_engine(config, model=make_model().to(dtype), optimizer=torch.optim.AdamW, lr=1e-2)
    reference = oracle(make_model().to(dtype))
    errors, results = [], []
    for window in range(windows):
        wanted, _, _ = oracle_mean(reference, window)
        fill(engine, window, 1 + window, dtype)
        accumulator = engine.accumulator
        mean = {name: shard / accumulator.state.divisor for name, shard in accumulator.pending().items()}
        errors.append(worst(gather(accumulator, mean), wanted) if window == 0 else 0.0)
        results.append(accumulator.step())
    return max(errors), results, full_parameters(engine), engine.accumulator.state.loss_scale


@pytest.mark.parametrize("dtype", list(LOW))
@pytest.mark.parametrize("stage", [2, 3])
def test_low_precision_models(dtype, stage):
    for error, results, _, scale in run_ranks(trained, 2, dtype, stage, False):
        assert error <= LOW[dtype][1]
        assert not any(result.skipped for result in results)
        assert scale == (128.0 if dtype == "float16" else 1.0)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(1, "float32"), (2, "float32"), (2, "bfloat16"), (3, "float32"), (3, "bfloat16")]
)
def test_offload_steps_as_without(stage, dtype):
    plain = run_ranks(trained, 2, dtype, 2 if dtype == "bfloat16" and stage == 1 else stage, False)[0]
    offloaded = run_ranks(trained, 2, dtype, stage, True)[0]
    assert [r.grad_norm for r in plain[1]] == pytest.approx([r.grad_norm for r in offloaded[1]], rel=1e-6)
    assert worst(offloaded[2], plain[2]) <= 1e-6


class Deep(torch.nn.Module):
    """Three blocks, each perhaps under activation checkpointing; the first is used twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inlet = torch.nn.Linear(7, 12)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        hidden = self.inlet(x)
        for block in [*self.blocks, self.blocks[0]]:
            run = lambda h, block=block: torch.tanh(block(h))  # noqa: E731
            if self.kind == "none":
                hidden = run(hidden)
            else:
                hidden = checkpoint(run, hidden, use_reentrant=self.kind == "reentrant")
        return hidden.pow(2).sum(-1)


def deep(kind: str, stage: int):
    torch.manual_seed(5)
    engine = make_engine(base_config(zero_optimization={"stage": stage}), model=Deep(kind))
    for window in range(2):
        fill(engine, window, 3)
        result = engine.accumulator.step()
    return full_parameters(engine), result


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_checkpointing_changes_nothing(stage):
    plain, result = run_ranks(deep, 2, "none", stage)[0]
    for kind in ("reentrant", "not reentrant"):
        parameters, checkpointed = run_ranks(deep, 2, kind, stage)[0]
        assert worst(parameters, plain) <= 1e-7
        assert checkpointed.count == result.count
        assert checkpointed.grad_norm == pytest.approx(result.grad_norm, rel=1e-7)


def stale(stage: int):
    """Window 1 uses the branch, window 2 does not, window 3 does again; the branch's float32 gradient at each step."""
    engine = make_engine(base_config(zero_optimization={"stage": stage}))
    accumulator, seen = engine.accumulator, []
    for window, use in enumerate((True, False, True)):
        x, mask = local_batch(window, [0, 1, 2], torch.float32)
        for _ in range(2):
            accumulator.backward_sum((engine(x, use) * mask).sum(), local_count=int(mask.sum()))
        names = set(accumulator.pending())
        before = full_parameters(engine)["branch.weight"]
        result = accumulator.step()
        after = full_parameters(engine)["branch.weight"]
        seen.append(("branch.weight" in names, torch.equal(before, after), result.untouched))
    return seen


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 3), (3, 3), (2, 2), (2, 1)])
def test_an_unused_parameter_gets_exactly_zero(world, stage):
    for rank in run_ranks(stale, world, stage):
        assert [unchanged for _, unchanged, _ in rank] == [False, True, False]
        assert [untouched for *_, untouched in rank] == [(), ("branch.bias", "branch.weight"), ()]
        assert rank[1][0] is False


def uneven_use(stage: int):
    """Below stage 3 ranks may use different parameters: rank 0 leaves the branch out."""
    engine = make_engine(base_config(zero_optimization={"stage": stage}))
    x, _ = local_batch(0, [0, 1, 2], torch.float32)
    engine.accumulator.backward_sum(engine(x, dist.get_rank() != 0).sum(), local_count=3)
    whole = gather(engine.accumulator, dict(engine.accumulator.pending()))
    twin = make_model()
    (twin(x, False).sum() + (dist.get_world_size() - 1) * twin(x, True).sum()).backward()
    error = worst(whole, {n: p.grad for n, p in twin.named_parameters() if p.requires_grad})
    return error, engine.accumulator.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_use_different_parameters_below_stage_3(stage):
    for error, result in run_ranks(uneven_use, 3, stage):
        assert error <= 1e-6
        assert result.untouched == ()
        assert not result.skipped


def forwards_first(stage: int):
    engine = make_engine(base_config(zero_optimization={"stage": stage}))
    x, _ = local_batch(0, [0, 1, 2, 3], torch.float32)
    losses = [engine(x[:2]).sum(), engine(x[2:]).sum()]
    for loss in losses:
        engine.accumulator.backward_sum(loss, local_count=2)
    engine.optimizer.zero_grad()  # in mid-window: stock DeepSpeed would forget what it has summed
    pending = gather(engine.accumulator, dict(engine.accumulator.pending()))
    twin = make_model()
    twin(x).sum().backward()
    return worst(pending, {n: p.grad * dist.get_world_size() for n, p in twin.named_parameters() if p.requires_grad})


@pytest.mark.parametrize("stage", [2, 3])
def test_two_forwards_then_two_backwards(stage):
    assert max(run_ranks(forwards_first, 2, stage)) <= 1e-6


def evaluated():
    """An evaluation without gradients between the micro-batches of a window."""
    engine = make_engine(base_config())
    reference = oracle(make_model())
    wanted, *_ = oracle_mean(reference, 0)
    fill(engine, 0, 2)
    before = {n: g.clone() for n, g in engine.accumulator.pending().items()}
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(3, 7))
    engine.train()
    assert all(torch.equal(before[n], g) for n, g in engine.accumulator.pending().items())
    mean = engine.accumulator.finish_mean()
    assert mean.state.microbatches == 2
    assert engine.accumulator.state.microbatches == 0
    return worst(gather(engine.accumulator, dict(mean.gradients)), wanted)


def test_evaluation_in_mid_window():
    assert max(run_ranks(evaluated, 2)) <= 1e-6
