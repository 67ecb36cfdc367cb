"""The names and layouts of MoE families on disk, and the recipes between those and ours, both ways.

Ours, after `moe.replace`: under a block ``model.layers.N.mlp`` stand ``moe.router.weight`` [E, H],
``moe.experts.gate`` and ``.up`` [E, F, H], ``moe.experts.down`` [E, H, F], ``moe.correction_bias`` [E], ``shared.*``
and ``shared_gate.*``. On disk experts are one tensor each ("per-expert"), or as transformers holds them ("fused"):
``experts.gate_up_proj`` [E, 2F, H], gate rows first, and ``experts.down_proj`` [E, H, F]. GPT-OSS has only the fused
form, with other axes: ``gate_up_proj`` [E, H, 2F], gate and up columns in turn, ``down_proj`` [E, F, H], and biases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ruda_ds.checkpoint.recipes import Make, Part, Recipe, Slice, copy_of

LAYOUTS = ("per-expert", "fused")
CUBES = ("gate", "up", "down")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class DiskFamily:
    """How a family names its block on disk.

    Attributes:
        block: name of the block in a layer; in memory it is ``mlp``.
        projections: names of an expert's gate, up and down.
        router: name of the router.
        shared, shared_gate: names of the dense expert and of its gate; None if there is none.
        bias: name of the selection bias in the router; None if there is none.
        interleaved: gate and up columns in turn, axes swapped, with biases, and no per-expert form (GPT-OSS).
    """

    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    shared: str | None = None
    shared_gate: str | None = None
    bias: str | None = None
    interleaved: bool = False

    def layout(self, wanted: str | None) -> str:
        """The layout that is written for a wish; None: the family's own."""
        return "fused" if self.interleaved else wanted or "per-expert"


DISK = {
    "mixtral": DiskFamily("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen2_moe": DiskFamily(shared="shared_expert", shared_gate="shared_expert_gate"),
    "qwen3_moe": DiskFamily(),
    "olmoe": DiskFamily(),
    "deepseek_v2": DiskFamily(shared="shared_experts"),
    "deepseek_v3": DiskFamily(shared="shared_experts", bias="e_score_correction_bias"),
    "gpt_oss": DiskFamily(router="router", interleaved=True),
}


# Keys of the number of experts; one family has been written with more than one of them.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def experts_of(kind: str | None, config: Mapping[str, Any]) -> int | None:
    """The number of experts that a configuration names; None for another than the known families, or if it has none."""
    return next((config[key] for key in _COUNTS if config.get(key)), None) if kind in DISK else None


@dataclass(frozen=True)
class Block:
    """One layer's experts in a source: E, H, F and the part that gives each expert's gate, up or down."""

    experts: int
    hidden: int
    inner: int
    part: Callable[[str, int], Part]


def cube_part(name: str, expert: int, row: int) -> Part:
    """One expert of a cube whose experts have ``row`` elements."""
    return Part((Slice(name, expert * row, row),))


def _ours(prefix: str, shapes: Shapes, lora: Mapping[str, float]) -> Block:
    """The block of cubes of ours below ``prefix`` (``...moe.experts``), adapters added."""
    base = f"{prefix}.base" if f"{prefix}.base.gate" in shapes else prefix
    experts, inner, hidden = shapes[f"{base}.gate"]
    row = inner * hidden

    def part(cube: str, expert: int) -> Part:
        plain = cube_part(f"{base}.{cube}", expert, row)
        a, b = f"{prefix}.down_factors.{cube}", f"{prefix}.up_factors.{cube}"
        if a not in shapes:
            return plain
        out, rank = shapes[b][1:]
        factors = cube_part(a, expert, row // out * rank), cube_part(b, expert, out * rank)
        slices = (*plain.slices, *(factor.slices[0] for factor in factors))
        return Part(slices, Make.ADD_LORA, (out, row // out, rank), lora[prefix])

    return Block(experts, hidden, inner, part)


def fused_block(prefix: str, shapes: Shapes) -> Block:
    """The block of transformers' cubes below ``prefix`` (``...mlp.experts``)."""
    experts, twice, hidden = shapes[f"{prefix}.gate_up_proj"]
    row = twice // 2 * hidden

    def part(cube: str, expert: int) -> Part:
        if cube == "down":
            return cube_part(f"{prefix}.down_proj", expert, row)
        return Part((Slice(f"{prefix}.gate_up_proj", expert * 2 * row + (cube == "up") * row, row),))

    return Block(experts, hidden, twice // 2, part)


def _write_block(block: Block, layer: str, family: DiskFamily, layout: str) -> list[Recipe]:
    """The experts of a layer on disk; ``layer`` is ``model.layers.N``."""
    sizes = {"gate": (block.inner, block.hidden), "up": (block.inner, block.hidden)}
    sizes["down"] = block.hidden, block.inner
    if layout == "per-expert":
        return [
            Recipe(f"{layer}.{family.block}.experts.{expert}.{name}.weight", sizes[cube], (block.part(cube, expert),))
            for expert in range(block.experts)
            for cube, name in zip(CUBES, family.projections, strict=True)
        ]
    everyone = range(block.experts)
    gate_up = tuple(block.part(cube, expert) for expert in everyone for cube in ("gate", "up"))
    down = tuple(block.part("down", expert) for expert in everyone)
    shape = (block.experts, 2 * block.inner, block.hidden)
    return [
        Recipe(f"{layer}.mlp.experts.gate_up_proj", shape, gate_up, rows=2),
        Recipe(f"{layer}.mlp.experts.down_proj", (block.experts, *sizes["down"]), down, rows=1),
    ]


def _interleave(prefix: str, shapes: Shapes, layer: str) -> list[Recipe]:
    """GPT-OSS's experts on disk out of cubes of ours."""
    experts, inner, hidden = shapes[f"{prefix}.gate"]
    row = inner * hidden

    def both(suffix: str, count: int, view: tuple[int, ...]) -> tuple[Part, ...]:
        names = (f"{prefix}.gate{suffix}", f"{prefix}.up{suffix}")
        return tuple(
            Part(tuple(Slice(name, e * count, count) for name in names), Make.INTERLEAVE, view) for e in range(experts)
        )

    down = tuple(
        Part((Slice(f"{prefix}.down", e * row, row),), Make.TRANSPOSE, (hidden, inner)) for e in range(experts)
    )
    there = f"{layer}.mlp.experts"
    return [
        Recipe(f"{there}.gate_up_proj", (experts, hidden, 2 * inner), both("", row, (inner, hidden)), rows=1),
        Recipe(f"{there}.gate_up_proj_bias", (experts, 2 * inner), both("_bias", inner, ()), rows=1),
        Recipe(f"{there}.down_proj", (experts, inner, hidden), down, rows=1),
        copy_of(f"{there}.down_proj_bias", (experts, hidden), f"{prefix}.down_bias"),
    ]


LAYER = re.compile(r"(?P<layer>.*\blayers\.\d+)\.(?P<block>mlp|block_sparse_moe)\.(?P<rest>.+)")


def _plain_name(layer: str, rest: str, family: DiskFamily) -> tuple[str, bool]:
    """(disk name of what is not an expert in a block, whether it keeps its dtype)."""
    begin = f"{layer}.{family.block}."
    if rest == "moe.correction_bias":
        return f"{begin}{family.router}.{family.bias}", True
    for ours, disk in (
        ("moe.router.", family.router),
        ("shared.", family.shared),
        ("shared_gate.", family.shared_gate),
    ):
        if rest.startswith(ours) and disk is not None:
            return f"{begin}{disk}.{rest[len(ours) :]}", False
    return begin + rest, family.bias is not None and rest.endswith(family.bias)


def to_disk(
    kind: str | None, shapes: Shapes, layout: str | None, lora: Mapping[str, float] | None = None
) -> list[Recipe]:
    """Recipes of a model's tensors as its family has them on disk.

    Args:
        kind: model type of the configuration; of another than the known families every tensor keeps its name.
        shapes: of the source's tensors, cubes of all experts: of ours, or of transformers' own modules.
        layout: of LAYOUTS; None: the family's own.
        lora: scale of the adapters by module of experts; modules that are not named have none to add.
    """
    if kind not in DISK:
        return [copy_of(name, shape, name) for name, shape in shapes.items()]
    family = DISK[kind]
    layout = family.layout(layout)
    made: list[Recipe] = []
    done = set()
    for name, shape in shapes.items():
        found = LAYER.fullmatch(name)
        if found is None:
            made.append(copy_of(name, shape, name))
            continue
        layer, rest = found["layer"], found["rest"]
        experts = re.match(r"(moe\.)?experts\.", rest)
        if experts is None or (family.interleaved and not experts[1]):
            disk, keep = _plain_name(layer, rest, family)
            made.append(copy_of(disk, shape, name, keep))
            continue
        if layer in done:
            continue
        done.add(layer)
        prefix = f"{layer}.mlp.{experts[0][:-1]}"
        if family.interleaved:
            made.extend(_interleave(prefix, shapes, layer))
        else:
            block = _ours(prefix, shapes, lora or {}) if experts[1] else fused_block(prefix, shapes)
            made.extend(_write_block(block, layer, family, layout))
    return made
