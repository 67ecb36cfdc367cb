"""LoRA adapters of a training checkpoint apart from their base, in the layout that PEFT and vLLM read.

    OUT/adapter_model.safetensors    NAME.lora_A.weight [Q, in] and NAME.lora_B.weight [out, Q] of each projection
    OUT/adapter_config.json          rank, alpha and the names of the projections

NAME is ``base_model.model.`` before the name that the projection has in the base model's own folder, as PEFT names the
adapters of a Linear. Configuration and tokenizer stay with the base model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint import hf
from ruda_ds.checkpoint.families_disk import CUBES, DISK, LAYER, DiskFamily, Shapes, cube_part
from ruda_ds.checkpoint.journal import identity_of, plan_of_shards
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.recipes import Recipe, unaccounted
from ruda_ds.checkpoint.resume import Note, growing, silent, write_shards
from ruda_ds.checkpoint.to_hf import Advance, Origin, factor_prefixes
from ruda_ds.errors import CheckpointError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAMED = 8  # parameters that a refusal names


@dataclass(frozen=True)
class Pair:
    """The adapters of one target of a layer's experts.

    Attributes:
        cube: of CUBES.
        names: in the checkpoint: of A [E, Q, in] and of B [E, out, Q].
        shapes: of both.
        block: name of the experts on disk, ``model.layers.N.mlp.experts``.
    """

    cube: str
    names: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    block: str

    @property
    def ranks(self) -> set[int]:
        """Q, as A and as B have it."""
        return {self.shapes[0][1], self.shapes[1][2]}

    def recipes(self, projection: str) -> Iterator[Recipe]:
        """A and B of every expert; ``projection`` is the target's name on disk."""
        for expert in range(self.shapes[0][0]):
            for name, shape, suffix in zip(self.names, self.shapes, ("lora_A", "lora_B"), strict=True):
                part = cube_part(name, expert, shape[1] * shape[2])
                yield Recipe(f"base_model.model.{self.block}.{expert}.{projection}.{suffix}.weight", shape[1:], (part,))


@dataclass(frozen=True)
class ToAdapters(hf.Planned):
    """An export of adapters that has been checked and not yet run.

    Attributes:
        origin: what they come from.
        shards: the one file of weights.
        config: content of ``adapter_config.json``.
        notes: for the user.
    """

    origin: Origin
    shards: list[hf.Shard]
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def run(self, target: Path, advance: Advance, note: Note = silent) -> None:
        """Write the folder.

        Args:
            advance: told bytes as they are written, or taken over.
            note: told what is taken over, or why it is not.

        Raises:
            CheckpointError: the target is there already, or a source file is damaged; nothing is left then.
            UnfinishedError: see `resume.growing`.
        """
        metadata = {"format": "pt"}
        identity = identity_of("to-hf --lora adapter", plan_of_shards(self.shards, metadata), self.origin.paths)
        with growing(target, identity, len(self.shards), note) as result:
            write_shards(result, self.shards, self.origin.source, metadata, advance)
            hf.write_text(result.folder / CONFIG, json.dumps(self.config, indent=2, sort_keys=True))


def plan_adapters(origin: Origin, dtype: torch.dtype | None = None) -> ToAdapters:
    """Say what is to be written, and check that it holds all that training has changed.

    Args:
        dtype: of the adapters; None: the dtype that each has in the model.

    Raises:
        CheckpointError: no adapters, merged ones, trained parameters beside them, a family without a form per expert,
            or ranks or scales that one configuration cannot say.
    """
    modules = _modules_of(origin)
    family = _family_of(origin)
    prefixes = tuple(prefix for module in modules for prefix in factor_prefixes(module))
    _check_nothing_lost(origin, prefixes)
    shapes = {name: shape for name, shape in origin.source.shapes().items() if name.startswith(prefixes)}
    pairs = [pair for module in modules for pair in _pairs(origin, module, shapes, family)]
    projections = dict(zip(CUBES, family.projections, strict=True))
    recipes = [recipe for pair in pairs for recipe in pair.recipes(projections[pair.cube])]
    problems = unaccounted(recipes, shapes)
    if problems:
        raise CheckpointError(
            f"checkpoint {origin.path}: found {'; '.join(problems[:20])}; expected each adapter used once"
        )
    rank = _only(origin, "rank", {rank for pair in pairs for rank in pair.ranks})
    scale = _only(origin, "scale", set(modules.values()))
    config = adapter_config(rank, scale, sorted({projections[pair.cube] for pair in pairs}), origin.config or {})
    tensors = tuple((recipe, dtype or origin.source.dtype(recipe.first)) for recipe in recipes)
    return ToAdapters(
        origin, [hf.Shard(WEIGHTS, tensors)], config, _notes(origin, whole=len(pairs) == len(modules) * len(CUBES))
    )


def adapter_config(rank: int, scale: float, projections: list[str], model: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``adapter_config.json``.

    Args:
        rank: Q.
        scale: alpha / Q.
        projections: names on disk of what has adapters.
        model: configuration of the base model.
    """
    alpha: float = round(scale * rank)  # scale * rank alone can miss a whole alpha by one rounding
    if alpha / rank != scale:
        alpha = scale * rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.get("_name_or_path") or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": projections,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _modules_of(origin: Origin) -> Mapping[str, float]:
    """Scale by module of experts that has adapters."""
    if not origin.lora:
        raise damaged(origin.path, "LoRA adapters of experts", "none")
    if origin.merged:
        raise damaged(
            origin.path, "adapters apart from their base", f"adapters merged already into {', '.join(origin.merged)}"
        )
    return origin.lora


def _family_of(origin: Origin) -> DiskFamily:
    family = DISK.get(origin.kind or "")
    if family is None or family.interleaved:
        known = ", ".join(kind for kind, family in DISK.items() if not family.interleaved)
        raise damaged(
            origin.path, f"a family with a form per expert ({known}; see --hf-files)", f"model type {origin.kind}"
        )
    return family


def _check_nothing_lost(origin: Origin, prefixes: tuple[str, ...]) -> None:
    """Refuse trained parameters that are not adapters: the base model has other values of them."""
    lost = sorted(name for name in origin.trained if not name.startswith(prefixes))
    if lost:
        more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
        raise damaged(
            origin.path,
            "adapters to be all that was trained (--lora merge keeps the rest)",
            f"trained parameters that an adapter would lose: {', '.join(lost[:NAMED])}{more}",
        )


def _notes(origin: Origin, whole: bool) -> tuple[str, ...]:
    """What no check can decide; ``whole``: each layer with adapters has all of gate, up and down."""
    notes = []
    if not whole:  # they hold gate and up of all experts as one tensor, and stack what an adapter has for it
        notes.append(
            "not all of gate, up and down have adapters: vLLM expects all, PEFT may expect gate and up together"
        )
    if any(name.endswith(".moe.correction_bias") for name in origin.source.shapes()):  # buffers: no word on training
        notes.append("selection biases are not in an adapter; if training has moved them, only --lora merge keeps that")
    return tuple(notes)


def _pairs(origin: Origin, module: str, shapes: Shapes, family: DiskFamily) -> Iterator[Pair]:
    """The adapters of a module of experts; one half alone is left to be found unaccounted."""
    found = LAYER.fullmatch(module)
    if found is None or found["rest"] != "moe.experts":
        raise damaged(origin.path, "adapters of a layer's experts", f"adapters of {module}")
    block = f"{found['layer'].removeprefix(origin.prefix)}.{family.block}.experts"
    for cube in CUBES:
        a, b = (f"{prefix}{cube}" for prefix in factor_prefixes(module))
        if a in shapes and b in shapes:
            yield Pair(cube, (a, b), (shapes[a], shapes[b]), block)


def _only(origin: Origin, what: str, found: set[Any]) -> Any:
    """The one value of a set."""
    if len(found) != 1:
        raise damaged(origin.path, f"one {what} of all adapters, as {CONFIG} has", str(sorted(found)))
    return found.pop()
