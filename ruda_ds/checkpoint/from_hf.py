"""From a Hugging Face folder to weights split by owner; see `weights`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ruda_ds.checkpoint import families_disk, hf
from ruda_ds.checkpoint.families_read import from_disk
from ruda_ds.checkpoint.journal import identity_of, plan_of_shards
from ruda_ds.checkpoint.manifest import sha256_of
from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.recipes import Recipe, unaccounted
from ruda_ds.checkpoint.resume import Note, growing, silent, write_shards
from ruda_ds.checkpoint.to_hf import Advance, read_config
from ruda_ds.checkpoint.weights import DESCRIPTION, Description, experts_file
from ruda_ds.errors import CheckpointError
from ruda_ds.moe.ownership import ownership_of
from ruda_ds.shapes import element_count

# Buffers that old checkpoints hold and no model reads.
_IGNORED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class HfFolder:
    """An opened folder.

    Attributes:
        folder: where.
        source: its tensors, without those that no model reads.
        kind: model type.
        experts: E; None for a dense model.
        recipes: our tensors out of it, cubes of all experts.
    """

    folder: Path
    source: hf.SafetensorsSource
    kind: str | None
    experts: int | None
    recipes: list[Recipe]

    @property
    def layout(self) -> str:
        """The layout of its experts."""
        return "fused" if any(name.endswith("experts.gate_up_proj") for name in self.source.entries) else "per-expert"


def open_hf(folder: Path) -> HfFolder:
    """Open a folder and find our tensors in it.

    Raises:
        CheckpointError: damaged, without config.json, or tensors that are missing or left over, by name.
    """
    config = read_config(folder)
    if config is None:
        raise damaged(folder, "config.json", "none")
    source = hf.open_folder(folder)
    source = hf.SafetensorsSource({n: e for n, e in source.entries.items() if not n.endswith(_IGNORED)})
    kind = config.get("model_type")
    experts = families_disk.experts_of(kind, config)
    shapes = source.shapes()
    recipes = from_disk(kind, shapes, experts, folder)
    problems = unaccounted(recipes, {n: s for n, s in shapes.items() if element_count(s)})
    if problems:
        raise CheckpointError(f"checkpoint {folder}: found {'; '.join(problems[:20])}; expected each tensor used once")
    return HfFolder(folder, source, kind, experts, recipes)


@dataclass(frozen=True)
class FromHf(hf.Planned):
    """A conversion that has been checked and not yet run.

    Attributes:
        opened: the source.
        prefix: ownership of the experts.
        shards: the files that it makes.
    """

    opened: HfFolder
    prefix: tuple[int, ...]
    shards: list[hf.Shard]

    def run(self, target: Path, advance: Advance, note: Note = silent) -> None:
        """Write the folder, or what an interrupted run has left to be written.

        Args:
            advance: told bytes as they are written, or taken over.
            note: told what is taken over, or why it is not.

        Raises:
            CheckpointError: the target is there already, or a source file is damaged; nothing is left then.
            UnfinishedError: see `resume.growing`.
        """
        cubes = tuple(recipe.name for recipe in self.opened.recipes if recipe.rows)
        source, metadata = self.opened.source, {"format": "pt"}
        identity = identity_of("from-hf", plan_of_shards(self.shards, metadata), source.paths)
        with growing(target, identity, len(self.shards), note) as result:
            write_shards(result, self.shards, source, metadata, advance, hashed=True)
            files = dict(result.complete)
            for name in hf.copy_side_files(self.opened.folder, result.folder):
                path = result.folder / name
                files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            made = Description(self.prefix, self.opened.layout, cubes, dict(sorted(files.items())))
            hf.write_text(result.folder / DESCRIPTION, made.dumps())


def plan_from_hf(
    folder: Path, ownership: str | list[int], ep_size: int | None = None, shard_limit: int = 5 * 10**9
) -> FromHf:
    """Say what is to be written, and check that every element of the source goes to one place.

    Args:
        ownership: prefix of the experts, or "even" over ``ep_size`` ranks.
        shard_limit: bytes of a file of dense tensors.

    Raises:
        CheckpointError: see `open_hf`; or no experts.
        OwnershipError: not one of so many experts.
    """
    opened = open_hf(folder)
    if opened.experts is None:
        raise damaged(folder, f"a model of {', '.join(sorted(families_disk.DISK))}", f"model type {opened.kind!r}")
    ranks = len(ownership) - 1 if not isinstance(ownership, str) else ep_size or 1
    prefix = ownership_of(ownership, opened.experts, ranks).prefix
    dtype = opened.source.dtype
    dense = [(r, dtype(r.first)) for r in opened.recipes if not r.rows and r.numel]
    shards = hf.plan_shards(dense, shard_limit, "ruda_dense")
    for rank, (start, stop) in enumerate(pairwise(prefix)):
        if stop > start:
            owned = tuple((r.experts(start, stop), dtype(r.first)) for r in opened.recipes if r.rows)
            shards.append(hf.Shard(experts_file(rank, ranks), owned))
    return FromHf(opened, prefix, shards)
