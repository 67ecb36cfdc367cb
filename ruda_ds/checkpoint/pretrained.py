"""Training starts from a Hugging Face folder: each rank reads the bytes of what it owns, and nothing else.

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
replace_moe_blocks(model, [0, 3, 8], rank=rank % 2)
load_pretrained(model, folder)
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint.from_hf import open_hf
from ruda_ds.checkpoint.reader import FILES
from ruda_ds.checkpoint.recipes import Recipe, Source, copy_of
from ruda_ds.checkpoint.weights import DESCRIPTION, WeightsSource
from ruda_ds.errors import CheckpointError
from ruda_ds.moe.layer import ExpertParallelMoE


@dataclass(frozen=True)
class Loaded:
    """What `load_pretrained` did.

    Attributes:
        tensors: parameters and buffers that were filled.
        nbytes: bytes that were read for them.
        remade: buffers that no folder holds and that were made again from the configuration.
    """

    tensors: int
    nbytes: int
    remade: tuple[str, ...]


def load_pretrained(model: torch.nn.Module, folder: str | Path, device: torch.device | str = "cpu") -> Loaded:
    """Fill a model's parameters and persistent buffers from a Hugging Face folder, or one of ``ruda-convert from-hf``.

    Args:
        model: of transformers, its MoE blocks replaced (`moe.replace_moe_blocks`); on the meta device, where parameters
            are made anew with their dtype kept, or real, where they are filled in place. Before DeepSpeed has it.
        folder: with config.json and safetensors.
        device: for what was on the meta device.

    Returns:
        What was read.

    Raises:
        CheckpointError: tensors that the folder lacks, or has and the model does not use, by name; another shape; a
            damaged file; or a buffer on the meta device that cannot be made again. The model may be filled in part.
    """
    folder = Path(folder)
    source, recipes = _open(folder)
    owned = _owned(model)
    filler = _Filler(model, source, torch.device(device))
    wanted = _wanted(model)
    known = {recipe.name for recipe in recipes.values()}
    missing = sorted(name for name in wanted if name not in known)
    ties = _aliases(model)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    left = [name for name in known - set(wanted) - ties if not any(re.search(pattern, name) for pattern in ignored)]
    if missing or left:
        raise CheckpointError(
            f"checkpoint {folder}: found {', '.join(sorted(left)[:8]) or 'nothing'} that the model does not have, and "
            f"not {', '.join(missing[:8]) or 'anything less'}; expected the tensors of the model"
        )
    for name in wanted:
        recipe = recipes[name]
        layer = name.partition(".experts.")[0]
        if recipe.rows:
            start, stop = owned[layer]
            filler.fill(name, recipe.experts(start, stop) if stop > start else None)
        else:
            filler.fill(name, recipe)
    FILES.close()
    remade = _remake_buffers(model, torch.device(device))
    return Loaded(len(wanted), filler.nbytes, remade)


def _open(folder: Path) -> tuple[Source, dict[str, Recipe]]:
    if (folder / DESCRIPTION).exists():
        weights = WeightsSource(folder)
        made = {}
        for name, shape in weights.shapes().items():
            recipe = copy_of(name, shape, name)
            made[name] = _by_expert(recipe) if name in weights.parts else recipe
        return weights, made
    opened = open_hf(folder)
    return opened.source, {recipe.name: recipe for recipe in opened.recipes}


def _by_expert(recipe: Recipe) -> Recipe:
    """A cube's copy cut into one part an expert."""
    (part,) = recipe.parts
    (piece,) = part.slices
    row = piece.count // recipe.shape[0]
    parts = tuple(type(part)((type(piece)(piece.name, expert * row, row),)) for expert in range(recipe.shape[0]))
    return Recipe(recipe.name, recipe.shape, parts, rows=1)


def _owned(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """Module name of each expert layer -> half-open range of its experts here."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, ExpertParallelMoE):
            prefix = list(pairwise(layer.experts.ownership.prefix))
            found[name] = prefix[layer.experts.rank]
    return found


def _wanted(model: torch.nn.Module) -> list[str]:
    """Names of parameters, tied ones once, and of persistent buffers."""
    names = [name for name, _ in model.named_parameters()]
    persistent = set(model.state_dict(keep_vars=True))
    return names + [name for name, _ in model.named_buffers() if name in persistent]


def _aliases(model: torch.nn.Module) -> set[str]:
    """Second names of tied parameters: a folder may hold them too."""
    return {n for n, _ in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}


class _Filler:
    """Puts tensors into a model, a tied parameter under all of its names."""

    def __init__(self, model: torch.nn.Module, source: Source, device: torch.device) -> None:
        self.source, self.device, self.nbytes = source, device, 0
        self.homes: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    self.homes.setdefault(id(tensor), []).append((module, name))
                    self.tensors[f"{path}.{name}" if path else name] = tensor

    def fill(self, name: str, recipe: Recipe | None) -> None:
        """Give a parameter or buffer its values; without a recipe it is a placeholder, and zero."""
        old = self.tensors[name]
        shape = recipe.shape if recipe is not None else (1,) * old.ndim
        if tuple(old.shape) != tuple(shape):
            raise CheckpointError(f"checkpoint: found {name} of shape {shape}, expected {tuple(old.shape)}")
        new = torch.zeros(old.shape, dtype=old.dtype, device=self.device) if old.is_meta else old.detach()
        if recipe is None:
            new.zero_()
        else:
            self._copy(recipe, new)
        if not old.is_meta:
            return
        made = torch.nn.Parameter(new, old.requires_grad) if isinstance(old, torch.nn.Parameter) else new
        for mark, value in vars(old).items():
            setattr(made, mark, value)
        for module, key in self.homes[id(old)]:
            table = module._parameters if isinstance(made, torch.nn.Parameter) else module._buffers
            table[key] = made  # type: ignore[assignment]

    def _copy(self, recipe: Recipe, target: torch.Tensor) -> None:
        flat, place = target.view(-1), 0
        for part in recipe.parts:
            for chunk in part.chunks(self.source):
                flat[place : place + chunk.numel()].copy_(chunk)
                place += chunk.numel()
                self.nbytes += chunk.numel() * chunk.dtype.itemsize


def _remake_buffers(model: torch.nn.Module, device: torch.device) -> tuple[str, ...]:
    """Make buffers that are still on the meta device from the configuration (rotary frequencies), or zero (counts)."""
    made = []
    for path, module in model.named_modules():
        lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if isinstance(module, ExpertParallelMoE) and module._owner_ends.is_meta:
            module._owner_ends = torch.tensor(module.experts.ownership.prefix[1:])
        if not lost:
            continue
        fresh = _fresh(path, module, lost)
        for name in lost:
            module._buffers[name] = fresh[name].to(device)
            made.append(f"{path}.{name}")
    return tuple(made)


def _fresh(path: str, module: Any, lost: list[str]) -> dict[str, torch.Tensor]:
    if isinstance(module, ExpertParallelMoE):
        with torch.device("cpu"):
            return {name: value for name, value in module.fresh_tallies().items() if value is not None}
    config = getattr(module, "config", None)
    takes = inspect.signature(type(module).__init__).parameters
    if config is None or "config" not in takes:
        raise CheckpointError(
            f"checkpoint: found no values for the buffers {', '.join(lost)} of {path}, a {type(module).__name__}, "
            "expected a module that can be made again from its config: build it on a real device"
        )
    with torch.device("cpu"):
        again = type(module)(config=config)
    return {name: again._buffers[name] for name in lost}
