"""DeepSpeed's own save and load, made to keep their errors and to read nothing while the engine changes.

[Note: what a pickle may do]
DeepSpeed's files are pickles, and opening one in full runs whatever it says. They are opened here with torch's
restricted reader and the three classes of DeepSpeed's that its states contain, so a file can make tensors, numbers,
text and those. A client state with other objects in it needs ``trusted=True``, which opens its file in full.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ruda_ds import _deepspeed
from ruda_ds.checkpoint.writer import sync_file
from ruda_ds.errors import CheckpointError

# What DeepSpeed puts beside a client state. A client's key of the same name would take its place.
RESERVED = frozenset(
    [
        *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
        *("optimizer", "lr_scheduler", "data_sampler", "random_ltd", "ds_config", "ds_version"),
        *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    ]
)
MODULE, FROZEN = "module", "frozen_param_fragments"


def own_files(names: Iterable[str], rank: int, zero_stage: int) -> tuple[str, str]:
    """(model states, optimizer states) of a rank among a tag's files.

    Raises:
        CheckpointError: one of them is not among the names.
    """
    model = rf"zero_pp_rank_{rank}_mp_rank_00_model_states\.pt" if zero_stage == 3 else r"mp_rank_00_model_states\.pt"
    patterns = (model, rf"(bf16_)?zero_pp_rank_{rank}_mp_rank_00_optim_states\.pt")
    found = []
    for pattern in patterns:
        matches = [name for name in names if re.fullmatch(pattern, name)]
        if len(matches) != 1:
            raise CheckpointError(f"the tag has {matches or 'no file'} for {pattern}, expected exactly one")
        found.append(matches[0])
    return found[0], found[1]


class KeepingIO:
    """A CheckpointEngine that saves as DeepSpeed's does and keeps the first error instead of raising it.

    Args:
        inner: DeepSpeed's own.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.written: list[Path] = []
        self.failure: Exception | None = None

    def keep(self, error: Exception) -> None:
        """Note an error; the first one counts."""
        self.failure = self.failure or error

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file and sync it."""
        if self.failure is None:
            try:
                self.inner.save(state_dict, path)
                sync_file(Path(path))
                self.written.append(Path(path))
            except Exception as error:
                self.keep(error)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        try:
            Path(path).mkdir(parents=True, exist_ok=exist_ok)
        except OSError as error:
            self.keep(error)

    def create(self, info: Any) -> None:
        """Nothing: the tag's folder is there."""

    def commit(self, info: Any) -> bool:
        """Nothing: the ranks have yet to agree."""
        return True

    def is_decoupled(self) -> bool:
        """Written when save returns."""
        return False

    def load(self, path: str, map_location: Any = None) -> Any:
        """Never called while saving."""
        raise CheckpointError(f"{path}: asked for while saving")


class ReadyIO(KeepingIO):
    """A CheckpointEngine that hands out what was read and checked before.

    Args:
        inner: DeepSpeed's own.
        states: file name -> content.
    """

    def __init__(self, inner: Any, states: dict[str, Any]) -> None:
        super().__init__(inner)
        self.states = states

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content that was read from this file."""
        return self.states[Path(path).name]


def require_plain_writer(engine: Any) -> None:
    """Raise CheckpointError for settings under which files are not in one folder when a save returns."""
    kind = type(engine.checkpoint_engine).__name__
    if kind != "TorchCheckpointEngine":
        raise CheckpointError(
            f"DeepSpeed config: the checkpoint engine is {kind}, expected TorchCheckpointEngine: remove "
            "checkpoint.writer, nebula or datastates_ckpt"
        )
    if engine.zero_elastic_checkpoint():
        raise CheckpointError(
            "DeepSpeed config: zero_optimization.elastic_checkpoint is true, expected false: ruda-convert reshard "
            "takes a checkpoint to another number of ranks"
        )
    if engine.use_node_local_storage():
        raise CheckpointError(
            "DeepSpeed config: checkpoint.use_node_local_storage is true, expected false: all ranks write into one "
            "folder"
        )


def check_client_state(client_state: dict[str, Any]) -> None:
    """Raise CheckpointError for a key that DeepSpeed uses itself."""
    taken = sorted(map(str, client_state.keys() & RESERVED))
    if taken:
        raise CheckpointError(f"client_state has the key {taken[0]!r}, which DeepSpeed uses itself; choose another")


def save(engine: Any, folder: Path, tag: str, client_state: dict[str, Any]) -> list[Path]:
    """``engine.save_checkpoint`` without ``latest``; a collective.

    Returns:
        The files that this rank wrote, synced.

    Raises:
        Exception: the first error of this rank, once all collectives are behind it.
    """
    io = KeepingIO(engine.checkpoint_engine)
    with _deepspeed.checkpoint_io(engine, io, io.keep):
        engine.save_checkpoint(str(folder), tag=tag, client_state=client_state, save_latest=False)
    if io.failure is not None:
        raise io.failure
    return io.written


def read(path: Path, trusted: bool) -> dict[str, Any]:
    """One of DeepSpeed's files; see [Note: what a pickle may do].

    Raises:
        CheckpointError: damaged, or with objects in it that only ``trusted=True`` would make.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            state = torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2].strip().partition("\n")[0] or str(error)
        raise CheckpointError(
            f"{path}: holds more than tensors and plain values ({reason[:200]}); if you know where it comes from, pass "
            "trusted=True to open it in full, which runs whatever it says"
        ) from None
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, expected a dictionary")
    return state


def load(engine: Any, folder: Path, tag: str, states: dict[str, Any]) -> dict[str, Any]:
    """``engine.load_checkpoint`` out of contents that were read before; a collective.

    Returns:
        The client state.
    """
    io = ReadyIO(engine.checkpoint_engine, states)
    with _deepspeed.checkpoint_io(engine, io, io.keep):
        path, client = engine.load_checkpoint(str(folder), tag=tag)
    if path is None:
        raise CheckpointError(f"{folder / tag}: DeepSpeed found nothing to load")
    return {key: value for key, value in client.items() if key not in RESERVED}


def check_states(engine: Any, where: Callable[[str], object], model: dict[str, Any], optim: dict[str, Any]) -> None:
    """Compare a rank's states with the live engine, in what DeepSpeed would find out after it has begun to change it.

    Args:
        where: "model" or "optimizer" -> what to call the file.

    Raises:
        CheckpointError: other names or shapes in the module, or other partitions.
    """
    live, saved = engine.module.state_dict(), model.get(MODULE) or {}
    if saved.keys() != live.keys():
        differing = sorted(saved.keys() ^ live.keys())
        raise CheckpointError(f"{where('model')}: another model: only one of them has {differing[:6]}")
    optimizer = _deepspeed.zero_optimizer(engine)
    parameters = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}
    for name, value in live.items():
        if name in parameters and _deepspeed.is_stage3(optimizer):
            continue  # released: empty in both
        if not isinstance(value, torch.Tensor) or not isinstance(saved[name], torch.Tensor):
            continue
        if value.shape != saved[name].shape:
            raise CheckpointError(
                f"{where('model')}: {name} is {tuple(saved[name].shape)}, expected {tuple(value.shape)}"
            )
    zero = optim.get("optimizer_state_dict") or {}
    masters = zero.get("fp32_flat_groups", zero.get("single_partition_of_fp32_groups", []))
    found, wanted = [part.numel() for part in masters], _deepspeed.master_sizes(optimizer)
    if found != wanted:
        raise CheckpointError(
            f"{where('optimizer')}: flat partitions of {found} elements, expected {wanted}: other optimizer groups or "
            "another sub_group_size"
        )
    if zero.get("ds_zero_partition_groups") != _deepspeed.partition_metadata(optimizer):
        raise CheckpointError(f"{where('optimizer')}: parameters are partitioned over other ranks than in this engine")
