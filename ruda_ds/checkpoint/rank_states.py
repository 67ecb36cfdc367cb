"""DeepSpeed's own files of all ranks of a tag: found, complete, opened, and saying alike what all must say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruda_ds.checkpoint.pickles import StoredTensor
from ruda_ds.checkpoint.reader import PtFile, damaged

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL12 = re.compile(r"()mp_rank_(\d+)_model_states\.pt")
# What every rank's file must say alike.
_COUNTERS = ("global_steps", "skipped_steps", "global_samples", "dp_world_size", "lr_scheduler", "ds_version")


@dataclass(frozen=True)
class RankFiles:
    """A rank's pickles.

    Attributes:
        optim: the optimizer's file.
        zero: its ZeRO state.
        model: the model's file; below ZeRO-3 that of rank 0 for all.
        state: its content.
    """

    optim: PtFile
    zero: dict[str, Any]
    model: PtFile
    state: dict[str, Any]


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise damaged(path, "one model-parallel rank", f"rank {int(match[2])}")
        rank = int(match[1] or 0)
        if rank in found:
            raise damaged(path, f"one file for rank {rank}", f"{found[rank].name} too")
        found[rank] = path
    return found


def _complete(folder: Path, files: Mapping[int, Path], world_size: int, what: str) -> None:
    for rank in range(world_size):
        if rank not in files:
            raise damaged(folder, f"{what} of {world_size} ranks", f"none of rank {rank}")
    for rank in sorted(files):
        if rank >= world_size:
            raise damaged(files[rank], f"{what} of {world_size} ranks", f"one of rank {rank}")


def same(left: Any, right: Any) -> bool:
    """Equality of pickled values, where tensors are told by their shape and dtype."""
    if isinstance(left, StoredTensor) and isinstance(right, StoredTensor):
        return (left.shape, left.dtype) == (right.shape, right.dtype)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def open_ranks(folder: Path, world_size: int | None) -> list[RankFiles]:
    """The pickles of all ranks of a tag, complete and saying alike what all must.

    Args:
        world_size: that the manifest names; None: the first file tells.

    Raises:
        CheckpointError: the file, what was expected of it and what was found.
    """
    optim, model = _by_rank(folder, _OPTIM), _by_rank(folder, _MODEL3)
    stage3 = bool(model)
    model = model or _by_rank(folder, _MODEL12)
    if 0 not in model:
        raise damaged(folder, "model states of rank 0 as DeepSpeed's ZeRO saves them", "none")
    first = PtFile(model[0])
    world_size = world_size or field_of(first, first.root, "dp_world_size")
    _complete(folder, optim, world_size, "optimizer states")
    _complete(folder, model, world_size if stage3 else 1, "model states")
    ranks: list[RankFiles] = []
    for rank in range(world_size):
        file = PtFile(optim[rank])
        zero = field_of(file, file.root, "optimizer_state_dict")
        states = first if rank == 0 or not stage3 else PtFile(model[rank])
        _check_counters(first, states)
        if rank and stage3:
            states.root.pop("module", None)  # names without data, once is enough
        ranks.append(RankFiles(file, zero, states, states.root))
        _check_optimizer(ranks[0], ranks[-1], world_size)
    return ranks


def field_of(file: PtFile, content: Any, key: str) -> Any:
    """An entry of a pickled dictionary; raises CheckpointError naming the file if there is none."""
    if not isinstance(content, dict) or key not in content:
        raise damaged(file.path, f"an entry {key!r}", "none")
    return content[key]


def _check_counters(first: PtFile, file: PtFile) -> None:
    for key in _COUNTERS:
        found, wanted = file.root.get(key), first.root.get(key)
        if not same(found, wanted):
            raise damaged(file.path, f"{key} {wanted} as in {first.path.name}", str(found))


def _check_optimizer(first: RankFiles, rank: RankFiles, world_size: int) -> None:
    for key in ("zero_stage", "loss_scaler", "dynamic_loss_scale", "partition_count"):
        found, wanted = rank.zero.get(key), first.zero.get(key)
        if not same(found, wanted):
            raise damaged(rank.optim.path, f"{key} {wanted} as in {first.optim.path.name}", str(found))
    counts = rank.zero.get("partition_count")
    if not isinstance(counts, list) and counts != world_size:  # a list, below ZeRO-3: see layout_checks.py
        raise damaged(rank.optim.path, f"a partition count of {world_size}", str(counts))


def stage_of(zero: Mapping[str, Any]) -> int:
    """ZeRO stage that a rank's optimizer state names."""
    return int(zero["zero_stage"].args[0])
