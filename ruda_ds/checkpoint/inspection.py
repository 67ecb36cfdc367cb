"""What is in a folder: a training checkpoint, weights split by owner, or a Hugging Face folder. Reads headers only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ruda_ds.checkpoint import hf
from ruda_ds.checkpoint.manifest import MANIFEST, Manifest
from ruda_ds.checkpoint.source import TrainingSource
from ruda_ds.checkpoint.to_hf import read_config
from ruda_ds.checkpoint.weights import DESCRIPTION, WeightsSource
from ruda_ds.checkpoint.writer import LATEST, interrupted, locate
from ruda_ds.shapes import element_count


def inspect_folder(path: Path, tag: str | None = None) -> dict[str, Any]:
    """A description as JSON values.

    With a manifest no pickle is opened at all; without one DeepSpeed's are, as far as plain values and shapes go.

    Raises:
        CheckpointError: none of these kinds of folder, or damaged.
    """
    if (path / DESCRIPTION).exists():
        weights = WeightsSource(path)
        about = {"kind": "weights split by owner", "ownership": list(weights.description.ownership)}
        dtypes = {name: str(weights.dtype(name)) for name in weights.shapes()}
        return {**about, **_tensors(weights.shapes(), dtypes), **_files(path), **_model(path)}
    if not (path / LATEST).exists() and tag is None and any(path.glob("*.safetensors")):
        source = hf.open_folder(path)
        dtypes = {name: str(source.dtype(name)) for name in source.shapes()}
        return {"kind": "Hugging Face folder", **_tensors(source.shapes(), dtypes), **_files(path), **_model(path)}
    return _training(path, tag)


def _training(path: Path, tag: str | None) -> dict[str, Any]:
    folder = locate(path, tag)
    about: dict[str, Any] = {"kind": "training checkpoint", "tag": folder.name}
    if not (folder / MANIFEST).exists():
        source = TrainingSource(folder)
        state = source.ranks[0].state
        dtypes = {name: str(source.dtype(name)) for name in source.shapes()}
        about |= {
            "step": state.get("global_steps"),
            "zero_stage": source.stage,
            "world_size": source.world_size,
            "ep_size": source.topology.ep_size,
            "ownership": {layer: list(prefix) for layer, prefix in source.topology.ownership.items()},
            "manifest": "none: saved by DeepSpeed alone",
        }
        trained = [name for name, known in source.known.items() if known.trained]
        return {**about, **_tensors(source.shapes(), dtypes, trained), **_files(folder), **_others(path)}
    manifest = Manifest.read(folder)
    manifest.check_sizes(folder)
    window = manifest.window
    about |= {
        "step": manifest.global_steps,
        "zero_stage": manifest.zero_stage,
        "world_size": manifest.world_size,
        "ep_size": manifest.experts.ep_size if manifest.experts else 1,
        "ownership": {k: list(v) for k, v in manifest.experts.ownership.items()} if manifest.experts else {},
        "window": {
            "kind": window["kind"],
            "microbatches": window["microbatches"],
            "tokens": window["global_count"],
            "dtype": window["dtype"],
            "loss_scale": window["loss_scale"],
            "loss_sum": manifest.loss,
        },
        "optimizer": manifest.optimizer,
        "scheduler": manifest.scheduler,
        "model": manifest.model.class_name,
        "versions": manifest.versions,
    }
    shapes = {parameter.name: parameter.shape for parameter in manifest.parameters}
    dtypes = {parameter.name: parameter.dtype for parameter in manifest.parameters}
    trained = [parameter.name for parameter in manifest.parameters if parameter.requires_grad]
    return {**about, **_tensors(shapes, dtypes, trained), **_files(folder), **_others(path)}


def _tensors(
    shapes: dict[str, tuple[int, ...]], dtypes: dict[str, str], trained: Iterable[str] | None = None
) -> dict[str, Any]:
    total = sum(map(element_count, shapes.values()))
    held = list(shapes) if trained is None else list(trained)
    kinds: dict[str, int] = {}
    for name, shape in shapes.items():
        kind = dtypes[name].removeprefix("torch.")
        kinds[kind] = kinds.get(kind, 0) + element_count(shape)
    made: dict[str, Any] = {"tensors": len(shapes), "elements": total, "elements_by_dtype": kinds}
    if trained is not None:
        made["trained_elements"] = sum(element_count(shapes[name]) for name in held)
    made["parameters"] = [
        {"name": name, "shape": list(shape), "dtype": dtypes[name].removeprefix("torch.")}
        | ({} if trained is None else {"trained": name in set(held)})
        for name, shape in shapes.items()
    ]
    return made


def _files(folder: Path) -> dict[str, Any]:
    sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def _others(path: Path) -> dict[str, Any]:
    return {"interrupted": [folder.name for folder in interrupted(path)]}


def _model(path: Path) -> dict[str, Any]:
    config = read_config(path)
    return {"model": None if config is None else config.get("model_type")}


def as_table(about: dict[str, Any], limit: int = 40) -> str:
    """The description as text: a line for each field, then a table of parameters (the first ``limit``)."""
    lines = []
    for key, value in about.items():
        if key == "parameters":
            continue
        if isinstance(value, dict):
            text = ", ".join(f"{name} {_show(item)}" for name, item in _distinct(value).items()) or "none"
        else:
            text = ", ".join(value) or "none" if isinstance(value, list) and not value else _show(value)
        lines.append(f"{key.replace('_', ' '):18} {text}")
    rows = about.get("parameters", [])
    width = max((len(row["name"]) for row in rows[:limit]), default=0)
    lines.append("")
    for row in rows[:limit]:
        frozen = "" if row.get("trained", True) else "  frozen"
        lines.append(f"{row['name']:{width}}  {row['dtype']:8}  {'x'.join(map(str, row['shape'])) or '1'}{frozen}")
    if len(rows) > limit:
        lines.append(f"... and {len(rows) - limit} more (--all, or --json)")
    return "\n".join(lines)


def _distinct(values: dict[str, Any]) -> dict[str, Any]:
    """Ownership of many layers that is the same in all: said once."""
    found = list(values.values())
    if len(found) > 2 and all(isinstance(value, list) and value == found[0] for value in found):
        return {f"{len(found)} layers": found[0]}
    return values


def _show(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
