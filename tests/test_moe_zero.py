"""Expert layers inside a ZeRO engine: three optimizer steps equal one process that holds all experts."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from helpers import base_config
from moe_helpers import alone, make_layer, relative

import ruda_ds
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.comm.scope import current_scope
from ruda_ds.moe import MoEOptions

HIDDEN = 12


class Model(torch.nn.Module):
    """Linear, two expert layers around residuals, Linear; one loss a token. ``skip`` leaves the second layer out."""

    def __init__(self, prefix, rank, top_k, group=None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inlet = torch.nn.Linear(7, HIDDEN)
        options = MoEOptions(top_k=top_k)
        self.moe = torch.nn.ModuleList(make_layer(prefix, rank, options, group, hidden=HIDDEN) for _ in range(2))
        self.outlet = torch.nn.Linear(HIDDEN, 3)

    def forward(self, x, skip=False):
        x = torch.tanh(self.inlet(x))
        x = x + self.moe[0](x)
        second = self.moe[1](x)
        return self.outlet(x if skip else x + second).pow(2).sum(-1)


def batches(step, world, counts):
    generator = torch.Generator().manual_seed(50 + step)
    return [[torch.randn(count, 7, generator=generator) for count in counts] for _ in range(2)]


def train(prefix, stage, top_k, counts, ep_size):
    """Relative errors of this rank's dense parameters and own experts after each of three steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model(prefix, rank % ep_size, top_k)
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        config=base_config(zero_optimization={"stage": stage}, gradient_clipping=0.5),
    )
    reference = Model([0, prefix[-1]], 0, top_k, alone())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    errors = []
    for step in range(3):
        total = 0
        optimizer.zero_grad()
        for microbatch in batches(step, world, counts):
            mine = microbatch[rank]
            engine.accumulator.backward_sum(engine(mine).sum(), local_count=len(mine))
            whole = torch.cat(microbatch)
            reference(whole).sum().backward()
            total += len(whole)
        result = engine.accumulator.step()
        assert result.count == total
        for parameter in reference.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= total
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        worst = abs(result.grad_norm - norm.item()) / norm.item()
        wanted = dict(reference.named_parameters())
        for name, parameter in engine.module.named_parameters():
            found = safe_get_full_fp32_param(parameter)
            if ".experts." in name:
                owned = model.moe[0].experts.ownership.range(rank % ep_size)
                if not owned:
                    continue
                expected = wanted[name][owned.start : owned.stop]
            else:
                expected = wanted[name]
            worst = max(worst, relative(found.reshape(-1), expected.reshape(-1)))
        errors.append(worst)
    return errors


@pytest.mark.parametrize(
    ("world", "prefix", "counts"),
    [
        (1, [0, 8], [5]),
        (2, [0, 4, 8], [5, 3]),
        (2, [0, 3, 8], [4, 0]),
        (2, [0, 0, 8], [4, 3]),
        (2, [0, 8, 8], [4, 3]),
        (3, [0, 4, 4, 8], [2, 3, 4]),
        (4, [0, 3, 8], [2, 3, 0, 4]),
        (4, [0, 0, 8], [2, 3, 1, 4]),
        (4, [0, 8], [2, 3, 1, 4]),
    ],
)
def test_three_steps_equal_one_process(world, prefix, counts):
    for errors in run_ranks(train, world, prefix, 3, 2, counts, len(prefix) - 1):
        assert max(errors) <= 1e-5, errors


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("world", "prefix", "counts"),
    [(2, [0, 3, 8], [4, 0]), (2, [0, 0, 8], [4, 3]), (3, [0, 4, 4, 8], [2, 3, 4]), (4, [0, 3, 8], [2, 3, 0, 4])],
)
def test_three_steps_below_stage_three(stage, world, prefix, counts):
    for errors in run_ranks(train, world, prefix, stage, 2, counts, len(prefix) - 1):
        assert max(errors) <= 1e-5, errors


def placements():
    model = Model([0, 0, 8], dist.get_rank(), 2)
    engine, *_ = ruda_ds.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=base_config()
    )
    return {p.name: (p.logical_shape, p.experts) for p in engine.accumulator.placement}


def test_a_rank_without_experts_shows_none():
    empty, full = run_ranks(placements, 2)
    assert empty["moe.0.experts.gate"] == ((0,), (0, 0))
    assert full["moe.0.experts.gate"] == ((8, 9, HIDDEN), (0, 8))


def leaves_out():
    """Rank 1's loss does not use the second layer."""
    rank = dist.get_rank()
    model = Model([0, 3, 8], rank, 2)
    engine, *_ = ruda_ds.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=base_config()
    )
    engine.accumulator.close()
    ruda_ds.attach(engine)  # a second accumulator must not nest a second scope
    inputs = batches(0, 2, [4, 5])[0]
    engine.accumulator.backward_sum(engine(inputs[rank], skip=rank == 1).sum(), local_count=4)
    reference = Model([0, 8], 0, 2, alone())
    (reference(inputs[0]).sum() + reference(inputs[1], skip=True).sum()).backward()
    assert current_scope() is None
    owned = model.moe[1].experts.ownership.range(rank)
    errors = []
    for name, shard in engine.accumulator.pending().items():
        wanted = dict(reference.named_parameters())[name].grad
        place = next(p for p in engine.accumulator.placement if p.name == name)
        wanted = wanted[owned.start : owned.stop] if place.experts else wanted
        errors.append(relative(shard, wanted.reshape(-1)[slice(*place.shard)]))
    return max(errors)


def test_a_loss_that_leaves_a_layer_out_does_not_hang():
    assert max(run_ranks(leaves_out, 2, timeout_s=60)) <= 1e-5


def counted(reentrant):
    """Global counts, however the ranks and checkpointing split the forward, and the bias that follows."""
    from ruda_ds.moe import expert_layers, take_expert_counts, update_correction_biases

    rank = dist.get_rank()
    layer = make_layer([0, 3, 8], rank, MoEOptions(top_k=2), dist.group.WORLD, bias=torch.zeros(8))
    reference = make_layer([0, 8], 0, MoEOptions(top_k=2), alone(), bias=torch.zeros(8))
    batches_ = [torch.randn(count, 12, generator=torch.Generator().manual_seed(9)) for count in (5, 3)]
    mine = batches_[rank].requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, mine, use_reentrant=reentrant).sum().backward()
    with torch.no_grad():
        layer(mine)
    out = reference.forward_detailed(torch.cat(batches_))
    counts = take_expert_counts(layer)
    assert counts.tolist() == [torch.bincount(out.selected_experts.flatten(), minlength=8).tolist()]
    assert take_expert_counts(layer).sum() == 0
    update_correction_biases(layer, counts, rate=0.5)
    assert expert_layers(layer) == [layer]
    wanted = [0.5 * ((count < 2) - (count > 2)) for count in counts[0].tolist()]
    layer.bfloat16()
    return layer.correction_bias.dtype == torch.float32 and layer.correction_bias.tolist() == wanted


@pytest.mark.parametrize("reentrant", [False, True])
def test_expert_counts_are_global_and_exact_and_move_the_bias(reentrant):
    assert run_ranks(counted, 2, reentrant) == [True, True]


def refused():
    from ruda_ds.errors import ConfigError, OwnershipError

    def start(**changes):
        model = Model([0, 3, 8], dist.get_rank(), 2)
        config = base_config(**changes)
        ruda_ds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)

    with pytest.raises(ConfigError, match="ExpertOwnership"):
        start(ruda={"experts": {"ep_size": 2, "ownership": [0, 4, 8]}})
    with pytest.raises(ConfigError, match="expected 3 numbers"):
        start(ruda={"experts": {"ep_size": 2, "ownership": [0, 8]}})
    with pytest.raises(OwnershipError, match="does not fit 8 experts"):
        start(ruda={"experts": {"ep_size": 2, "ownership": [0, 3, 9]}})
    start(ruda={"experts": {"ep_size": 2, "ownership": [0, 3, 8]}})

    model = Model([0, 3, 8], dist.get_rank(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    below = {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match="lr_scheduler as a callable"):
        ruda_ds.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=base_config(**below))
    config = base_config(**below, data_types={"grad_accum_dtype": "fp32"}, communication_data_type="fp32")
    stock, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with pytest.raises(ConfigError, match="make the engine with ruda_ds.initialize"):
        ruda_ds.attach(stock)
    return True


def test_what_does_not_fit_is_refused_at_start():
    assert run_ranks(refused, 2) == [True, True]


def from_config(kind):
    """A transformers model split by the config alone, trained for a step beside one process."""
    from test_moe_families import KINDS, tiny

    model, reference = tiny(kind), tiny(kind)
    experts = KINDS[kind].get("num_local_experts") or KINDS[kind]["n_routed_experts"]
    config = base_config(ruda={"experts": {"ep_size": 2, "ownership": [0, 2, experts]}})
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        config=config,
        model_parameters=None,
    )
    tokens = [torch.randint(50, (1, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    engine.accumulator.backward_sum(engine(tokens[dist.get_rank()]).logits.sin().sum(), local_count=9)
    result = engine.accumulator.step()
    (sum(reference(batch).logits.sin().sum() for batch in tokens) / 18).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9).item()
    return result.grad_norm / norm


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_the_config_splits_a_transformers_model(kind):
    for ratio in run_ranks(from_config, 2, kind):
        assert ratio == pytest.approx(1, rel=1e-5)
