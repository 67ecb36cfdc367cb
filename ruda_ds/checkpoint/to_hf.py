"""From a training checkpoint, or weights split by owner, to a Hugging Face folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint import families_disk, hf
from ruda_ds.checkpoint.journal import identity_of, plan_of_shards
from ruda_ds.checkpoint.manifest import MANIFEST
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.recipes import Recipe, Source, unaccounted
from ruda_ds.checkpoint.resume import Note, growing, silent, write_shards
from ruda_ds.checkpoint.source import TrainingSource
from ruda_ds.checkpoint.weights import DESCRIPTION, WeightsSource
from ruda_ds.checkpoint.writer import locate
from ruda_ds.errors import CheckpointError
from ruda_ds.shapes import element_count

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Origin:
    """What is converted.

    Attributes:
        path: for messages.
        source: its tensors.
        config: of the model; None if the checkpoint has none.
        class_name: of the model.
        prefix: of every name of the model's own, with its dot.
        tied: alias -> the name that is stored.
        layout: of experts on disk; None: the family's own.
        side_files: folder with configuration and tokenizer; None if there is none.
        lora: scale of adapters by module of experts.
        merged: modules of experts whose cubes hold their adapters already.
        trained: names of the parameters that are not frozen; none of weights without a training state.
    """

    path: Path
    source: Source
    config: Mapping[str, Any] | None = None
    class_name: str = ""
    prefix: str = ""
    tied: Mapping[str, str] | None = None
    layout: str | None = None
    side_files: Path | None = None
    lora: Mapping[str, float] | None = None
    merged: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()

    @property
    def kind(self) -> str | None:
        """Model type of the configuration."""
        return None if self.config is None else self.config.get("model_type")

    @property
    def paths(self) -> set[Path]:
        """The files that its tensors are in, and what a training checkpoint says of them."""
        if isinstance(self.source, WeightsSource):
            return self.source.paths
        return {path for path in self.path.iterdir() if path.suffix in (".pt", ".safetensors") or path.name == MANIFEST}


def read_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a folder; None if there is none.

    Raises:
        CheckpointError: it is not JSON.
    """
    path = folder / "config.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path, "JSON", str(error)) from error


def open_origin(
    path: Path, tag: str | None = None, side_files: Path | None = None, lora_scale: float | None = None
) -> Origin:
    """A training checkpoint's folder, or one of weights.

    Args:
        tag: of a training checkpoint; None: the one that ``latest`` names.
        side_files: folder with config.json and tokenizer files, for checkpoints that have none.
        lora_scale: alpha / Q of the adapters, for checkpoints that do not say.

    Raises:
        CheckpointError: neither, incomplete or damaged.
    """
    if (path / DESCRIPTION).exists():
        weights = WeightsSource(path)
        return Origin(path, weights, read_config(path), layout=weights.description.layout, side_files=path)
    folder = locate(path, tag)
    source = TrainingSource(folder)
    model = source.manifest.model if source.manifest else None
    config = read_config(side_files) if side_files is not None else None
    scales, merged = adapters(source, lora_scale)
    return Origin(
        folder,
        source,
        config or (model.config if model else None),
        model.class_name if model else "",
        f"{model.prefix}." if model and model.prefix else "",
        source.tied,
        side_files=side_files or (path if (path / "config.json").exists() else None),
        lora=scales,
        merged=merged,
        trained=tuple(name for name, known in source.known.items() if known.trained),
    )


def adapters(source: TrainingSource, lora_scale: float | None) -> tuple[dict[str, float], tuple[str, ...]]:
    """(scale by module of experts with adapters, modules that are merged already).

    Raises:
        CheckpointError: there are adapters and nothing says their scale.
    """
    modules = sorted({name.partition(".down_factors.")[0] for name in source.known if ".down_factors." in name})
    noted = getattr(source.manifest, "adapters", None) or {}
    scales, merged = {}, []
    for module in modules:
        entry = noted.get(module, {})
        scale = entry.get("scale", lora_scale)
        if scale is None:
            raise damaged(
                source.folder, f"the scale (alpha / rank) of the adapters of {module}", "none: pass --lora-scale"
            )
        scales[module] = float(scale)
        if entry.get("merged"):
            merged.append(module)
    return scales, tuple(merged)


@dataclass(frozen=True)
class ToHf(hf.Planned):
    """A conversion that has been checked and not yet run.

    Attributes:
        origin: what is converted.
        shards: the files that it makes.
        dtype: that was asked for; None: the model's.
    """

    origin: Origin
    shards: list[hf.Shard]
    dtype: torch.dtype | None

    def run(self, target: Path, advance: Advance, note: Note = silent) -> None:
        """Write the folder, or what an interrupted run has left to be written.

        Args:
            advance: told bytes as they are written, or taken over.
            note: told what is taken over, or why it is not.

        Raises:
            CheckpointError: the target is there already, or a source file is damaged; nothing is left then.
            UnfinishedError: see `resume.growing`.
        """
        metadata = {"format": "pt"}
        if self.origin.config is None:  # no configuration says which weights are one
            metadata |= dict(self.origin.tied or {})
        identity = identity_of("to-hf", plan_of_shards(self.shards, metadata), self.origin.paths)
        with growing(target, identity, len(self.shards), note) as result:
            write_shards(result, self.shards, self.origin.source, metadata, advance)
            hf.write_index(result.folder, self.shards)
            if self.origin.side_files is not None:
                hf.copy_side_files(self.origin.side_files, result.folder)
            self._write_config(result.folder)

    def _write_config(self, folder: Path) -> None:
        copied = (folder / "config.json").exists()
        if self.origin.config is None or (copied and self.dtype is None):
            return
        config = dict(self.origin.config)
        if not config.get("architectures") and self.origin.class_name:
            config["architectures"] = [self.origin.class_name]
        written = {dtype for shard in self.shards for recipe, dtype in shard.tensors if not recipe.keep_dtype}
        if len(written) == 1:
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config[key] = str(written.pop()).removeprefix("torch.")
        hf.write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True))


def plan_to_hf(
    origin: Origin, dtype: torch.dtype | None = None, shard_limit: int = 5 * 10**9, layout: str | None = None
) -> ToHf:
    """Say what is to be written, and check that every element of the source goes to one place.

    Args:
        dtype: of floating tensors; selection biases keep theirs. None: the dtype that each has in the model.
        shard_limit: bytes of a file.
        layout: of LAYOUTS; None: that of the source, or the family's own.

    Raises:
        CheckpointError: with the names of what is missing, left over, or used twice.
    """
    source = origin.source
    shapes = {name: shape for name, shape in source.shapes().items() if element_count(shape)}
    for module in origin.merged:  # the cubes hold them
        shapes = {n: s for n, s in shapes.items() if not n.startswith(factor_prefixes(module))}
    recipes = families_disk.to_disk(origin.kind, shapes, layout or origin.layout, origin.lora)
    problems = unaccounted(recipes, shapes)
    names = [recipe.name.removeprefix(origin.prefix) for recipe in recipes]
    problems += [f"{name}: written twice" for name, count in Counter(names).items() if count > 1]
    if problems:
        raise CheckpointError(
            f"checkpoint {origin.path}: found {'; '.join(problems[:20])}; expected each tensor used once"
        )
    tensors = [
        (Recipe(name, r.shape, r.parts, r.rows, r.keep_dtype), _dtype(r, source, dtype))
        for name, r in zip(names, recipes, strict=True)
    ]
    return ToHf(origin, hf.plan_shards(tensors, shard_limit), dtype)


def factor_prefixes(module: str) -> tuple[str, str]:
    """How the names of the adapters A and B of a module of experts begin."""
    return f"{module}.down_factors.", f"{module}.up_factors."


def _dtype(recipe: Recipe, source: Source, wanted: torch.dtype | None) -> torch.dtype:
    own = source.dtype(recipe.first)
    return wanted if wanted is not None and own.is_floating_point and not recipe.keep_dtype else own
