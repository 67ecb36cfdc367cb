"""The expert layer beside AutoEP's: 2 ranks, gloo, one thread each, whole layer forward + backward, interleaved.

    python tests/benchmarks/bench_moe_layer.py [--pairs 12] [--cases coarse-fp32,fine-bf16]

Both layers hold the same weights and get the same tokens; outputs and gradients are compared first. Each pair times
both, in alternating order; a layer's time is that of its slowest rank. Then ours runs alone: what share of its time is
not the experts' arithmetic, what a bare all-to-all-v of its rows would take, under the profiler how its time falls to
its phases, and the bytes that it sends to the other rank. Last line: JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import torch
import torch.distributed as dist

# name: tokens a rank, hidden, expert width, experts, top-k
CASES = {"coarse": (1024, 1024, 1024, 8, 2), "fine": (512, 1024, 512, 64, 8)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PHASES = ("router", "dispatch", "header", "exchange", "experts", "return", "combine")
# Relative difference by norm allowed between the two layers; both round, in different orders.
AGREE = {"fp32": 2e-5, "bf16": 3e-2}


def source_model(hidden: int, inner: int, experts: int, top_k: int):
    """A one-layer Qwen3-MoE, whose block both sides take."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=hidden,
        intermediate_size=inner,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=8,
        decoder_sparse_step=1,
    )
    return Qwen3MoeForCausalLM(config)


def autoep_layer(model):
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    config = parse_autoep_config({"enabled": True, "autoep_size": dist.get_world_size(), "use_grouped_mm": True})
    (spec,) = AutoEP(model, config).ep_parser()
    layer = AutoEPMoELayer(spec, model.model.layers[0].mlp, dist.get_world_size(), dist.get_rank(), config)
    layer.set_deepspeed_parallelism()
    return layer


def our_layer(model, experts: int):
    from ruda_ds.moe import ExpertOwnership, replace_moe_blocks

    replace_moe_blocks(model, ExpertOwnership.even(experts, dist.get_world_size()), group=dist.group.WORLD)
    return model.model.layers[0].mlp


def run(layer, x: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    """One forward and backward; gradients are left in place."""
    for parameter in layer.parameters():
        parameter.grad = None
    x.grad = None
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(upstream)
    return out


def timed(layer, x: torch.Tensor, upstream: torch.Tensor) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    run(layer, x, upstream)
    spent = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def check(ours, theirs, x: torch.Tensor, upstream: torch.Tensor, limit: float) -> None:
    results = []
    for layer in (ours, theirs):
        out = run(layer, x, upstream).detach().clone()
        experts = layer.moe.experts if layer is ours else layer.experts
        names = ("gate", "down", "up") if layer is ours else ("w1", "w2", "w3")
        results.append([out, x.grad.clone(), *(getattr(experts, name).grad.clone() for name in names)])
    for name, found, wanted in zip(("output", "x", "gate", "down", "up"), *results, strict=True):
        error = relative(found, wanted)
        assert error < limit, f"{name}: ours and AutoEP differ by {error}"


class ExpertsClock:
    """Seconds inside the experts of a layer: of their forward, and from their output's gradient to their input's."""

    def __init__(self, layer) -> None:
        self.forward = self.backward = self._began = 0.0
        self.handles = [
            layer.moe.experts.register_forward_pre_hook(self._before),
            layer.moe.experts.register_forward_hook(self._after),
        ]

    def _before(self, module, arguments):
        rows = arguments[0]
        if rows.requires_grad:
            rows.register_hook(self._stop)
        self._began = time.perf_counter()

    def _after(self, module, arguments, out):
        self.forward = time.perf_counter() - self._began
        if out.requires_grad:
            out.register_hook(self._start)

    def _start(self, gradient):
        self._began = time.perf_counter()

    def _stop(self, gradient):
        self.backward = time.perf_counter() - self._began


def clocked(layer, x: torch.Tensor, upstream: torch.Tensor, repeats: int) -> torch.Tensor:
    """[repeats, 3] seconds of this rank in the experts' forward, in their backward, and in all."""
    clock, taken = ExpertsClock(layer), []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        run(layer, x, upstream)
        taken.append((clock.forward, clock.backward, time.perf_counter() - began))
    for handle in clock.handles:
        handle.remove()
    return torch.tensor(taken, dtype=torch.float64)


def over_ranks(value: float, op=dist.ReduceOp.SUM) -> float:
    """Of all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, op=op)
    return total.item()


def not_experts(layer, x: torch.Tensor, upstream: torch.Tensor, repeats: int = 24) -> dict[str, float]:
    """Share of the layer's time that is not the experts' arithmetic, median of the repeats.

    "not_experts" is that of the slowest rank in each half: between the halves all ranks wait for it, and to wait for
    another's arithmetic is arithmetic. "idle_too" counts such waiting, as the mean of the ranks.
    """
    mine = clocked(layer, x, upstream, repeats)
    slowest, mean = mine.clone(), mine.clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    shares = {"not_experts": slowest, "idle_too": mean}
    return {name: round((1 - s[:, :2].sum(1) / s[:, 2]).median().item(), 3) for name, s in shares.items()}


def wire(layer, x: torch.Tensor, repeats: int = 12) -> float:
    """Seconds that torch's bare all-to-all-v takes for the rows that go to other ranks: there and back, and the
    gradients of both. What no layer over this group can go below."""
    with torch.no_grad():
        out = layer.moe.forward_detailed(x)
    sent, received = (
        [0 if p == dist.get_rank() else n for p, n in enumerate(c)] for c in (out.sent_rows, out.received_rows)
    )
    there = torch.empty(sum(sent), x.shape[-1], dtype=x.dtype)
    here = torch.empty(sum(received), x.shape[-1], dtype=x.dtype)
    taken = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(2):
            dist.all_to_all_single(here, there, received, sent)
            dist.all_to_all_single(there, here, sent, received)
        taken.append(over_ranks(time.perf_counter() - began, dist.ReduceOp.MAX))
    return statistics.median(taken)


def split_of(layer, x: torch.Tensor, upstream: torch.Tensor, repeats: int = 6) -> dict[str, float]:
    """Share of the layer's time by phase, forward and backward together, mean over the ranks.

    The experts' by hooks around them; the others' from the profiler, whose own cost is in them.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        *experts, whole = clocked(layer, x, upstream, repeats).sum(0).tolist()
    spent = dict.fromkeys(PHASES, 0.0)
    for event in trace.key_averages():
        name = event.key.removeprefix("ruda.").removeprefix("backward.")
        if name in spent and event.key.startswith("ruda."):
            spent[name] += event.cpu_time_total * 1e-6
    spent["experts"] = sum(experts)
    return {name: round(over_ranks(seconds / whole) / dist.get_world_size(), 3) for name, seconds in spent.items()}


def bytes_sent(layer, x: torch.Tensor, experts: int) -> int:
    """Bytes that this rank sends to others in forward and backward: rows and their gradients there and back, the
    status rows of the way back, one header."""
    with torch.no_grad():
        out = layer.moe.forward_detailed(x)
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = sum(rows for peer, rows in enumerate(out.sent_rows) if peer != rank)
    received = sum(rows for peer, rows in enumerate(out.received_rows) if peer != rank)
    row = x.shape[-1] * x.element_size()
    header = (experts - len(layer.moe.experts.ownership.range(rank)) + 5 * (world - 1)) * 8
    return 2 * (sent + received + world - 1) * row + header


def tokens_without_ties(router: torch.Tensor, tokens: int, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """[1, T, H] whose K best experts are clear: bf16 logits often tie, and each layer breaks ties in its own way."""
    x = torch.randn(tokens, router.shape[1], generator=generator).to(router.dtype)
    while True:
        best = torch.nn.functional.linear(x, router).float().topk(top_k + 1, -1).values
        tied = (best[:, -1] == best[:, -2]).nonzero().flatten()
        if not len(tied):
            return x.unsqueeze(0)
        x[tied] = torch.randn(len(tied), router.shape[1], generator=generator).to(router.dtype)


def measure(case: str, dtype: str, pairs: int) -> dict:
    tokens, hidden, inner, experts, top_k = CASES[case]
    model = source_model(hidden, inner, experts, top_k).to(DTYPES[dtype])
    theirs, ours = autoep_layer(copy.deepcopy(model)), our_layer(model, experts)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    x = tokens_without_ties(ours.moe.router.weight.detach(), tokens, top_k, generator).requires_grad_()
    upstream = torch.randn(1, tokens, hidden, generator=generator).to(DTYPES[dtype])
    check(ours, theirs, x, upstream, AGREE[dtype])
    times: dict[str, list[float]] = {"ours": [], "autoep": []}
    for pair in range(pairs + 1):
        order = [("ours", ours), ("autoep", theirs)]
        for name, layer in order if pair % 2 else reversed(order):
            times[name].append(timed(layer, x, upstream))
    ratios = [a / b for a, b in zip(times["ours"][1:], times["autoep"][1:], strict=True)]
    milliseconds = {name: round(1e3 * statistics.median(taken[1:]), 1) for name, taken in times.items()}
    return {
        "case": case,
        "dtype": dtype,
        "ours_ms": milliseconds["ours"],
        "autoep_ms": milliseconds["autoep"],
        "ratio": round(statistics.median(ratios), 3),
        "ratio_span": [round(min(ratios), 3), round(max(ratios), 3)],
        **not_experts(ours, x, upstream),
        "wire": round(1e3 * wire(ours, x) / milliseconds["ours"], 3),
        "shares": split_of(ours, x, upstream),
        "sent_bytes": bytes_sent(ours, x, experts),
    }


def rank_main(cases: list[str], pairs: int) -> list[dict]:
    rows = []
    for name in cases:
        rows.append(measure(*name.split("-"), pairs))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    from ruda_ds.cli.ranks import run_ranks

    every = [f"{case}-{dtype}" for case in CASES for dtype in DTYPES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--cases", default=",".join(every))
    args = parser.parse_args()
    rows = run_ranks(rank_main, 2, args.cases.split(","), args.pairs, timeout_s=1800)[0]
    print(
        "\ncase         ours ms  AutoEP ms  ratio  not experts (idle too)   wire   "
        + "  ".join(f"{name:>8}" for name in PHASES)
    )
    for row in rows:
        shares = "  ".join(f"{row['shares'][name]:8.3f}" for name in PHASES)
        print(
            f"{row['case'] + '-' + row['dtype']:12} {row['ours_ms']:7}  {row['autoep_ms']:9}  {row['ratio']:5}  "
            f"{row['not_experts']:11.3f} ({row['idle_too']:.3f})      {row['wire']:.3f}   {shares}"
        )
    print(json.dumps({"name": "moe_layer", "rows": rows, "worst_ratio": max(row["ratio"] for row in rows)}))


if __name__ == "__main__":
    main()
