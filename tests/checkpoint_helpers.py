"""What the tests of checkpoints share: a mixture with a frozen weight, dealt unevenly, and its state to the bit."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers import base_config
from moe_helpers import make_layer

import ruda_ds
from ruda_ds import _deepspeed
from ruda_ds.moe import MoEOptions

HIDDEN = 12
PREFIX = [0, 3, 8]
MICROBATCHES = 4
OPTIONS = MoEOptions(top_k=2, balance_loss=0.05, z_loss=0.01)


class Mixture(torch.nn.Module):
    """Linear (frozen bias), experts with a selection bias around a residual, dropout, Linear; one loss a row."""

    def __init__(self, prefix: list[int], rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inlet = torch.nn.Linear(7, HIDDEN, dtype=dtype)
        self.inlet.bias.requires_grad_(False)
        self.moe = make_layer(prefix, rank, OPTIONS, dtype=dtype, bias=torch.zeros(prefix[-1]))
        self.dropout = torch.nn.Dropout(0.25)
        self.outlet = torch.nn.Linear(HIDDEN, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, 7] -> [n] float32."""
        x = torch.tanh(self.inlet(x))
        return self.outlet(self.dropout(x + self.moe(x))).float().pow(2).sum(-1)


def make(dtype: str = "float32", stage: int = 3, prefix: list[int] | None = None, other=False, **changes: object):
    """An engine over `Mixture` with AdamW in two groups and a schedule that moves at each step.

    ``other``: every weight, the frozen one and the selection bias included, begins at another value.
    """
    prefix = prefix or PREFIX
    kind = getattr(torch, dtype)
    model = Mixture(prefix, dist.get_rank() % (len(prefix) - 1), kind)
    for value in [*model.parameters(), model.moe.correction_bias] if other else ():
        value.data.add_(0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1 or p.numel() == 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1 and p.numel() > 1], "weight_decay": 0.0},
    ]
    settings = base_config(
        zero_optimization={"stage": stage, **changes.pop("zero_optimization", {})}, gradient_clipping=0.5, **changes
    )
    if kind == torch.bfloat16:
        settings["bf16"] = {"enabled": True}
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=0.02),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        config=settings,
    )
    return engine


def microbatch(engine, window: int, number: int) -> None:
    """One micro-batch of a window; a rank has no row in some of them."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * window + 10 * number + rank)
    count = (window + 3 * number + 2 * rank) % 5
    x = torch.randn(max(count, 1), 7, generator=generator).to(next(engine.module.parameters()).dtype)
    loss = engine(x).sum() if count else engine(x).sum() * 0
    engine.accumulator.backward_sum(loss, local_count=count)


def end(engine) -> list:
    """The window's step, with the biases moved by its exact counts; its report, to the bit."""
    from ruda_ds.moe import take_expert_counts, take_router_losses, update_correction_biases

    result = engine.accumulator.step()
    counts = take_expert_counts(engine.module)
    update_correction_biases(engine.module, counts, 0.05)
    router = take_router_losses(engine.module, counts)
    numbers = [result.loss, result.grad_norm, result.clipped_norm, *engine.get_lr(), *router.balance, *router.z]
    return [*(float(n).hex() for n in numbers), result.count, result.microbatches, result.untouched, counts.tolist()]


def run(engine, begin: tuple[int, int], windows: int) -> list:
    """Reports of the windows from ``begin`` (window, micro-batch) up to ``windows``."""
    reports = []
    for window in range(begin[0], windows):
        for number in range(begin[1] if window == begin[0] else 0, MICROBATCHES):
            microbatch(engine, window, number)
        reports.append(end(engine))
    return reports


def state(engine) -> dict[str, bytes]:
    """Everything that a run goes on from, as bytes, on this rank."""
    optimizer = _deepspeed.zero_optimizer(engine)
    found = {f"pending {n}": g for n, g in engine.accumulator.pending().items()}
    for name, parameter in engine.module.named_parameters():
        found[f"parameter {name}"] = getattr(parameter, "ds_tensor", parameter)
    found |= {f"buffer {name}": buffer for name, buffer in engine.module.named_buffers()}
    for number, values in enumerate(optimizer.optimizer.state.values()):
        found |= {f"moment {number} {key}": torch.as_tensor(value) for key, value in values.items()}
    masters = getattr(optimizer, "fp32_partitioned_groups_flat", None) or optimizer.single_partition_of_fp32_groups
    found |= {f"master {number}": master for number, master in enumerate(masters)}
    found["random"] = torch.get_rng_state()
    counters = (engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples)
    window = engine.accumulator.state
    text = f"{counters} {window} {engine.accumulator._loss} {engine.lr_scheduler.state_dict()}"
    raw = {name: value.detach().contiguous().flatten().view(torch.uint8) for name, value in found.items()}
    return {"counters": text.encode(), **{name: value.numpy().tobytes() for name, value in raw.items()}}


def differing(found: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    """Names that are not equal to the bit."""
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
