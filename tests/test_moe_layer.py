"""The layer on several ranks against one process that holds all experts: outputs and every gradient."""

import pytest
import torch
import torch.distributed as dist
from moe_helpers import alone, make_layer, relative, tokens

from ruda_ds.cli.ranks import run_ranks
from ruda_ds.moe import MoEOptions

SOFTMAX = MoEOptions(top_k=2)
GROUPED = MoEOptions(top_k=2, selection="sigmoid_grouped", scoring="sigmoid", groups=2, selected_groups=1, scale=1.7)


def loss_of(output: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return (output.sin() * (1 + torch.arange(output.shape[-1], dtype=output.dtype))).sum() + 0.1 * logits.pow(2).sum()


def compare(prefix, options, dtype_name, counts, forced, bias=None):
    """Largest relative errors of this rank's share against the reference, which every rank computes for itself.

    Where the ownership is of fewer ranks than there are, each group of so many ranks has all experts.
    """
    dtype = getattr(torch, dtype_name)
    rank, ep_size = dist.get_rank(), len(prefix) - 1
    bias = None if bias is None else torch.tensor(bias)
    groups = [dist.new_group(range(first, first + ep_size)) for first in range(0, dist.get_world_size(), ep_size)]
    group = groups[rank // ep_size]
    layer = make_layer(prefix, rank % ep_size, options, group, dtype, bias=bias)
    reference = make_layer([0, prefix[-1]], 0, options, alone(), dtype, bias=bias)
    if forced:  # everybody's tokens to expert 0
        for module in (layer, reference):
            module.router.weight.data.zero_()
            module.router.weight.data[0] = 1
    batches = tokens(counts, 12, dtype)
    if forced:
        batches = [batch.abs() for batch in batches]
    mine = batches[rank].clone().requires_grad_()
    whole = torch.cat(batches).requires_grad_()
    out = layer.forward_detailed(mine)
    loss_of(out.output, out.router_logits).backward()
    wanted = reference.forward_detailed(whole)
    loss_of(wanted.output, wanted.router_logits).backward()
    begin = sum(counts[:rank])
    share = slice(begin, begin + counts[rank])
    errors = {
        "output": relative(out.output, wanted.output[share]),
        "input": relative(mine.grad, whole.grad[share]),
        "choices": float(not torch.equal(out.selected_experts, wanted.selected_experts[share])),
    }
    router = layer.router.weight.grad.clone() if layer.router.weight.grad is not None else torch.zeros(())
    dist.all_reduce(router)
    errors["router"] = relative(router, reference.router.weight.grad)
    owned = layer.experts.ownership.range(rank % ep_size)
    holders = [dist.new_group(range(place, dist.get_world_size(), ep_size)) for place in range(ep_size)]
    for name in ("gate", "up", "down") if owned else ():
        found = getattr(layer.experts, name).grad
        expected = getattr(reference.experts, name).grad[owned.start : owned.stop]
        found = torch.zeros_like(expected) if found is None else found
        dist.all_reduce(found, group=holders[rank % ep_size])  # over those that hold a copy
        errors[name] = relative(found, expected)
    if sum(out.sent_rows) != counts[rank] * options.top_k or len(out.received_rows) != ep_size:
        errors["rows"] = 1.0
    return errors


CASES = [
    ([0, 4, 8], [5, 3]),
    ([0, 3, 8], [4, 0]),
    ([0, 0, 8], [6, 5]),
    ([0, 8, 8], [0, 7]),
    ([0, 2, 5, 8], [3, 4, 2]),
    ([0, 0, 4, 8], [5, 0, 4]),
    ([0, 4, 4, 8], [1, 2, 3]),
    ([0, 2, 4, 6, 8], [2, 3, 0, 4]),
    ([0, 0, 0, 1, 8], [2, 2, 2, 2]),
]


@pytest.mark.parametrize(("prefix", "counts"), CASES)
@pytest.mark.parametrize("options", [SOFTMAX, GROUPED], ids=["softmax", "grouped"])
def test_any_ownership_equals_one_process(prefix, counts, options):
    for dtype, bound in (("float64", 1e-12), ("float32", 1e-5)):
        for errors in run_ranks(compare, len(prefix) - 1, prefix, options, dtype, counts, False):
            assert max(errors.values()) <= bound, errors


@pytest.mark.parametrize(
    ("prefix", "top_k"),
    [([0, 3, 5], 2), ([0, 2, 4, 6, 7], 2), ([0, 1, 2, 3, 3], 1), ([0, 4, 5], 1), ([0, 3, 8], 1), ([0, 3, 8], 8)],
)
def test_odd_numbers_of_experts_and_of_choices(prefix, top_k):
    counts = [4, 0, 3, 2][: len(prefix) - 1]
    for errors in run_ranks(compare, len(prefix) - 1, prefix, MoEOptions(top_k=top_k), "float64", counts, False):
        assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("selection", ["softmax", "sigmoid_grouped"])
def test_two_groups_of_two_ranks(selection, top_k):
    options = MoEOptions(top_k=top_k, selection=selection, scoring="sigmoid" if top_k == 2 else "softmax")
    for prefix in ([0, 3, 8], [0, 0, 8]):
        for errors in run_ranks(compare, 4, prefix, options, "float64", [2, 0, 3, 4], False):
            assert max(errors.values()) <= 1e-12, errors


def test_all_tokens_to_one_expert():
    for errors in run_ranks(compare, 3, [0, 3, 3, 8], MoEOptions(top_k=1), "float64", [4, 5, 0], True):
        assert max(errors.values()) <= 1e-12, errors


def test_a_bias_that_turns_the_choice():
    bias = [0.0, 9.0, 0, 0, 0, 0, 0, 9.0]
    for errors in run_ranks(compare, 2, [0, 3, 8], SOFTMAX, "float64", [4, 5], False, bias):
        assert max(errors.values()) <= 1e-12, errors
