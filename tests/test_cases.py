"""Faults that people reported of gradient accumulation, each with the value that is right."""

import math

import pytest
import torch
import torch.distributed as dist
from helpers import base_config, full_parameters, gather, make_engine

import ruda_ds
from ruda_ds.accumulation import WeightedGradientAccumulator, measure_gradient_norm
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import BindingError, CountError, RankDisagreementError


class Linear(torch.nn.Module):
    """loss [n] = w * x: the gradient of a sum of losses is the sum of the x."""

    def __init__(self, value: float = 1.0, size: int = 1) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((size,), value))

    def forward(self, x):
        return self.w.sum() * x


def token_mean(samples: list[tuple[int, float]], microbatches: int) -> tuple:
    """Samples (tokens, loss a token) dealt to the ranks and micro-batches; the gradient equals the loss at w = 1."""
    engine = make_engine(base_config(), model=Linear())
    accumulator = engine.accumulator
    per_slot = -(-len(samples) // (dist.get_world_size() * microbatches))
    for microbatch in range(microbatches):
        start = (microbatch * dist.get_world_size() + dist.get_rank()) * per_slot
        mine = samples[start : start + per_slot]
        values = torch.tensor([tokens * loss for tokens, loss in mine] or [0.0])
        accumulator.backward_sum(engine(values).sum(), local_count=sum(tokens for tokens, _ in mine))
    gradient = accumulator.pending()["w"] / accumulator.state.divisor
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, gradient.tolist())
    result = accumulator.step()
    return [value for part in everyone for value in part], result.loss, result.grad_norm, result.count


FOUR = [(1, 4.0), (4, 1.0), (3, 2.0), (8, 0.5)]  # 2 ranks x 2 micro-batches: [1, 3] and [4, 8] tokens


@pytest.mark.parametrize(("world", "microbatches"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (3, 2), (4, 3)])
def test_a_window_is_not_a_mean_of_means(world, microbatches):
    for gradient, loss, norm, count in run_ranks(token_mean, world, FOUR, microbatches):
        assert (gradient, loss, count) == ([1.125], 1.125, 16)
        assert norm == pytest.approx(1.125, rel=1e-7)


def test_accumulation_steps_do_not_change_gradient_norm_or_loss():
    samples = [(1 + i % 5, 0.25 * i) for i in range(8)]
    runs = [run_ranks(token_mean, 1, samples, microbatches)[0] for microbatches in (1, 2, 8)]
    assert runs[0] == runs[1] == runs[2]


def test_every_target_weighs_the_same():
    (gradient, loss, _, count), *_ = run_ranks(token_mean, 2, [(1, 8.0), (7, 0.0)], 1)
    assert (gradient, loss, count) == ([1.0], 1.0, 8)


def without_tokens(empty_ranks: list[int], skip: bool):
    config = base_config(ruda={"accumulation": {"skip_empty_window": skip}})
    engine = make_engine(config, model=Linear(size=3), optimizer=torch.optim.AdamW, lr=0.1)
    scheduler_steps = []
    engine.lr_scheduler = type("Scheduler", (), {"step": lambda self, **_: scheduler_steps.append(1)})()
    empty = dist.get_rank() in empty_ranks
    x = torch.tensor([2.0])
    loss = engine(x).sum() * 0 if empty else engine(x).sum()
    engine.accumulator.backward_sum(loss, local_count=0 if empty else 4)
    gradients = gather(engine.accumulator, dict(engine.accumulator.pending()))["w"] / engine.accumulator.state.divisor
    result = engine.accumulator.step()
    return gradients.tolist(), result, full_parameters(engine)["w"].tolist(), len(scheduler_steps), engine.skipped_steps


def test_one_rank_without_a_target():
    for gradient, result, _, scheduled, _ in run_ranks(without_tokens, 2, [1], True):
        assert gradient == [0.5] * 3
        assert result.count == 4
        assert not result.skipped
        assert scheduled == 1


def test_no_target_anywhere_is_reported_and_skipped():
    for gradient, result, parameters, scheduled, skipped in run_ranks(without_tokens, 2, [0, 1], True):
        assert gradient == [0.0] * 3
        assert result.skipped
        assert "empty window" in result.reason
        assert (result.count, result.loss, result.grad_norm) == (0, 0.0, 0.0)
        assert parameters == [1.0] * 3
        assert (scheduled, skipped) == (0, 1)


def test_an_empty_window_may_step_if_the_config_says_so():
    for _, result, parameters, scheduled, _ in run_ranks(without_tokens, 2, [0, 1], False):
        assert not result.skipped
        assert scheduled == 1
        assert parameters[0] == pytest.approx(1 - 0.1 * 0.01, abs=1e-6)  # weight decay alone


def small_additions():
    torch.manual_seed(0)
    engine = make_engine(base_config(bf16={"enabled": True}), model=Linear().bfloat16())
    for value in [256.0] + [0.5] * 64:
        engine.accumulator.backward_sum(engine(torch.tensor([value], dtype=torch.bfloat16)).sum(), local_count=1)
    return gather(engine.accumulator, dict(engine.accumulator.pending()))["w"].item()


def test_bf16_gradients_add_in_float32():
    assert run_ranks(small_additions, 1) == [288.0]


def missing_count():
    engine = make_engine(base_config(), model=Linear())
    with pytest.raises(CountError, match="mean of means"):
        engine.accumulator.backward_sum(engine(torch.ones(2)).sum())
    return engine.accumulator.state.microbatches


def test_no_count_is_an_error_never_a_local_mean():
    assert run_ranks(missing_count, 2) == [0, 0]


def late_total():
    """The total is known when the window ends, given in parts and by the caller."""
    engine = make_engine(base_config(), model=Linear())
    for count in (3, 0, 13):
        engine.accumulator.backward_sum(engine(torch.tensor([6.0])).sum(), global_count=count)
    return engine.accumulator.step()


def test_division_waits_for_the_total():
    for result in run_ranks(late_total, 2):
        assert (result.count, result.microbatches) == (16, 3)
        assert result.loss == 36 / 16
        assert result.grad_norm == 36 / 16


def two_norms():
    squares = torch.tensor([[2.0, 4.0], [6.0, 8.0]])[dist.get_rank()]  # squared norms 20 and 100
    norm = measure_gradient_norm({"w": squares})
    replicated = measure_gradient_norm({"w": torch.tensor([3.0, 4.0])}, replicas=2)
    return norm.value, replicated.value


def test_norms_add_over_ranks_and_copies_count_once():
    for norm, replicated in run_ranks(two_norms, 2):
        assert norm == math.sqrt(120)
        assert replicated == 5.0


def poisoned(value: float, stage: int):
    engine = make_engine(base_config(zero_optimization={"stage": stage}), model=Linear(size=4))
    scheduler_steps = []
    engine.lr_scheduler = type("Scheduler", (), {"step": lambda self, **_: scheduler_steps.append(1)})()
    x = torch.tensor([value if dist.get_rank() == 1 else 1.0])
    engine.accumulator.backward_sum(engine(x).sum(), local_count=1)
    bad = engine.accumulator.step()
    engine.accumulator.backward_sum(engine(torch.ones(1)).sum(), local_count=1)
    good = engine.accumulator.step()
    return bad, good, len(scheduler_steps), full_parameters(engine)["w"].tolist()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_skips_on_every_rank_by_name(value, stage):
    for bad, good, scheduled, parameters in run_ranks(poisoned, 2, value, stage):
        assert bad.skipped
        assert "'w' on rank" in bad.reason
        assert math.isnan(bad.grad_norm)
        assert not good.skipped
        assert scheduled == 1
        assert parameters == pytest.approx([1 - 0.05] * 4)


def clipped():
    engine = make_engine(base_config(gradient_clipping=0.25), model=Linear())
    engine.accumulator.backward_sum(engine(torch.tensor([4.0])).sum(), local_count=2)
    result = engine.accumulator.step()
    return result.grad_norm, result.clipped_norm, full_parameters(engine)["w"].item(), engine.get_global_grad_norm()


def test_norms_before_and_after_clipping_are_reported():
    for before, after, parameter, theirs in run_ranks(clipped, 2):
        assert before == 2.0
        assert after == pytest.approx(0.25, rel=1e-5)
        assert parameter == pytest.approx(1 - 0.05 * 0.25, rel=1e-6)
        assert float(theirs) == 2.0


def disagreeing():
    engine = make_engine(base_config(), model=Linear())
    engine.accumulator.backward_sum(engine(torch.ones(1)).sum(), global_count=5 + (dist.get_rank() == 2))
    before = engine.accumulator.state
    with pytest.raises(RankDisagreementError, match="global_count: rank 2 holds 6, the others hold 5"):
        engine.accumulator.step()
    return engine.accumulator.state == before


def test_ranks_that_disagree_all_hear_which_rank_and_what():
    assert run_ranks(disagreeing, 3) == [True] * 3


def scales_differ():
    scale = 2.0 if dist.get_rank() else 1.0
    engine = make_engine(base_config(ruda={"accumulation": {"loss_scale": scale}}), model=Linear())
    engine.accumulator.backward_sum(engine(torch.ones(1)).sum(), local_count=1)
    with pytest.raises(RankDisagreementError, match=r"loss_scale: rank \d holds \d\.0, the others hold \d\.0"):
        engine.accumulator.step()
    return True


def test_a_setting_that_differs_is_shown_as_it_was_set():
    assert run_ranks(scales_differ, 3) == [True] * 3


DIFFERENCES = {
    "shape": r"parameter weight: rank 1 holds \(5, 4\) torch.float32 trained, .* the others hold \(4, 4\) ",
    "frozen": r"parameter bias: rank 1 holds \(4,\) torch.float32 frozen.* others hold \(4,\) torch.float32 trained",
    "groups": r"parameter weight: rank 1 holds .* group 1, the others hold .* group 0",
    "made": r"parameter weight: rank 1 holds .* group 1, the others hold .* group 0",
    "more": r"parameter extra: rank 1 holds \(4,\).*, the others hold no such parameter",
}


def differing(stage):
    """What would hang in DeepSpeed's start, break a backward, or be saved and never load, is told before any of it."""
    for what, message in DIFFERENCES.items():
        other = what if dist.get_rank() == 1 else ""
        model = torch.nn.Linear(4, 5 if other == "shape" else 4)
        model.bias.requires_grad_(other != "frozen")
        if other == "more":
            model.extra = torch.nn.Parameter(torch.zeros(4))
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        groups = groups[:: -1 if other in ("groups", "made") else 1]
        optimizer = (lambda _, groups=groups: torch.optim.SGD(groups, lr=0.1)) if what == "made" else None
        with pytest.raises(RankDisagreementError, match=message):
            ruda_ds.initialize(
                model=model,
                optimizer=optimizer or torch.optim.SGD(groups, lr=0.1),
                config=base_config(zero_optimization={"stage": stage}),
            )
    return True


@pytest.mark.parametrize("stage", [3, 2])
def test_ranks_that_differ_are_refused_at_the_start(stage):
    assert run_ranks(differing, 3, stage) == [True] * 3


def weighted(weights: list[float]):
    engine = make_engine(base_config(), model=Linear())
    plain = engine.accumulator
    accumulator = WeightedGradientAccumulator(engine)
    assert engine.accumulator is accumulator
    with pytest.raises(BindingError, match="closed"):
        plain.backward_sum(engine(torch.ones(1)).sum(), local_count=1)
    accumulator.backward_sum(engine(torch.tensor([3.0])).sum(), local_weight=weights[dist.get_rank()], local_count=2)
    with pytest.raises(CountError, match="weight"):
        accumulator.backward_sum(engine(torch.ones(1)).sum(), local_weight=-1.0, local_count=1)
    with pytest.raises(CountError, match="weight"):
        accumulator.backward_sum(engine(torch.ones(1)).sum(), local_count=1)
    state = accumulator.state
    mean = gather(accumulator, dict(accumulator.finish_mean().gradients))["w"].item()
    return state.global_weight, state.global_count, mean


def test_a_weight_divides_in_place_of_the_count():
    for weight, count, mean in run_ranks(weighted, 2, [0.5, 0.25]):
        assert (weight, count, mean) == (0.75, 4, 8.0)
    for weight, count, mean in run_ranks(weighted, 2, [0.0, 0.0]):
        assert (weight, count, mean) == (0.0, 4, 0.0)
