"""What leaves a window and comes back: contracts, ready-made sums, means in storage dtype; engines made elsewhere."""

import csv

import pytest
import torch
import torch.distributed as dist
from helpers import base_config, deal, fill, full_parameters, local_batch, make_engine, make_model, rows

import ruda_ds
from ruda_ds import AccumulationContract, AccumulationState, GradientAccumulator, WeightedGradientAccumulator
from ruda_ds.accumulation import inspect
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import PlacementError
from ruda_ds.monitor import window_events, write_window


def shares(microbatches=4):
    return deal(len(rows(0)[1]), microbatches, dist.get_world_size())


def feed(engine, tables):
    for table in tables:
        x, mask = local_batch(0, table[dist.get_rank()], torch.float32)
        engine.accumulator.backward_sum((engine(x) * mask).sum(), local_count=int(mask.sum()))


def interrupted(stage, dtype):
    """The parameters after a window: uninterrupted, and moved to a fresh engine after each micro-batch."""
    config = base_config(zero_optimization={"stage": stage}, ruda={"accumulation": {"dtype": dtype}})
    whole = make_engine(config)
    feed(whole, shares())
    result = whole.accumulator.step()
    outcomes = []
    for cut in range(5):
        first = make_engine(config)
        feed(first, shares()[:cut])
        contract = first.accumulator.contract()
        gradients = {name: shard.clone() for name, shard in first.accumulator.pending().items()}
        second = make_engine(config)
        accumulator = GradientAccumulator.from_contract(second, contract, gradients)
        inspect(second, contract.placement)
        feed(second, shares()[cut:])
        moved = accumulator.step()
        wanted, found = full_parameters(whole), full_parameters(second)
        outcomes.append(
            all(torch.equal(wanted[name], found[name]) for name in wanted)
            and (moved.count, moved.microbatches, moved.grad_norm) == (result.count, 4, result.grad_norm)
        )
    return outcomes


@pytest.mark.parametrize(
    ("world", "stage", "dtype"), [(1, 3, "float32"), (2, 3, "float32"), (3, 3, "float64"), (2, 2, "float32")]
)
def test_a_window_moved_to_a_fresh_engine_goes_on_bit_for_bit(world, stage, dtype):
    assert run_ranks(interrupted, world, stage, dtype) == [[True] * 5] * world


def ready_made():
    """The sums of one engine, given to another as they are, in two parts."""
    source = make_engine(base_config())
    fill(source, 0, 3)
    sums = source.accumulator.finish_sums()
    assert source.accumulator.state.microbatches == 0
    assert dict(source.accumulator.pending()) == {}
    target = make_engine(base_config())
    halves = {name: shard / 2 for name, shard in sums.gradients.items()}
    target.accumulator.accumulate_sum(halves, global_count=sums.state.global_count)
    target.accumulator.accumulate_sum(halves, global_count=0)
    twice = target.accumulator.finish_mean()
    fill(source, 0, 3)
    once = source.accumulator.finish_mean()
    assert (twice.state.microbatches, twice.state.global_count) == (2, once.state.global_count)
    target.accumulator.accumulate_sum(sums.gradients, global_count=7)
    result = target.accumulator.step()
    assert result.loss is None
    assert result.count == 7
    return all(torch.equal(once.gradients[name], twice.gradients[name]) for name in once.gradients)


def test_ready_made_sums_add_up():
    assert run_ranks(ready_made, 2) == [True, True]


def native():
    engine = make_engine(base_config(bf16={"enabled": True}), model=make_model().bfloat16())
    fill(engine, 0, 2, torch.bfloat16)
    wanted = {n: (g / engine.accumulator.state.divisor).bfloat16() for n, g in engine.accumulator.pending().items()}
    found = engine.accumulator.finish_native_mean().gradients
    return all(g.dtype == torch.bfloat16 and torch.equal(g, wanted[name]) for name, g in found.items())


def test_a_native_mean_has_the_parameters_dtype():
    assert run_ranks(native, 2) == [True, True]


def attached():
    """An engine that another library made; and a placement that does not fit it."""
    import deepspeed

    model = make_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05),
        config=base_config(gradient_accumulation_steps=3),
    )
    accumulator = ruda_ds.attach(engine)
    ours = make_engine(base_config(gradient_accumulation_steps=3))
    for made in (engine, ours):
        for table in shares(3):
            x, mask = local_batch(0, table[dist.get_rank()], torch.float32)
            made.accumulator.count(int(mask.sum()))
            made.backward((made(x) * mask).sum())
            made.step()
    wrong = tuple(
        p if p.name != "scale" else type(p)(**{**vars(p), "requires_grad": False}) for p in accumulator.placement
    )
    with pytest.raises(PlacementError, match="'scale': requires_grad is True, expected False"):
        inspect(engine, wrong)
    one, other = full_parameters(engine), full_parameters(ours)
    return all(torch.equal(one[name], other[name]) for name in one)


def test_an_engine_of_another_library():
    assert run_ranks(attached, 2) == [True, True]


def scaled():
    """A weighted window with a loss scale and float64 sums, over two windows."""
    engine = make_engine(base_config(ruda={"accumulation": {"dtype": "float64", "loss_scale": 16.0}}))
    accumulator = WeightedGradientAccumulator(engine)
    results = []
    for _ in range(2):
        for table in shares(2):
            x, mask = local_batch(0, table[dist.get_rank()], torch.float32)
            weights = mask * 0.25
            loss = (engine(x) * weights).sum()
            accumulator.backward_sum(loss, local_weight=float(weights.sum()), local_count=int(mask.sum()))
        assert isinstance(accumulator.contract(), AccumulationContract)
        assert isinstance(accumulator.state, AccumulationState)
        results.append(accumulator.step())
    plain = make_engine(base_config())
    fill(plain, 0, 2)
    wanted = plain.accumulator.step()
    return results[0].grad_norm / wanted.grad_norm, results[0].loss / wanted.loss, results[1].skipped


def test_equal_weights_give_the_token_mean():
    for norm, loss, skipped in run_ranks(scaled, 2):
        assert norm == pytest.approx(1, rel=1e-6)
        assert loss == pytest.approx(1, rel=1e-6)
        assert not skipped


def monitored(folder):
    config = base_config(csv_monitor={"enabled": True, "output_path": folder, "job_name": "run"})
    engine = make_engine(config)
    for _ in range(2):
        fill(engine, 0, 2)
        result = engine.accumulator.step()
        write_window(engine, result, {"speed": 3.5, "unknown": float("nan")})
    return [name for name, *_ in window_events(result, 2)]


def test_the_monitor_gets_each_finite_figure(tmp_path):
    names = run_ranks(monitored, 2, str(tmp_path))[0]
    assert {"Train/Window/loss", "Train/Window/tokens", "Train/Window/clipped_norm"} <= set(names)
    with (tmp_path / "run" / "Train_Window_speed.csv").open() as lines:
        assert [row[1] for row in csv.reader(lines)] == ["speed", "3.5", "3.5"]
    assert not (tmp_path / "run" / "Train_Window_unknown.csv").exists()


def pipelined():
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(layers=[torch.nn.Linear(7, 7)], num_stages=1, loss_fn=torch.nn.MSELoss())
    with pytest.raises(ruda_ds.errors.ConfigError, match="pipeline parallelism is not supported"):
        ruda_ds.initialize(model=model, config=base_config(zero_optimization={"stage": 1}))
    return True


def test_pipeline_modules_are_refused_by_name():
    assert run_ranks(pipelined, 1) == [True]
