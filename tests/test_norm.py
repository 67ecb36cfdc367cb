"""measure_gradient_norm over ranks: nothing counted twice, nothing lost, bad gradients named."""

import math

import pytest
import torch
import torch.distributed as dist

from ruda_ds.accumulation import clip_gradient_norm, measure_gradient_norm
from ruda_ds.cli.ranks import run_ranks


def uneven():
    rank = dist.get_rank()
    partitions = {"a": torch.arange(3.0) + rank, "own": torch.ones(rank)} if rank < 2 else {}
    norm = measure_gradient_norm(partitions)
    replicated = measure_gradient_norm({"x": torch.full((5,), 2.0), "y": torch.ones(1)}, replicas={"x": 3, "y": 1})
    clip_gradient_norm(partitions, norm, max_norm=norm.value / 2, epsilon=0.0)
    return norm.value, replicated.value, measure_gradient_norm(partitions).value


def test_ranks_may_hold_different_names_or_none():
    for norm, replicated, halved in run_ranks(uneven, 3):
        assert norm == pytest.approx(math.sqrt(0 + 1 + 4 + 1 + 4 + 9 + 1), rel=1e-15)
        assert replicated == pytest.approx(math.sqrt(20 + 3), rel=1e-15)
        assert halved == pytest.approx(norm / 2, rel=1e-6)


def bad():
    shard = torch.tensor([1.0, math.inf if dist.get_rank() == 1 else 2.0])
    norm = measure_gradient_norm({"fine": torch.ones(2), "spoilt": shard})
    with pytest.raises(ValueError, match="'spoilt' on rank 1"):
        clip_gradient_norm({"spoilt": shard}, norm, 1.0)
    with pytest.raises(ValueError, match="replicas of parameter 'w' is 0"):
        measure_gradient_norm({"w": shard}, replicas=0)
    with pytest.raises(ValueError, match="no entry for parameter 'w'"):
        measure_gradient_norm({"w": shard}, replicas={})
    return [(found.parameter, found.rank) for found in norm.nonfinite], math.isnan(norm.value)


def test_what_is_not_finite_is_named_on_every_rank():
    assert run_ranks(bad, 2) == [([("spoilt", 1)], True)] * 2


def tiny_and_huge():
    values = {"w": torch.tensor([1e-30, 3e38][dist.get_rank()]).reshape(1)}
    doubles = {"w": torch.tensor([1e-200, 1e-180][dist.get_rank()], dtype=torch.float64).reshape(1)}
    return measure_gradient_norm(values).value, measure_gradient_norm(doubles).value


def test_no_overflow_and_no_underflow():
    for single, double in run_ranks(tiny_and_huge, 2):
        assert single == pytest.approx(3e38, rel=1e-6)
        assert double == pytest.approx(1e-180, rel=1e-12)
