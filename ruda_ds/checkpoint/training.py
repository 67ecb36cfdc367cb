"""Save and load a training job at any micro-batch boundary.

A checkpoint is DeepSpeed's own, with the pending window beside it; see [Note: a tag on disk] in manifest.py for the
files, and [Note: the order of a save] in writer.py for why an interrupted save loses nothing.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ruda_ds import _deepspeed
from ruda_ds.accumulation import GradientAccumulator
from ruda_ds.accumulation.placement import digest
from ruda_ds.accumulation.record import RECORD_VERSION, PendingGradientsRecord, window_fields
from ruda_ds.checkpoint import rank_files, stock
from ruda_ds.checkpoint.agreement import agree, on_first, require_same
from ruda_ds.checkpoint.describe import check_placement, check_run, describe, expert_modules, whole_expert_shapes
from ruda_ds.checkpoint.manifest import MANIFEST, FileEntry, Manifest, read_text, sha256_of
from ruda_ds.checkpoint.writer import TagFolder, check_tag, interrupted, locate, sync_file
from ruda_ds.errors import CheckpointError

logger = logging.getLogger("ruda_ds")


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a job, and which this is."""

    group: dist.ProcessGroup
    rank: int
    world: int


def _ranks(engine: Any) -> _Ranks:
    group = _deepspeed.data_parallel_group(_deepspeed.zero_optimizer(engine))
    return _Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def _accumulator(engine: Any) -> GradientAccumulator:
    accumulator = vars(engine).get("accumulator")
    if accumulator is None:
        raise CheckpointError("the engine has no accumulator: make it with ruda_ds.initialize, or call ruda_ds.attach")
    return accumulator


def _root(folder: str | Path) -> Path:
    root = Path(folder).absolute()
    if glob.escape(str(root)) != str(root):
        raise CheckpointError(f"{root}: expected a path without *, ? and [, since DeepSpeed looks for files by pattern")
    return root


# --- saving -----------------------------------------------------------------------------------------------------


def save_checkpoint(
    engine: Any, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None
) -> Path:
    """Save model, optimizer, scheduler and the pending window; every rank calls it, at any micro-batch boundary.

    Nothing changes in memory. The tag appears, and ``latest`` names it, only once every rank has written and synced
    all of its files; until then, and after a kill at any moment, the last complete tag loads.

    Args:
        engine: with an accumulator.
        save_dir: folder of all tags, one that all ranks see.
        tag: name of this one, the same on every rank; None: ``global_stepN``, in a window ``global_stepN_microM``. An
            earlier tag of this name is replaced.
        client_state: as DeepSpeed's: a rank's own under ZeRO-3, the first rank's below it. Tensors, numbers, text and
            containers of them load again as they are; other objects need ``trusted=True`` then.

    Returns:
        The tag's folder.

    Raises:
        CheckpointError: on every rank, with the first error of any rank; the last complete tag and ``latest`` are as
            they were.
    """
    ranks = _ranks(engine)
    client = dict(client_state or {})

    prepared: list[_Prepared] = []  # stays here: only what the others need travels

    def prepare() -> dict[str, tuple[int, ...]]:
        prepared.append(_prepare(engine, save_dir, tag, client))
        return whole_expert_shapes(engine)

    shapes = {name: shape for part in agree(ranks.group, prepare) for name, shape in part.items()}
    root, name, record = prepared[0].root, prepared[0].tag, prepared[0].record
    window = window_fields(record.state, record.loss)
    require_same(
        ranks.group, {"folder": str(root), "tag": name, "placement (hash)": digest(record.placement), **window}
    )
    manifest = describe(engine, name, record, shapes)
    place = TagFolder(root, name)
    try:
        on_first(ranks.group, place.begin)
        parts = agree(ranks.group, lambda: _write_own(engine, place, manifest, record, client, ranks))
        files = {name: entry for part in parts for name, entry in part.items()}

        def publish() -> None:
            replace(manifest, files=dict(sorted(files.items()))).write(place.incomplete)
            place.commit()

        on_first(ranks.group, publish)
    except CheckpointError:
        if ranks.rank == 0:
            place.abandon()
        raise
    return place.final


@dataclass(frozen=True)
class _Prepared:
    """What a rank has found in order before anything is written."""

    root: Path
    tag: str
    record: PendingGradientsRecord


def _prepare(engine: Any, save_dir: str | Path, tag: str | None, client: dict[str, Any]) -> _Prepared:
    stock.require_plain_writer(engine)
    stock.check_client_state(client)
    record = _accumulator(engine).live_record()
    micro = f"_micro{record.state.microbatches}" if record.state.microbatches else ""
    name = check_tag(f"global_step{engine.global_steps}{micro}" if tag is None else tag)
    return _Prepared(_root(save_dir), name, record)


def _write_own(
    engine: Any, place: TagFolder, manifest: Manifest, record: PendingGradientsRecord, client: dict, ranks: _Ranks
) -> dict[str, FileEntry]:
    """Write, sync and hash this rank's files. DeepSpeed's part is a collective and comes first, errors or not."""
    written = stock.save(engine, place.root, place.incomplete.name, client)
    folder, rank, world = place.incomplete, ranks.rank, ranks.world
    pending = folder / rank_files.pending_name(rank, world)
    rank_files.write_pending(pending, record, rank, world)
    other = folder / rank_files.rank_name(rank, world)
    fragments = None
    if manifest.zero_stage < 3:
        fragments = {p.name: p.fragment for p in record.placement}
    layers = expert_modules(engine.module).items()
    tallies = {kind: {name: getattr(layer, kind).tolist() for name, layer in layers} for kind in rank_files.TALLIES}
    shares = {name: None if layer.expert_shares is None else layer.expert_shares.tolist() for name, layer in layers}
    content = {"rng": rank_files.random_states(), "fragments": fragments, "expert_shares": shares, **tallies}
    rank_files.write_rank(other, rank, world, content)
    own = [pending, other]
    if _writes_experts(manifest) and manifest.experts is not None and rank < manifest.experts.ep_size:
        own.append(folder / rank_files.experts_name(rank, world))
        named = dict(engine.module.named_parameters())
        rank_files.write_experts(
            own[-1], ((p.name, named[p.name]) for p in manifest.parameters if p.experts is not None)
        )
    for path in own:
        sync_file(path)
    return {path.name: FileEntry(path.stat().st_size, sha256_of(path)) for path in [*written, *own]}


def _writes_experts(manifest: Manifest) -> bool:
    """Whether experts lie in files of ours: below ZeRO-3 DeepSpeed writes the first rank's module for all."""
    return manifest.zero_stage < 3 and manifest.experts is not None and manifest.experts.ep_size > 1


# --- loading ----------------------------------------------------------------------------------------------------


def load_checkpoint(
    engine: Any,
    load_dir: str | Path,
    tag: str | None = None,
    *,
    trusted: bool = False,
    checksums: bool = True,
    restore_rng: bool = True,
) -> tuple[Path, dict[str, Any]]:
    """Continue from a tag of `save_checkpoint`, in mid-window too, bit for bit; every rank calls it.

    Everything is read and compared with the engine before anything changes: the folder's files, their sizes and
    checksums, the world, the model, the optimizer's groups, the window's precision and loss scale. A matching checksum
    shows that a file is as it was saved, not who saved it: whoever can write the folder can write a manifest that fits.

    Args:
        engine: made as the one that saved: model, optimizer, scheduler, world, ownership.
        load_dir: folder of all tags.
        tag: name; None: the one that ``latest`` names.
        trusted: open DeepSpeed's files in full, which runs whatever code they carry. Needed only for a client state
            with objects other than tensors, numbers, text and containers of them.
        checksums: compare the content of every file; sizes are compared in any case.
        restore_rng: put back each rank's random states (torch, accelerator, random, numpy).

    Returns:
        The tag's folder and the client state.

    Raises:
        CheckpointError: on every rank alike; it names the file, what was expected and what was found, and the engine is
            as it was.
    """
    ranks = _ranks(engine)

    def find() -> tuple[str, str]:
        root = _root(load_dir)
        for path in interrupted(root):
            logger.warning("%s: an interrupted save, not used", path)
        folder = locate(root, tag)
        text = read_text(folder)
        Manifest.parse(text, folder / MANIFEST).check_sizes(folder)
        return str(folder), text

    location, text = on_first(ranks.group, find)
    folder, ready = Path(location), []
    agree(ranks.group, lambda: ready.append(_read_own(engine, folder, text, ranks, trusted, checksums)))
    loaded = ready[0]
    client = stock.load(engine, folder.parent, folder.name, loaded.states)
    engine.micro_steps = loaded.manifest.micro_steps
    _accumulator(engine).load_record(loaded.record)
    if loaded.other is not None:
        for name, layer in expert_modules(engine.module).items():
            for kind in (*rank_files.TALLIES, "expert_shares"):
                own, saved = getattr(layer, kind), loaded.other[kind].get(name)
                if own is not None and saved is not None:
                    own.copy_(torch.tensor(saved, dtype=own.dtype))
        if restore_rng and loaded.other["rng"] is not None:
            rank_files.set_random_states(loaded.other["rng"])
    return folder, client


@dataclass(frozen=True)
class _Loaded:
    """What a rank has read and checked, before it changes anything."""

    manifest: Manifest
    states: dict[str, Any]
    record: PendingGradientsRecord
    other: dict[str, Any] | None


def _read_own(engine: Any, folder: Path, text: str, ranks: _Ranks, trusted: bool, checksums: bool) -> _Loaded:
    """Read this rank's files and compare them with the engine; changes nothing."""
    accumulator, rank, world = _accumulator(engine), ranks.rank, ranks.world
    stock.require_plain_writer(engine)
    where = folder / MANIFEST
    manifest = Manifest.parse(text, where)
    check_run(engine, manifest, where)
    if checksums:  # every file once, whoever reads it
        manifest.check_sums(folder, sorted(manifest.files)[rank::world])
    other = _read_rank(folder, manifest, rank)
    fragments = other and other["fragments"]
    if manifest.zero_stage < 3 and fragments is None:
        raise CheckpointError(f"{folder / rank_files.rank_name(rank, world)}: no fragments, expected them below ZeRO-3")
    check_placement(engine, manifest, where, rank, fragments)
    name = rank_files.pending_name(rank, world)
    if name not in manifest.files:
        raise CheckpointError(f"{where}: does not name {name}, expected one for each rank")
    gradients = rank_files.read_pending(folder / name, rank, world, manifest.window)
    record = PendingGradientsRecord(RECORD_VERSION, gradients, manifest.state, accumulator.placement, manifest.loss)
    accumulator.check_record(record)
    model, optimizer = stock.own_files(manifest.files, rank, manifest.zero_stage)
    states = {name: stock.read(folder / name, trusted) for name in (model, optimizer)}
    if _writes_experts(manifest) and manifest.experts is not None:
        _put_experts(states[model], folder / rank_files.experts_name(rank % manifest.experts.ep_size, world))
    stock.check_states(
        engine, {"model": folder / model, "optimizer": folder / optimizer}.__getitem__, states[model], states[optimizer]
    )
    return _Loaded(manifest, states, record, other)


def _read_rank(folder: Path, manifest: Manifest, rank: int) -> dict[str, Any] | None:
    """A rank's JSON file; None where no rank has one, as after a change of topology."""
    names = [rank_files.rank_name(other, manifest.world_size) for other in range(manifest.world_size)]
    present = [name in manifest.files for name in names]
    if not any(present):
        return None
    if not all(present):
        raise CheckpointError(
            f"{folder / names[present.index(False)]}: missing, expected one for each rank or for none"
        )
    return rank_files.read_rank(folder / names[rank], rank, manifest.world_size)


def _put_experts(model: dict[str, Any], path: Path) -> None:
    """This rank's experts in place of the first rank's, which DeepSpeed has saved for all."""
    for name, cube in rank_files.read_experts(path).items():
        for part in (stock.MODULE, stock.FROZEN):
            if name in (model.get(part) or {}):
                model[part][name] = cube
