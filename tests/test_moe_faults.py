"""One rank of an expert-parallel group is in trouble: all ranks get a right result or the same named error, in time."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import base_config
from moe_helpers import make_layer, tokens

import ruda_ds
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import ExpertProtocolError, RankDisagreementError, RankFailedError, RankLostError
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


def other_layer():
    """Rank 1 skips the first of two layers of the same shape."""
    rank = dist.get_rank()
    layers = torch.nn.ModuleList([layer_of(rank), layer_of(rank)])
    for number, layer in enumerate(layers):
        layer.number = number  # as chain_exchanges does
    x = tokens([4, 3], 12, torch.float32)[rank]
    layers[0](x)
    try:
        layers[rank](x)
    except ExpertProtocolError as error:
        return str(error)
    return None


def test_ranks_in_different_layers_are_told_apart():
    said = run_ranks(other_layer, 2, timeout_s=LIMIT_S)
    assert said[0] == said[1]
    assert "rank 1 of the expert-parallel group: it stands in expert layer 1, call 1" in said[0]
    assert "rank 0 in layer 0, call 2" in said[0]


class Dies(torch.nn.Module):
    """Experts that end rank 1's process, by a signal or by an exception that nobody catches, in forward or backward."""

    def __init__(self, inner, when, how):
        super().__init__()
        self.inner, self.when, self.how = inner, when, how
        for name in ("ownership", "rank", "dimensions", "dtype"):
            setattr(self, name, getattr(inner, name))

    def leave(self, *_):
        if dist.get_rank() != 1:
            return
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)  # what an uncaught exception comes to

    def forward(self, *arguments):
        if self.when == "in":
            self.leave()
        out = self.inner(*arguments)
        if self.when == "backward":
            out.register_hook(self.leave)
        return out


def dies(folder, when, how, engine):
    """Rank 1 of three dies; the survivors write down what they raise."""
    os.chdir(folder)  # where a watchdog leaves its file
    rank = dist.get_rank()
    layer = make_layer([0, 3, 4, 8], rank, MoEOptions(top_k=2), None if engine else dist.group.WORLD)
    layer.experts = Dies(layer.experts, when, how)
    x = tokens([4, 3, 2], 12, torch.float32)[rank]
    call, backward = layer, lambda loss: loss.backward()
    if engine:
        made, *_ = ruda_ds.initialize(
            model=layer, optimizer=torch.optim.SGD(layer.parameters(), lr=0.1), config=base_config()
        )
        call, backward = made, lambda loss: (made.accumulator.backward_sum(loss, 3), made.accumulator.step())
    if when == "before":
        layer.experts.leave()
    try:
        out = call(x)
        if when == "after":
            layer.experts.leave()
        backward(out.pow(2).sum())
    except Exception as error:
        said = f"lost {error.ranks}" if isinstance(error, RankLostError) else f"{type(error).__name__}: {error}"
        Path(f"said_{rank}").write_text(said)
        raise  # and so ends, as a program does that does not catch it


@pytest.mark.parametrize(
    ("when", "how"),
    [("before", "killed"), ("in", "killed"), ("in", "raises"), ("after", "raises"), ("backward", "killed")],
)
def test_a_rank_that_dies_is_named_by_every_survivor(tmp_path, when, how):
    """In a plain group and under a ZeRO-3 engine, at once: most of the time is that of waiting for an answer."""
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda engine: last_words(tmp_path / str(engine), when, how, engine), (False, True)))
    assert said == [{"said_0": "lost [1]", "said_2": "lost [1]"}] * 2


def last_words(folder, when, how, engine):
    """What the survivors said."""
    folder.mkdir()
    with pytest.raises(RankFailedError, match="rank 1 of 3 failed"):
        run_ranks(dies, 3, folder, when, how, engine, timeout_s=LIMIT_S, grace_s=LIMIT_S)
    return {path.name: path.read_text() for path in folder.glob("said_*")}


class Two(torch.nn.Module):
    """Two expert layers, called in an order of the caller's."""

    def __init__(self, prefix) -> None:
        super().__init__()
        rank = dist.get_rank() % (len(prefix) - 1)
        self.layers = torch.nn.ModuleList(make_layer(prefix, rank, MoEOptions(top_k=2)) for _ in range(2))

    def forward(self, x, order):
        for index in order:
            x = x + self.layers[index](x)
        return x


def other_exchanges(prefix, orders):
    """Each group of ranks calls the layers in its own order; in what the step finds them to differ, if it does."""
    model = Two(prefix)
    config = base_config(zero_optimization={"stage": 2})
    engine, *_ = ruda_ds.initialize(model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), config=config)
    group = dist.get_rank() // (len(prefix) - 1)
    x = tokens([4, 3, 2, 5], 12, torch.float32)[dist.get_rank()]
    with torch.no_grad():
        engine(x, [0] * group)  # what is no part of a gradient is a group's own affair
    engine.accumulator.backward_sum(engine(x, orders[group]).pow(2).sum(), 3)
    field = None
    try:
        engine.accumulator.step()
    except RankDisagreementError as error:
        field = error.field
        engine.accumulator.discard()
    engine.accumulator.backward_sum(engine(x, [1, 0]).pow(2).sum(), 3)
    return field, engine.accumulator.step().skipped


@pytest.mark.parametrize(
    ("orders", "field"),
    [([[0, 1], [0, 1, 0]], "expert exchanges"), ([[0, 1], [1, 0]], "expert exchanges (signature)")],
    ids=["more", "another order"],
)
def test_groups_that_exchanged_other_things_are_told_apart_at_the_step(orders, field):
    assert run_ranks(other_exchanges, 4, [0, 3, 8], orders) == [(field, False)] * 4


def test_ranks_that_exchange_with_nobody_call_their_layers_as_they_like():
    assert run_ranks(other_exchanges, 2, [0, 8], [[0, 1], [0, 1, 0]]) == [(None, False)] * 2


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
