"""The files that are one rank's own: its pending shards, its random states, its counts.

``ruda_rank_RRRRR-of-WWWWW.json`` holds, beside rank and world_size:

    "rng"            null, or the states of torch ("torch"), the accelerator ("device", null on CPU), ``random``
                     ("python") and numpy ("numpy"), as `random_states` makes them
    "expert_counts"  module name of each expert layer -> rows of each expert on this rank since the counts were last
                     taken; only their sum over the ranks means something, so another topology may give it to one rank
    "router_sums"    the same of what the report of the router's losses needs
    "expert_shares"  module name -> rows of each expert by token in the window before, the same on every rank; null
                     without a balancing loss
    "fragments"      below ZeRO-3: name -> half-open range of the flattened parameter in this rank's flat groups; else
                     null

The safetensors metadata of ``ruda_pending_RRRRR-of-WWWWW.safetensors`` holds "format", "version", "rank", "world_size"
and, under "window", the window's state once more as JSON, so that the file of another moment or rank is found out.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ruda_ds.accumulation.record import PendingGradientsRecord, window_fields
from ruda_ds.errors import CheckpointError

# Buffers of an expert layer that are one rank's part of a sum since they were last taken.
TALLIES = ("expert_counts", "router_sums")
RANK_FORMAT, PENDING_FORMAT, FORMAT_VERSION = "ruda_rank", "ruda_pending", "1"


def pending_name(rank: int, world_size: int) -> str:
    """Name of a rank's file of pending shards."""
    return f"ruda_pending_{rank:05d}-of-{world_size:05d}.safetensors"


def rank_name(rank: int, world_size: int) -> str:
    """Name of a rank's file of everything else."""
    return f"ruda_rank_{rank:05d}-of-{world_size:05d}.json"


def experts_name(rank: int, world_size: int) -> str:
    """Name of the file of a rank's experts below ZeRO-3."""
    return f"ruda_experts_{rank:05d}-of-{world_size:05d}.safetensors"


# --- pending shards ---------------------------------------------------------------------------------------------


def write_pending(path: Path, record: PendingGradientsRecord, rank: int, world_size: int) -> None:
    """Write a rank's pending shards, with the window's state beside them."""
    metadata = {
        "format": PENDING_FORMAT,
        "version": FORMAT_VERSION,
        "rank": str(rank),
        "world_size": str(world_size),
        "window": json.dumps(window_fields(record.state, record.loss), sort_keys=True),
    }
    save_file({name: shard.contiguous().cpu() for name, shard in record.gradients.items()}, path, metadata=metadata)


def read_pending(path: Path, rank: int, world_size: int, window: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A rank's pending shards.

    Args:
        window: the manifest's.

    Raises:
        CheckpointError: another rank's or world's file, of another window, or no safetensors file.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            check_pending(path, file.metadata() or {}, rank, world_size, window)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def check_pending(path: Path, found: Mapping[str, str], rank: int, world_size: int, window: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless a pending file's metadata is that of this rank and window."""
    wanted = {
        "format": PENDING_FORMAT,
        "version": FORMAT_VERSION,
        "rank": str(rank),
        "world_size": str(world_size),
    }
    for key, value in wanted.items():
        if found.get(key) != value:
            raise CheckpointError(f"{path}: {key} is {found.get(key)}, expected {value}")
    if "window" not in found:
        return
    try:
        held = dict(json.loads(found["window"]))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the window's state in its header cannot be read ({error})") from None
    for key in sorted(held.keys() | window.keys()):
        if held.get(key) != window.get(key):
            raise CheckpointError(f"{path}: the window's {key} is {held.get(key)}, expected {window.get(key)}")


# --- everything else --------------------------------------------------------------------------------------------


def write_rank(path: Path, rank: int, world_size: int, content: Mapping[str, Any]) -> None:
    """Write a rank's JSON file; ``content`` as the module's docstring lists it."""
    fields = {"format": RANK_FORMAT, "version": FORMAT_VERSION, "rank": rank, "world_size": world_size, **content}
    path.write_text(json.dumps(fields), encoding="utf-8")


def read_rank(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    """The content of a rank's JSON file; raises CheckpointError if it is another's, or none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = tuple(content[key] for key in ("format", "version", "rank", "world_size"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    wanted = (RANK_FORMAT, FORMAT_VERSION, rank, world_size)
    if found != wanted:
        raise CheckpointError(f"{path}: format, version, rank and world size are {found}, expected {wanted}")
    return content


def random_states() -> dict[str, Any]:
    """The states of all random generators that training code draws from, as JSON values."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state()
    device = _accelerator_generator()
    return {
        "torch": _encode(torch.get_rng_state().numpy()),
        "device": None if device is None else _encode(device.get_rng_state().cpu().numpy()),
        "python": [version, list(words), gauss],
        "numpy": [numpy[0], _encode(numpy[1]), int(numpy[2]), int(numpy[3]), float(numpy[4])],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put `random_states` back; raises what the generators raise at values that are not theirs."""
    torch.set_rng_state(torch.from_numpy(_decode(states["torch"], np.uint8)))
    device = _accelerator_generator()
    if device is not None and states["device"] is not None:
        device.set_rng_state(torch.from_numpy(_decode(states["device"], np.uint8)))
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = states["numpy"]
    np.random.set_state((name, _decode(key, np.uint32), *rest))


def _accelerator_generator() -> Any:
    """DeepSpeed's accelerator, where it draws from a generator of its own; None on CPU, whose generator is torch's."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return None if accelerator.device_name() == "cpu" else accelerator


def _encode(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _decode(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()


# --- experts below ZeRO-3 ---------------------------------------------------------------------------------------


def write_experts(path: Path, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a rank's experts in their storage dtype: name -> its cube, or its one-element placeholder."""
    save_file({name: value.detach().contiguous().cpu() for name, value in parameters}, path)


def read_experts(path: Path) -> dict[str, torch.Tensor]:
    """The inverse of `write_experts`; raises CheckpointError if the file cannot be read."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
