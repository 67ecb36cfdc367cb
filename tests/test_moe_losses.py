"""The router's own losses are those of one process, whatever the ranks, the micro-batches and checkpointing."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import base_config
from moe_helpers import alone, make_layer, relative
from torch.utils.checkpoint import checkpoint

import ruda_ds
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import OwnershipError
from ruda_ds.moe import MoEOptions, replace_moe_blocks, take_expert_counts, take_router_losses

BALANCE, Z = 0.3, 0.05
OPTIONS = {
    "softmax": MoEOptions(top_k=2, balance_loss=BALANCE, z_loss=Z),
    "sigmoid": MoEOptions(top_k=2, selection="sigmoid_grouped", scoring="sigmoid", balance_loss=BALANCE, z_loss=Z),
}


class Net(torch.nn.Module):
    """An expert layer around a residual; one loss a token."""

    def __init__(self, prefix, rank, options, group=None, recompute=None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inlet = torch.nn.Linear(5, 12)
        self.moe = make_layer(prefix, rank, options, group)
        self.recompute = recompute

    def forward(self, x):
        x = self.inlet(x)
        if self.recompute is not None:
            return (x + checkpoint(self.moe, x, use_reentrant=self.recompute)).sin().sum()
        return (x + self.moe(x)).sin().sum()


def inputs(window):
    return torch.randn(9, 5, generator=torch.Generator().manual_seed(70 + window))


def formula(net, x, shares):
    """The loss sum with the router's losses written out, of one process, and (balance, z) sums for the report."""
    hidden = net.inlet(x)
    out = net.moe.forward_detailed(hidden)
    if net.moe.options.scoring == "softmax":
        probabilities = out.router_logits.softmax(-1)
    else:
        probabilities = out.router_logits.sigmoid() / out.router_logits.sigmoid().sum(-1, keepdim=True)
    z = out.router_logits.exp().sum(-1).log().pow(2).sum()
    aux = BALANCE * 8 * (probabilities * shares).sum() + Z * z
    counts = torch.bincount(out.selected_experts.flatten(), minlength=8)
    report = 8 * (counts / len(x) * probabilities.mean(0)).sum().item(), z.item() / len(x)
    return (hidden + out.output).sin().sum() + aux, counts / len(x), report


def two_windows(kind, splits, recompute, scale):
    """Errors of gradients and reports against the formula; ``splits[rank]`` are the rows of each micro-batch."""
    rank = dist.get_rank()
    net = Net([0, 3, 8] if dist.get_world_size() == 2 else [0, 8], rank, OPTIONS[kind], recompute=recompute)
    config = base_config(ruda={"accumulation": {"loss_scale": scale}})
    engine, *_ = ruda_ds.initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.0), config=config)
    plain = replace(OPTIONS[kind], balance_loss=0.0, z_loss=0.0)
    reference, shares = Net([0, 8], 0, plain, alone()), torch.full((8,), 2 / 8)
    worst = 0.0
    for window in range(2):
        x = inputs(window)
        for rows in splits[rank]:
            engine.accumulator.backward_sum(engine(x[slice(*rows)]), local_count=rows[1] - rows[0])
        reference.zero_grad()
        loss, shares, wanted = formula(reference, x, shares)
        loss.backward()
        grads, places = dict(reference.named_parameters()), {p.name: p for p in engine.accumulator.placement}
        owned = engine.module.moe.experts.ownership.range(rank)
        for name, shard in engine.accumulator.pending().items():
            grad = grads[name].grad
            grad = grad[owned.start : owned.stop] if places[name].experts else grad
            worst = max(worst, relative(shard / scale, grad.reshape(-1)[slice(*places[name].shard)]))
        engine.accumulator.step()
        report = take_router_losses(engine.module, take_expert_counts(engine.module))
        worst = max(worst, abs(report.balance[0] - wanted[0]), abs(report.z[0] - wanted[1]))
    return worst


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("splits", "recompute", "scale"),
    [
        ([[(0, 9)]], None, 1.0),
        ([[(0, 2), (2, 9)]], None, 8.0),
        ([[(0, 4), (4, 5)], [(5, 9), (9, 9)]], None, 8.0),
        ([[(0, 7)], [(7, 9)]], False, 1.0),
        ([[(0, 7)], [(7, 9)]], True, 1.0),
    ],
    ids=["one process", "two micro-batches", "uneven ranks, one empty", "checkpointing", "reentrant checkpointing"],
)
def test_gradients_and_reports_are_those_of_the_formula(kind, splits, recompute, scale):
    assert max(run_ranks(two_windows, len(splits), kind, splits, recompute, scale)) <= 1e-5


def test_an_unused_coefficient_is_refused():
    with pytest.raises(OwnershipError, match="balance_loss is -1"):
        MoEOptions(balance_loss=-1).check(8)
    with pytest.raises(OwnershipError, match="z_loss is inf"):
        MoEOptions(z_loss=float("inf")).check(8)


def test_a_models_own_auxiliary_loss_is_refused_and_the_coefficients_reach_every_layer():
    from test_moe_families import tiny

    model = tiny("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(OwnershipError, match="pass balance_loss=0.001 instead"):
        replace_moe_blocks(model, [0, 4], rank=0)
    model.config.output_router_logits = False
    replace_moe_blocks(model, [0, model.config.num_local_experts], rank=0, balance_loss=0.01, z_loss=0.001)
    layers = ruda_ds.moe.expert_layers(model)
    assert layers
    assert {(layer.options.balance_loss, layer.options.z_loss) for layer in layers} == {(0.01, 0.001)}
