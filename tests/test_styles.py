"""The three ways in which people call DeepSpeed give one and the same window."""

import pytest
import torch
import torch.distributed as dist
from helpers import base_config, deal, full_parameters, local_batch, make_engine

from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import CountError, EmptyWindowError

MICROBATCHES = 3


def batches(engine, window):
    for shares in deal(23, MICROBATCHES, dist.get_world_size()):
        x, mask = local_batch(window, shares[dist.get_rank()], torch.float32)
        yield (engine(x) * mask).sum(), int(mask.sum())


def by_sum(engine, window):
    for loss, count in batches(engine, window):
        engine.accumulator.backward_sum(loss, local_count=count)
    return engine.accumulator.step()


def by_engine(engine, window):
    results = []
    for loss, count in batches(engine, window):
        engine.accumulator.count(count)
        assert engine.is_gradient_accumulation_boundary() == (len(results) == MICROBATCHES - 1)
        engine.backward(loss)
        results.append(engine.step())
    assert results[:-1] == [None] * (MICROBATCHES - 1)
    return results[-1]


def by_boundary(engine, window):
    for number, (loss, count) in enumerate(batches(engine, window)):
        last = number == MICROBATCHES - 1
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        engine.accumulator.count(count)
        engine.backward(loss)
        if last:
            result = engine.step()
    return result


STYLES = {"sum": by_sum, "engine": by_engine, "boundary": by_boundary}


def run(style: str):
    config = base_config(gradient_accumulation_steps=MICROBATCHES, gradient_clipping=0.5)
    engine = make_engine(config, optimizer=torch.optim.AdamW, lr=1e-2)
    results = [STYLES[style](engine, window) for window in range(2)]
    assert engine.accumulator.last_result == results[-1]
    return results, full_parameters(engine), engine.global_steps


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_styles_give_the_same_bits(world):
    runs = {style: run_ranks(run, world, style)[0] for style in STYLES}
    results, parameters, steps = runs["sum"]
    assert steps == 2
    assert results[0].clipped_norm == pytest.approx(0.5, rel=1e-5)
    for style in ("engine", "boundary"):
        assert runs[style][0] == results
        assert runs[style][2] == steps
        assert all(torch.equal(parameters[name], runs[style][1][name]) for name in parameters)


def changes_style():
    engine = make_engine(base_config(gradient_accumulation_steps=MICROBATCHES))
    return [STYLES[style](engine, window).count for window, style in enumerate(("engine", "sum", "boundary", "engine"))]


def test_each_window_may_have_its_own_style():
    assert len(run_ranks(changes_style, 2)[0]) == 4


def caller_owns():
    engine = make_engine(base_config(gradient_accumulation_steps=7, managed_gradient_accumulation=False))
    for loss, count in batches(engine, 0):
        engine.accumulator.count(count)
        engine.backward(loss)
    result = engine.step()
    assert result.microbatches == MICROBATCHES
    with pytest.raises(EmptyWindowError):
        engine.step()
    with pytest.raises(CountError, match="no count"):
        engine.backward(next(batches(engine, 0))[0])


def test_the_caller_may_own_the_boundary_and_must_count():
    run_ranks(caller_owns, 1)
