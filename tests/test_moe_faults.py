"""One rank of an expert-parallel group is in trouble: all ranks get a right result or the same named error, in time."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from moe_helpers import make_layer, tokens

from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import ExpertProtocolError, RankFailedError
from ruda_ds.moe import MoEOptions

LIMIT_S = 20


def layer_of(rank, **changes):
    return make_layer([0, 3, 8], rank, MoEOptions(top_k=2), dist.group.WORLD, **changes)


def wrong_input(kind):
    """Rank 1's input does not fit; what each rank raises."""
    rank = dist.get_rank()
    layer = layer_of(rank)
    x = tokens([4, 3], 12, torch.float32)[rank]
    if rank == 1:
        x = {"width": x[:, :5], "dtype": x.double(), "type": [1, 2]}[kind]
    try:
        layer(x)
    except ExpertProtocolError as error:
        return error.rank, error.reason
    return None


@pytest.mark.parametrize("kind", ["width", "dtype", "type"])
def test_a_wrong_input_is_named_on_every_rank(kind):
    found = run_ranks(wrong_input, 2, kind, timeout_s=LIMIT_S)
    assert found[0] == found[1]
    assert found[0][0] == 1
    assert "input does not fit" in found[0][1]


def not_finite():
    rank = dist.get_rank()
    layer = make_layer([0, 3, 8], rank, MoEOptions(top_k=2, check_finite=True), dist.group.WORLD)
    x = tokens([4, 3], 12, torch.float32)[rank]
    if rank == 1:
        x[2, 5] = float("nan")
    try:
        layer(x)
    except ExpertProtocolError as error:
        return error.rank, error.reason
    return None


def test_an_input_that_is_not_finite_is_named_if_asked():
    assert run_ranks(not_finite, 2, timeout_s=LIMIT_S) == [(1, "its input holds NaN or Inf")] * 2


class Fails(torch.nn.Module):
    """A router, or experts, that raise on rank 1."""

    def __init__(self, inner, error):
        super().__init__()
        self.inner, self.error = inner, error
        for name in ("ownership", "rank", "dimensions", "dtype"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def forward(self, *arguments):
        if dist.get_rank() == 1:
            raise self.error
        return self.inner(*arguments)


def raises(where):
    rank = dist.get_rank()
    layer = layer_of(rank)
    error = MemoryError("no memory") if where == "experts" else RuntimeError("the router's own reason")
    setattr(layer, where, Fails(getattr(layer, where), error))
    x = tokens([4, 3], 12, torch.float32)[rank]
    try:
        layer(x)
    except ExpertProtocolError as found:
        again = layer_of(rank)(x).sum().item()  # the group still works
        return found.rank, found.reason, repr(found.__cause__ or found.__context__), again == again
    return None


@pytest.mark.parametrize(("where", "reason"), [("router", "raised an error"), ("experts", "out of memory")])
def test_a_rank_that_raises_before_or_in_the_exchange_is_named_on_every_rank(where, reason):
    found = run_ranks(raises, 2, where, timeout_s=LIMIT_S)
    for rank, said, _, works in found:
        assert rank == 1
        assert reason in said
        assert works
    assert ("own reason" if where == "router" else "no memory") in found[1][2]


def without_gradients():
    rank = dist.get_rank()
    layer = layer_of(rank)
    x = tokens([4, 3], 12, torch.float32)[rank]
    with torch.set_grad_enabled(rank == 0):
        try:
            layer(x)
        except ExpertProtocolError as error:
            return error.rank, error.reason
    return None


def test_a_rank_under_no_grad_among_ranks_that_train_is_named():
    found = run_ranks(without_gradients, 2, timeout_s=LIMIT_S)
    assert found[0] == found[1]
    assert found[0][0] == 1
    assert "no_grad" in found[0][1]


def untracked():
    """Rank 1's input is a constant; its experts and rank 0's input get their gradients all the same."""
    rank = dist.get_rank()
    layer = layer_of(rank)
    x = tokens([4, 3], 12, torch.float32)[rank]
    if rank == 0:
        x.requires_grad_()
    layer(x).pow(2).sum().backward()
    return [bool(p.grad is not None and p.grad.abs().sum() > 0) for p in layer.experts.parameters()]


def test_an_input_that_is_not_tracked_on_one_rank():
    assert run_ranks(untracked, 2, timeout_s=LIMIT_S) == [[True] * 3] * 2


def inference():
    rank = dist.get_rank()
    layer = layer_of(rank)
    x = tokens([4, 0], 12, torch.float32)[rank]
    trained = layer(x)
    with torch.no_grad():
        out = layer(x)
    return torch.equal(trained, out), out.requires_grad


def test_inference_runs_the_same_path_and_saves_nothing():
    assert run_ranks(inference, 2, timeout_s=LIMIT_S) == [(True, False)] * 2


def dies():
    rank = dist.get_rank()
    layer = layer_of(rank)
    x = tokens([4, 3], 12, torch.float32)[rank]
    layer(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    layer(x)


def test_a_killed_rank_ends_the_others():
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=r"exit code -9|ExpertProtocolError"):
        run_ranks(dies, 2, timeout_s=LIMIT_S)
    assert time.monotonic() - began < LIMIT_S


def checkpointed(kind):
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    counts = [5, 0]
    results = []
    for recompute in (False, True):
        layers = [layer_of(rank), layer_of(rank)]
        x = tokens(counts, 12, torch.float32)[rank].requires_grad_()
        hidden = x
        for layer in layers:
            step = checkpoint(layer, hidden, use_reentrant=kind == "reentrant") if recompute else layer(hidden)
            hidden = hidden + step
        hidden.pow(2).sum().backward()
        results.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_activation_checkpointing_replays_the_exchanges_in_order(kind):
    assert run_ranks(checkpointed, 2, kind, timeout_s=LIMIT_S) == [True, True]
