"""What a training step holds and sends, from a model's shapes: the arithmetic behind `ruda-report --plan`.

Letters: W ranks, P ranks that share the experts, D = W / P ranks that hold the same experts, S tokens a row, B rows a
micro-batch, G micro-batches a window, N MoE layers, K experts a token, E experts, H hidden width, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ruda_ds.comm.exchange import FIXED_FIELDS
from ruda_ds.errors import ConfigError

WIRE, MASTER, MOMENTS, SUMS = 4, 4, 8, 4  # bytes an element: gradients on the wire; float32 master, Adam's two, sums
TOTALS = 32  # bytes of a micro-batch's counts and loss; see accumulation/totals.py
# Elements that DeepSpeed keeps gathered from the forward to the backward (stage3_max_live_parameters, its default).
MAX_LIVE = 10**9


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        dense: elements of each parameter outside of routed experts.
        cubes: elements of each routed-expert parameter, of all E experts, one entry a parameter.
        hidden, experts, top_k, expert_width: H, E, K, F; the last three 0 without experts.
        layers, moe_layers: decoder blocks; those with experts, N.
        attention_width: query heads times their width.
        vocabulary: entries of the output.
        inner: what a dense block's MLP saves a token, in elements, over H.
    """

    dense: Sequence[int]
    cubes: Sequence[int]
    hidden: int
    layers: int
    moe_layers: int
    experts: int
    top_k: int
    expert_width: int
    attention_width: int
    vocabulary: int
    inner: int

    @property
    def total(self) -> int:
        """Parameters of the whole model."""
        return sum(self.dense) + sum(self.cubes)

    @property
    def active(self) -> float:
        """Parameters that one token uses."""
        return sum(self.dense) + (sum(self.cubes) * self.top_k / self.experts if self.experts else 0)


@dataclass(frozen=True)
class Run:
    """How it is trained.

    Attributes:
        world, ep_size: W, P.
        rows, length, micro_batches: B, S, G.
        element: bytes of a parameter and of an activation, 2 in bfloat16.
        checkpointing: whether each block is recomputed in the backward.
    """

    world: int
    ep_size: int
    rows: int
    length: int
    micro_batches: int
    element: int = 2
    checkpointing: bool = False


@dataclass(frozen=True)
class Traffic:
    """A collective in one window.

    Attributes:
        name: of the collective and what for.
        given: bytes that a rank hands to it, the mean over ranks.
        sent: bytes that leave a rank by it, where a ring or a direct exchange carries it and routing is even.
        group: ranks that take part.
    """

    name: str
    given: float
    sent: float
    group: int


def check(shape: Shape, run: Run) -> None:
    """Raise ConfigError where a run cannot be."""
    if run.world < 1 or run.ep_size < 1 or run.world % run.ep_size:
        raise ConfigError("ep_size", run.ep_size, f"expected a divisor of the world, which is {run.world}")
    if shape.experts and shape.experts % run.ep_size and run.ep_size < shape.experts:
        raise ConfigError(
            "ep_size", run.ep_size, f"expected a divisor of {shape.experts} experts: planned is an even split"
        )
    if not shape.experts and run.ep_size != 1:
        raise ConfigError("ep_size", run.ep_size, "expected 1: the model has no experts of a known family")


def shards(shape: Shape, run: Run) -> tuple[int, int]:
    """(dense, expert) elements of a rank's shards; each parameter's is rounded up. Of the fullest rank."""
    copies = run.world // run.ep_size
    dense = sum(math.ceil(n / run.world) for n in shape.dense)
    return dense, sum(math.ceil(owned / copies) for owned in owned_cubes(shape, run))


def owned_cubes(shape: Shape, run: Run) -> list[int]:
    """Elements of each expert parameter that one rank of an expert-parallel group owns, before ZeRO cuts them."""
    if not shape.experts:
        return []
    local = math.ceil(shape.experts / run.ep_size)
    return [cube // shape.experts * local for cube in shape.cubes]


def gathers(shape: Shape, run: Run) -> int:
    """How often a parameter is gathered in a micro-batch: once where all stay from the forward to the backward."""
    return 1 if sum(shape.dense) + sum(owned_cubes(shape, run)) <= MAX_LIVE else 2


def traffic(shape: Shape, run: Run) -> list[Traffic]:
    """Every collective of a window but the small ones of the step itself."""
    copies, dense_shard, expert_shard = run.world // run.ep_size, *shards(shape, run)
    found = []
    for name, shard, ranks in (("dense", dense_shard, run.world), ("experts", expert_shard, copies)):
        if not shard or ranks == 1:
            continue
        given = shard * run.element * gathers(shape, run) * run.micro_batches
        found.append(Traffic(f"all-gather of parameters, {name}", given, given * (ranks - 1), ranks))
        given = shard * ranks * WIRE * run.micro_batches
        found.append(Traffic(f"reduce-scatter of gradients, {name}", given, given * (ranks - 1) / ranks, ranks))
    if shape.moe_layers and run.ep_size > 1:
        found += _exchanges(shape, run)
    given = TOTALS * run.micro_batches
    found.append(Traffic("all-reduce of counts", given, 2 * given * (run.world - 1) / run.world, run.world))
    return found


def _exchanges(shape: Shape, run: Run) -> list[Traffic]:
    """Rows out and back, in the forward, and in the backward the same the other way; results carry a status row a rank.

    Own rows are not sent. A recomputed block runs its forward, and with it header and both exchanges, twice.
    """
    calls = shape.moe_layers * run.micro_batches
    row = shape.hidden * run.element
    away = (run.ep_size - 1) / run.ep_size
    there = run.rows * run.length * shape.top_k * row * away
    back = there + (run.ep_size - 1) * row
    forwards = 2 if run.checkpointing else 1
    headers = forwards * 8 * (run.ep_size * FIXED_FIELDS + shape.experts) * calls
    forward, backward = forwards * (there + back) * calls, (there + back) * calls
    return [
        Traffic("all-to-all-v of rows, forward", forward, forward, run.ep_size),
        Traffic("all-to-all-v of rows, backward", backward, backward, run.ep_size),
        Traffic("all-to-all-v of headers", headers, headers * away, run.ep_size),
    ]


def memory(shape: Shape, run: Run) -> dict[str, float]:
    """Bytes of a rank at its fullest, by what they are for. The last two are estimates; see `activations`.

    With ZeRO-3, bfloat16 parameters, Adam's moments, master weights and summed gradients in float32, all cut.
    """
    dense, experts = shards(shape, run)
    owned = owned_cubes(shape, run)
    live = sum(shape.dense) + sum(owned)
    blocks = [sum(shape.dense) / max(1, shape.layers), sum(owned) / max(1, shape.moe_layers)]
    gathered = live if gathers(shape, run) == 1 else min(live, MAX_LIVE + max(blocks))
    return {
        "parameters, cut": (dense + experts) * run.element,
        "master weights, cut": (dense + experts) * MASTER,
        "Adam's moments, cut": (dense + experts) * MOMENTS,
        "summed gradients, cut": (dense + experts) * SUMS,
        "gathered parameters (estimate)": gathered * run.element,
        "a block's gradients (estimate)": 2 * sum(blocks) * (run.element + WIRE),
        "activations (estimate)": run.rows * run.length * activations(shape, run),
    }


def activations(shape: Shape, run: Run) -> float:
    """Bytes a token that a forward keeps for the backward, an estimate.

    A block keeps its input, two normed inputs, queries, keys, values and their result (counted as four times the
    queries), and what its MLP saves; an MoE block keeps, for each of its K rows, the row, gate, up, their product and
    the result. With checkpointing: every block's input, and one block whole. Logits stand in float32 and once more in
    the model's dtype, with their gradient.
    """
    block = 3 * shape.hidden + 4 * shape.attention_width
    routed = shape.top_k * (2 * shape.hidden + 3 * shape.expert_width)
    dense_mlp = shape.inner
    whole = shape.layers * block + shape.moe_layers * routed + (shape.layers - shape.moe_layers) * dense_mlp
    if run.checkpointing:
        whole = shape.layers * shape.hidden + block + max(routed if shape.moe_layers else 0, dense_mlp)
    return whole * run.element + shape.vocabulary * (2 * run.element + 8)


def largest_rows(shape: Shape, run: Run, limit: float) -> int:
    """The most rows a micro-batch whose `memory` stays within ``limit`` bytes; 0 if not even one does."""
    held = memory(shape, run)
    per_row = held["activations (estimate)"] / run.rows
    rest = limit - (sum(held.values()) - held["activations (estimate)"])
    return max(0, int(rest // per_row))


def times(shape: Shape, run: Run, flops: float, bandwidth: float, latency_s: float) -> dict[str, float]:
    """Seconds of a window: computing, exchanging, and gathering and scattering, which overlap with computing.

    A token costs 6 operations a parameter that it uses, 8 with checkpointing, and its part in the attention matrices.

    Args:
        flops: operations a second that a rank reaches.
        bandwidth: bytes a second that a rank sends.
        latency_s: of one exchange among P ranks.
    """
    tokens = run.rows * run.length * run.micro_batches
    passes = 4 if run.checkpointing else 3
    attention = 2 * shape.layers * shape.attention_width * run.length  # causal: half of 4 * S * width
    computing = tokens * passes * (2 * shape.active + attention) / flops
    moved = traffic(shape, run)
    exchanges = (2 * passes - 1) * shape.moe_layers * run.micro_batches if run.ep_size > 1 else 0
    exchanging = sum(t.sent for t in moved if "all-to-all-v" in t.name) / bandwidth + exchanges * latency_s
    cutting = sum(t.sent for t in moved if "all-to-all-v" not in t.name) / bandwidth
    whole = exchanging + max(computing, cutting)
    return {
        "computing": computing,
        "exchanging": exchanging,
        "gathering and scattering": cutting,
        "window": whole,
        "share in exchange": exchanging / whole if whole else 0.0,
    }


def read_shape(folder: str) -> Shape:
    """The shapes of a transformers model, from its config.json: built without memory and measured.

    Raises:
        ConfigError: transformers cannot make a causal model of it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ruda_ds.moe.families import FAMILIES

    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("model", folder, f"expected a folder with a causal model's config.json ({error})") from None
    family = FAMILIES.get(config.model_type)
    blocks = [m for m in model.modules() if family is not None and type(m).__name__ == family.block]
    cubes = [parameter.numel() for block in blocks for parameter in block.experts.parameters()]
    routed = {id(parameter) for block in blocks for parameter in block.experts.parameters()}
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Shape(
        [parameter.numel() for parameter in model.parameters() if id(parameter) not in routed],
        # DeepSpeed partitions gate, up and down one by one; transformers keeps gate and up in one.
        [part for cube, down in zip(cubes[::2], cubes[1::2], strict=True) for part in (cube // 2, cube // 2, down)],
        config.hidden_size,
        config.num_hidden_layers,
        len(blocks),
        family.num_experts(config) if family is not None and blocks else 0,
        config.num_experts_per_tok if blocks else 0,
        cubes[1] // family.num_experts(config) // config.hidden_size if family is not None and blocks else 0,
        width,
        config.vocab_size,
        3 * getattr(config, "intermediate_size", 4 * config.hidden_size),
    )
