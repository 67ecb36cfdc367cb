"""LoRA on experts: trained under ZeRO-3 with a frozen base as in one process; merged, the same forward."""

import pytest
import torch
import torch.distributed as dist
from helpers import base_config
from moe_helpers import alone, make_layer, relative, tokens

import ruda_ds
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import OwnershipError
from ruda_ds.moe import LoRAExperts, MoEOptions


def adapted(prefix, rank, group, inner=9, targets=("gate", "up", "down")):
    """A layer whose experts carry adapters that depend on the seed only; the router is frozen too."""
    layer = make_layer(prefix, rank, MoEOptions(top_k=2), group, inner=inner)
    layer.router.requires_grad_(False)
    whole = LoRAExperts(make_layer([0, prefix[-1]], 0, MoEOptions(top_k=2), inner=inner).experts, 3, 6.0, 0.0, targets)
    mine = LoRAExperts(layer.experts, 3, 6.0, 0.0, targets)
    generator = torch.Generator().manual_seed(5)
    owned = mine.ownership.range(rank)
    for target in targets:
        for factors, full in ((mine.down_factors, whole.down_factors), (mine.up_factors, whole.up_factors)):
            full[target].data.normal_(generator=generator)
            if owned:
                factors[target].data.copy_(full[target].data[owned.start : owned.stop])
    layer.experts = mine
    return layer


class Net(torch.nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.moe = adapted(*arguments)

    def forward(self, x):
        return self.moe(x).sin().sum()


def train(prefix, stage):
    rank = dist.get_rank()
    model = Net(prefix, rank, None)
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=torch.optim.SGD(trainable, lr=0.1),
        config=base_config(zero_optimization={"stage": stage}),
    )
    batches = tokens([4, 3], 12, torch.float32)
    engine.accumulator.backward_sum(engine(batches[rank]), local_count=len(batches[rank]))
    reference = Net([0, prefix[-1]], 0, alone())
    reference(torch.cat(batches)).backward()
    wanted = dict(reference.named_parameters())
    owned = prefix[rank], prefix[rank + 1]
    errors, trained = [], []
    for place in engine.accumulator.placement:
        if place.requires_grad:
            trained.append(place.name)
            if owned[0] < owned[1]:
                shard = engine.accumulator.pending()[place.name]
                gradient = wanted[place.name].grad[owned[0] : owned[1]].reshape(-1)
                errors.append(relative(shard, gradient[slice(*place.shard)]))
    result = engine.accumulator.step()
    return max(errors, default=0.0), all("factors" in name for name in trained), result.skipped


@pytest.mark.parametrize("prefix", [[0, 3, 8], [0, 0, 8]])
def test_adapters_train_under_zero3_with_a_frozen_base(prefix):
    for error, only_factors, skipped in run_ranks(train, 2, prefix, 3):
        assert error <= 1e-5
        assert only_factors
        assert not skipped


def merged():
    rank = dist.get_rank()
    errors = []
    for inner, targets in ((9, ("gate", "up", "down")), (4, ("down",)), (4, ("gate", "up"))):  # 2F < H too
        layer = adapted([0, 3, 8], rank, dist.group.WORLD, inner, targets)
        x = tokens([4, 3], 12, torch.float32)[rank]
        before = layer(x)
        original = layer.experts.base.down.clone()
        layer.experts.merge()
        errors.append(relative(layer(x), before))
        with pytest.raises(OwnershipError, match="merged already"):
            layer.experts.merge()
        layer.experts.unmerge()
        errors.append(relative(layer(x), before))
        errors.append(relative(layer.experts.base.down, original))
    return max(errors)


def test_merged_equals_adapted_and_unmerged_equals_before():
    assert max(run_ranks(merged, 2)) <= 2e-6


def test_options_out_of_range_are_named():
    base = make_layer([0, 4], 0, MoEOptions(top_k=2)).experts
    for wrong in ({"rank": 0}, {"dropout": 1.0}, {"targets": ("gate", "side")}, {"targets": ()}):
        with pytest.raises(OwnershipError, match="adapter rank is"):
            LoRAExperts(base, **wrong)


def test_dropout_acts_in_training_only():
    experts = LoRAExperts(make_layer([0, 4], 0, MoEOptions(top_k=2)).experts, 2, 4.0, dropout=0.5)
    torch.nn.init.ones_(experts.up_factors["down"])
    rows, offsets = torch.randn(8, 12), torch.tensor([0, 2, 4, 6, 8])
    assert not torch.equal(experts(rows, offsets), experts(rows, offsets))
    experts.eval()
    assert torch.equal(experts(rows, offsets), experts(rows, offsets))
