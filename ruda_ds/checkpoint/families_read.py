"""Our tensors out of a family's folder: the other direction of `families_disk`, with every expert accounted for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ruda_ds.checkpoint.families_disk import CUBES, DISK, LAYER, DiskFamily, Shapes, cube_part, fused_block
from ruda_ds.checkpoint.recipes import Make, Part, Recipe, Slice, copy_of
from ruda_ds.errors import CheckpointError
from ruda_ds.shapes import element_count


def _read_single(layer: str, shapes: Shapes, family: DiskFamily, count: int) -> tuple[dict[str, list[Part]], tuple]:
    """(parts by cube, (F, H)) of a layer whose experts are one tensor each."""
    name = f"{layer}.{family.block}.experts.{{}}.{{}}.weight".format
    shape = shapes[name(0, family.projections[0])]
    parts = {
        cube: [Part((Slice(name(e, projection), 0, element_count(shape)),)) for e in range(count)]
        for cube, projection in zip(CUBES, family.projections, strict=True)
    }
    return parts, shape


def _read_interleaved(prefix: str, shapes: Shapes) -> tuple[dict[str, list[Part]], tuple]:
    experts, hidden, twice = shapes[f"{prefix}.gate_up_proj"]
    inner, row = twice // 2, twice // 2 * hidden
    parts: dict[str, list[Part]] = defaultdict(list)
    for e in range(experts):
        for lane, cube in enumerate(("gate", "up")):
            columns = Slice(f"{prefix}.gate_up_proj", e * 2 * row + lane, row, step=2)
            parts[cube].append(Part((columns,), Make.TRANSPOSE, (hidden, inner)))
            parts[f"{cube}_bias"].append(Part((Slice(f"{prefix}.gate_up_proj_bias", e * twice + lane, inner, step=2),)))
        parts["down"].append(Part((Slice(f"{prefix}.down_proj", e * row, row),), Make.TRANSPOSE, (inner, hidden)))
        parts["down_bias"].append(cube_part(f"{prefix}.down_proj_bias", e, hidden))
    return parts, (inner, hidden)


def expected_experts(layer: str, shapes: Shapes, family: DiskFamily, count: int) -> list[str]:
    """Names that a layer's experts must have on disk, in the layout that it has."""
    fused = [f"{layer}.mlp.experts.gate_up_proj", f"{layer}.mlp.experts.down_proj"]
    if family.interleaved:
        return [*fused, *(f"{name}_bias" for name in fused)]
    if any(name in shapes for name in fused):
        return fused
    return [f"{layer}.{family.block}.experts.{e}.{p}.weight" for e in range(count) for p in family.projections]


def _read_block(layer: str, shapes: Shapes, family: DiskFamily, count: int) -> list[Recipe]:
    prefix = f"{layer}.mlp.experts"
    if family.interleaved:
        parts, (inner, hidden) = _read_interleaved(prefix, shapes)
    elif f"{prefix}.gate_up_proj" in shapes:
        block = fused_block(prefix, shapes)
        parts = {cube: [block.part(cube, e) for e in range(block.experts)] for cube in CUBES}
        inner, hidden = block.inner, block.hidden
    else:
        parts, (inner, hidden) = _read_single(layer, shapes, family, count)
    sizes = {"down": (hidden, inner), "down_bias": (hidden,), "gate_bias": (inner,), "up_bias": (inner,)}
    return [
        Recipe(f"{layer}.mlp.moe.experts.{cube}", (count, *sizes.get(cube, (inner, hidden))), tuple(made), rows=1)
        for cube, made in parts.items()
    ]


def from_disk(kind: str | None, shapes: Shapes, count: int | None, where: object) -> list[Recipe]:
    """Recipes of our tensors, cubes of all experts, out of a folder of a family.

    Args:
        kind: model type; of another than the known families every tensor keeps its name.
        shapes: of the tensors on disk.
        count: experts that the configuration names.
        where: the folder, for the message.

    Raises:
        CheckpointError: experts' tensors that are missing or left over, by name.
    """
    if kind not in DISK:
        return [copy_of(name, shape, name) for name, shape in shapes.items()]
    family = DISK[kind]
    made: list[Recipe] = []
    held: dict[str, set[str]] = defaultdict(set)
    names = {
        f"{family.router}.": "moe.router.",
        f"{family.shared}.": "shared.",
        f"{family.shared_gate}.": "shared_gate.",
    }
    for name, shape in shapes.items():
        found = LAYER.fullmatch(name)
        if found is None:
            made.append(copy_of(name, shape, name))
            continue
        layer, rest = found["layer"], found["rest"]
        if rest.startswith("experts."):
            held[layer].add(name)
            continue
        ours = next((to + rest[len(begin) :] for begin, to in names.items() if rest.startswith(begin)), rest)
        if family.bias and rest == f"{family.router}.{family.bias}":
            ours = "moe.correction_bias"
        made.append(copy_of(f"{layer}.mlp.{ours}", shape, name, keep_dtype=ours == "moe.correction_bias"))
    _check_experts(held, made, shapes, family, count, where)
    for layer in held:
        made.extend(_read_block(layer, shapes, family, count or 0))
    return made


def _check_experts(
    held: Mapping[str, set[str]],
    plain: list[Recipe],
    shapes: Shapes,
    family: DiskFamily,
    count: int | None,
    where: object,
) -> None:
    missing, left = [], []
    routers = {r.name.partition(".mlp.")[0] for r in plain if r.name.endswith(".mlp.moe.router.weight")}
    for layer in sorted({*held, *routers}):
        expected = expected_experts(layer, shapes, family, count or 0)
        missing += [name for name in expected if name not in shapes]
        left += sorted(held.get(layer, set()) - set(expected))
        if layer not in routers:
            missing.append(f"{layer}.{family.block}.{family.router}.weight")
    if missing or left or not held or count is None:
        raise CheckpointError(
            f"checkpoint {where}: found {_some(left) if left else 'no tensors'} that no expert has, and not "
            f"{_some(missing) if missing else 'any expert' if not held else 'the number of experts'}; expected all "
            f"{count} experts of every layer"
        )


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
