"""Faults that people reported of experts, each with the outcome that is right."""

import pytest
import torch
import torch.distributed as dist
from helpers import base_config
from moe_helpers import alone, make_layer, relative, tokens
from test_moe_zero import Model, batches

import ruda_ds
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import ConfigError, OwnershipError
from ruda_ds.moe import (
    ExpertOwnership,
    ExpertParallelMoE,
    ExpertParallelSwiGLUExperts,
    ExpertPartitionContext,
    MoEOptions,
)
from ruda_ds.moe.router import choose, top_k_lowest_id


def outputs(prefix, dtype_name, backend):
    dtype = getattr(torch, dtype_name)
    layer = make_layer(prefix, dist.get_rank(), MoEOptions(top_k=3, backend=backend), dist.group.WORLD, dtype, 16, 8)
    x = tokens([6, 5], 16, dtype)[dist.get_rank()].requires_grad_()
    out = layer(x)
    out.float().sin().sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_ownership_of_the_same_ranks_gives_the_same_bits(dtype, backend):
    wanted = run_ranks(outputs, 2, [0, 4, 8], dtype, backend)
    for prefix in ([0, 1, 8], [0, 0, 8], [0, 7, 8]):
        for found, expected in zip(run_ranks(outputs, 2, prefix, dtype, backend), wanted, strict=True):
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])


def test_torchs_grouped_product_does_so_within_rounding():
    # What it computes for one expert depends in the last bit on how many others it is given.
    wanted = run_ranks(outputs, 2, [0, 4, 8], "float32", "grouped")
    for found, expected in zip(run_ranks(outputs, 2, [0, 1, 8], "float32", "grouped"), wanted, strict=True):
        assert relative(found[0], expected[0]) <= 1e-6
        assert relative(found[1], expected[1]) <= 1e-6


def expert_gradients(ep_size, threshold):
    """Whole pending gradients of the first layer's experts, by expert, after one micro-batch on 4 ranks."""
    rank = dist.get_rank()
    prefix = list(ExpertOwnership.even(8, ep_size).prefix)
    model = Model(prefix, rank % ep_size, 2)
    zero = {"stage3_param_persistence_threshold": threshold}
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=base_config(zero_optimization=zero),
    )
    for step in range(2):
        for batch in batches(step, 4, [2, 3, 0, 4]):
            engine.accumulator.backward_sum(engine(batch[rank]).sum(), local_count=len(batch[rank]))
        if step == 0:
            engine.accumulator.step()
    place = next(p for p in engine.accumulator.placement if p.name == "moe.0.experts.gate")
    shard = engine.accumulator.pending()[place.name]
    everyone = [None] * 4
    dist.all_gather_object(everyone, (place.experts or (0, 8), place.shard, shard.double()))
    whole = torch.zeros(8, 9, 12, dtype=torch.float64)
    for (start, stop), (begin, end), values in everyone:
        whole[start:stop].view(-1)[begin:end] = values
    return whole


@pytest.mark.parametrize("threshold", [0, 10_000])
def test_expert_gradients_do_not_depend_on_ep_size(threshold):
    """DeepSpeed#6545, #5618; #8379 with a low persistence threshold, two steps."""
    wanted = run_ranks(expert_gradients, 4, 1, threshold)[0]
    for ep_size in (2, 4):
        assert relative(run_ranks(expert_gradients, 4, ep_size, threshold)[0], wanted) <= 1e-5


def forced():
    """DeepSpeed#5066: every token to expert 0, three steps; the other experts' gradients are exactly zero."""
    model = Model([0, 3, 8], dist.get_rank(), 1)
    for layer in model.moe:
        layer.router.weight.data.zero_()
        layer.router.requires_grad_(False)  # equal logits: ties go to expert 0
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        config=base_config(),
    )
    for step in range(3):
        batch = batches(step, 2, [4, 3])[0][dist.get_rank()]
        engine.accumulator.backward_sum(engine(batch).sum(), local_count=len(batch))
        pending = engine.accumulator.pending()["moe.1.experts.gate"].view(-1, 9, 12)
        used = [bool(expert.abs().sum() > 0) for expert in pending]
        assert not engine.accumulator.step().skipped
    return used


def test_all_tokens_to_one_expert_under_zero3():
    assert run_ranks(forced, 2) == [[True, False, False], [False] * 5]


class Plain(torch.nn.Module):
    """A model that zero.Init partitions while it is made."""

    def __init__(self, full, rank):
        super().__init__()
        experts = ExpertParallelSwiGLUExperts.from_full(*full, ExpertOwnership([0, 3, 8]), rank)
        self.moe = ExpertParallelMoE(torch.nn.Linear(12, 8, bias=False), experts)


def made_under_zero_init():
    import deepspeed

    full = [torch.randn(8, 9, 12), torch.randn(8, 9, 12), torch.randn(8, 12, 9)]
    with deepspeed.zero.Init(config_dict_or_path=base_config()):
        model = Plain(full, dist.get_rank())
    with pytest.raises(ConfigError, match=r"zero\.Init"):
        ruda_ds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=base_config())
    return True


def test_experts_made_under_zero_init_are_refused():
    assert run_ranks(made_under_zero_init, 2) == [True, True]


def test_a_bias_changes_the_choice_and_not_the_weights():
    """DeepSpeed#8358."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    options = MoEOptions(top_k=1, renormalize=False)
    plain, weight = choose(logits, options)
    flipped, other = choose(logits, options, torch.tensor([0.0, 0.0, 0.0, 5.0]))
    assert (plain.tolist(), flipped.tolist()) == ([[0]], [[3]])
    assert torch.equal(torch.cat([weight, other], 1), logits.softmax(-1)[:, [0, 3]])


def test_ties_go_to_the_lower_expert_and_masked_groups_are_never_chosen():
    assert top_k_lowest_id(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), 2).tolist() == [[1, 2]]
    options = MoEOptions(top_k=2, selection="sigmoid_grouped", groups=2, selected_groups=1)
    experts, _ = choose(torch.tensor([[9.0, -9.0, 5.0, 5.0]]), options, torch.full((4,), -50.0))
    assert experts.tolist() == [[2, 3]]  # the better pair, though every score is negative


def test_tied_sources_give_one_leaf():
    cube, context = torch.nn.Parameter(torch.randn(4, 3, 5)), ExpertPartitionContext()
    ownership = ExpertOwnership([0, 1, 4])
    first = context.parameter(cube, ownership, 1)
    assert context.parameter(cube, ownership, 1) is first
    assert torch.equal(first, cube[1:])
    assert first.untyped_storage().nbytes() == 3 * 3 * 5 * 4
    with pytest.raises(OwnershipError, match="tied between"):
        context.parameter(cube, ownership, 0)
    with pytest.raises(OwnershipError, match="expected 5 experts"):
        context.parameter(cube, ExpertOwnership([0, 5]), 0)
    tied = ExpertParallelSwiGLUExperts.from_full(cube, cube, torch.randn(4, 5, 3), ownership, 1, context)
    assert tied.gate is tied.up is first


@pytest.mark.parametrize(
    ("prefix", "word"),
    [
        ([0], "at least two integers"),
        ([1, 8], "begins at 1"),
        ([0, 5, 3], "falls from 5 to 3 at rank 1"),
        ([0, 0], "ends at 0"),
        ([0, 2.5], "at least two integers"),
    ],
)
def test_prefixes_that_are_none_are_named(prefix, word):
    with pytest.raises(OwnershipError, match=word):
        ExpertOwnership(prefix)


def test_ownerships():
    ownership = ExpertOwnership([0, 3, 3, 8])
    assert [list(ownership.range(rank)) for rank in range(3)] == [[0, 1, 2], [], [3, 4, 5, 6, 7]]
    assert [ownership.owner(expert) for expert in range(8)] == [0] * 3 + [2] * 5
    assert ExpertOwnership.even(7, 4).prefix == (0, 2, 4, 6, 7)
    assert ExpertOwnership.even(3, 4).counts == (1, 1, 1, 0)
    for loads, world, expected in (([9, 1, 1, 1], 2, 9), ([1, 1, 1, 9], 2, 9), ([2, 2, 2, 2, 2], 2, 6), ([5], 3, 5)):
        balanced = ExpertOwnership.balanced(loads, world)
        assert balanced.world_size == world
        assert balanced.num_experts == len(loads)
        assert max(sum(loads[e] for e in balanced.range(rank)) for rank in range(world)) == expected
    for call in (lambda: ownership.range(3), lambda: ownership.owner(8), lambda: ExpertOwnership.balanced([-1.0], 2)):
        with pytest.raises(OwnershipError):
            call()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"top_k": 9}, "top_k is 9"),
        ({"top_k": 0}, "top_k is 0"),
        ({"groups": 3}, "groups=3"),
        ({"groups": 4, "selected_groups": 5}, "selected_groups is 5"),
        ({"selection": "best"}, "selection is 'best'"),
        ({"groups": 4, "selected_groups": 1, "top_k": 3}, "more than the 2 experts"),
    ],
)
def test_options_that_cannot_be_met_are_named(options, word):
    with pytest.raises(OwnershipError, match=word):
        MoEOptions(**options).check(8)


def skewed():
    """Megatron-LM#3626: no rows for the last rank, under activation checkpointing."""
    rank = dist.get_rank()
    layer = make_layer([0, 4, 8], rank, MoEOptions(top_k=1), dist.group.WORLD)
    reference = make_layer([0, 8], 0, MoEOptions(top_k=1), alone())
    for module in (layer, reference):
        module.router.weight.data.zero_()
        module.router.weight.data[0] = 1
    xs = [x.abs() for x in tokens([3, 2], 12, torch.float32)]
    mine, whole = xs[rank].clone().requires_grad_(), torch.cat(xs).requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, mine, use_reentrant=False).sin().sum().backward()
    reference(whole).sin().sum().backward()
    share = slice(0, 3) if rank == 0 else slice(3, 5)
    return relative(mine.grad, whole.grad[share]), layer.forward_detailed(mine).received_rows


def test_no_rows_for_the_last_rank_under_checkpointing():
    (first, rows), (second, none) = run_ranks(skewed, 2)
    assert max(first, second) <= 1e-6
    assert (rows, none) == ([3, 2], [0, 0])
