"""What a tag holds: ``ruda_manifest.json``, written last, so that its presence says that the tag is complete.

Pure but for reading and hashing the files that it names. [Note: a tag on disk]

    DIR/latest                                        DeepSpeed's text file: the name of the last complete tag
    DIR/TAG/*_model_states.pt, *_optim_states.pt      DeepSpeed's own, unchanged
    DIR/TAG/ruda_pending_RRRRR-of-WWWWW.safetensors   pending shards of a rank: name -> 1-D unpadded float32 or float64
    DIR/TAG/ruda_rank_RRRRR-of-WWWWW.json             what else is a rank's own, see rank_files.py; all ranks or none
    DIR/TAG/ruda_experts_RRRRR-of-WWWWW.safetensors   below ZeRO-3 with ep_size > 1 only: experts of EP rank R, since
                                                      DeepSpeed then writes the module of rank 0 alone
    DIR/TAG/ruda_manifest.json                        this
    DIR/TAG.incomplete/                               a save that was interrupted
    DIR/TAG.replaced/                                 the earlier TAG, while a new one takes its place

EP rank p of global rank r is r % ep_size. The ranks with the same p hold copies of the same experts, and an expert
parameter is partitioned over those. A rank that owns no expert holds a one-element placeholder for each cube.

A manifest that matches its files shows that nothing was lost or altered by accident. It is no signature: whoever can
write the folder can write a manifest that matches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ruda_ds.accumulation.placement import ParameterPlacement
from ruda_ds.accumulation.record import read_window
from ruda_ds.accumulation.reshard import LogicalParameter, zero3_placement
from ruda_ds.accumulation.state import AccumulationState
from ruda_ds.checkpoint.writer import write_atomic
from ruda_ds.errors import CheckpointError, RecordError

FORMAT, VERSION = "ruda_ds checkpoint", 1
MANIFEST = "ruda_manifest.json"
HASH_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 (hexadecimal) of a file of the tag."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter of the model, trained or frozen.

    Attributes:
        name: the first under which ``module.named_parameters()`` yields it.
        shape: of the whole; of an expert cube [E, ...], of all experts.
        dtype: storage dtype, without "torch.".
        requires_grad: whether it is trained.
        experts: module name of the ExpertParallelMoE that it belongs to, if it is an expert's.
        index: place in ``module.named_parameters()``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    experts: str | None
    index: int

    @property
    def logical(self) -> LogicalParameter:
        """The same for the arithmetic of shards."""
        return LogicalParameter(self.name, self.shape, getattr(torch, self.dtype), self.requires_grad)


@dataclass(frozen=True)
class ExpertsEntry:
    """ep_size, and the ownership prefix of each ExpertParallelMoE by module name."""

    ep_size: int
    ownership: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelEntry:
    """The module's class; the transformers config in it, if any, and the module name where it was found."""

    class_name: str
    config: dict[str, Any] | None = None
    prefix: str = ""


@dataclass(frozen=True)
class Manifest:
    """The content of ``ruda_manifest.json``; see [Note: a tag on disk].

    Attributes:
        tag: as it was saved.
        zero_stage: 1, 2 or 3.
        world_size: ranks that saved.
        window: see `ruda_ds.accumulation.record.window_fields`.
        global_steps, micro_steps: DeepSpeed's counters.
        parameters: in the module's order.
        groups: names of the trainable parameters, by optimizer param group, in the order of the flat buffers.
        tied: second name of a tied parameter -> its first.
        experts: None without expert layers.
        model: see ModelEntry.
        optimizer, scheduler: class names of the torch optimizer and the scheduler; None without one.
        versions: of ruda_ds, deepspeed and torch.
        files: name -> FileEntry; every file of the tag but the manifest.
        adapters: module name of each LoRAExperts -> its "scale" (alpha / rank), and whether its cubes hold the adapters
            ("merged").
    """

    tag: str
    zero_stage: int
    world_size: int
    window: dict[str, Any]
    global_steps: int
    micro_steps: int
    parameters: tuple[ParameterEntry, ...]
    groups: tuple[tuple[str, ...], ...]
    tied: dict[str, str]
    experts: ExpertsEntry | None
    model: ModelEntry
    optimizer: str
    scheduler: str | None
    versions: dict[str, str]
    files: dict[str, FileEntry] = field(default_factory=dict)
    adapters: dict[str, dict[str, Any]] = field(default_factory=dict)

    # --- reading and writing --------------------------------------------------------------------------------

    def dumps(self) -> str:
        """As JSON text."""
        fields = asdict(self)
        model = fields.pop("model")
        fields["model"] = {"class": model["class_name"], "config": model["config"], "prefix": model["prefix"]}
        return json.dumps({"format": FORMAT, "version": VERSION, **fields}, indent=1)

    def write(self, folder: Path) -> None:
        """Write and sync the manifest under its name; the tag is complete from then on."""
        write_atomic(Path(folder) / MANIFEST, self.dumps().encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a tag's folder.

        Raises:
            CheckpointError: there is none, or not a valid one.
        """
        return cls.parse(read_text(Path(folder)), Path(folder) / MANIFEST)

    @classmethod
    def parse(cls, text: str, where: object = MANIFEST) -> Manifest:
        """The inverse of `dumps`; raises CheckpointError naming ``where``."""
        try:
            raw = json.loads(text)
            found = raw.get("format"), raw.get("version")
            if found != (FORMAT, VERSION):
                raise CheckpointError(f"{where}: format and version are {found}, expected {(FORMAT, VERSION)}")
            raw.setdefault("adapters", {})
            known = {name: raw[name] for name in cls.__dataclass_fields__}
            model, experts = known["model"], known["experts"]
            known["model"] = ModelEntry(model["class"], model.get("config"), model.get("prefix", ""))
            if experts is not None:
                ownership = {name: tuple(prefix) for name, prefix in experts["ownership"].items()}
                known["experts"] = ExpertsEntry(experts["ep_size"], ownership)
            known["parameters"] = tuple(
                ParameterEntry(**{**p, "shape": tuple(p["shape"])}) for p in known["parameters"]
            )
            known["groups"] = tuple(map(tuple, known["groups"]))
            known["files"] = {name: FileEntry(**entry) for name, entry in known["files"].items()}
            manifest = cls(**known)
            read_window(manifest.window)
        except (AttributeError, KeyError, TypeError, ValueError, RecordError) as error:
            raise CheckpointError(f"{where}: not a valid manifest ({type(error).__name__}: {error})") from None
        bad = [name for name in manifest.files if "/" in name or "\\" in name or name in ("", ".", "..", MANIFEST)]
        if bad:
            raise CheckpointError(f"{where}: names the file {bad[0]!r}, expected plain names inside of the tag")
        return manifest

    # --- what it says ---------------------------------------------------------------------------------------

    @property
    def state(self) -> AccumulationState:
        """The window's precision, scale and counters."""
        return read_window(self.window)[0]

    @property
    def loss(self) -> float | None:
        """The window's unscaled loss sum."""
        return read_window(self.window)[1]

    def prefix_of(self, parameter: ParameterEntry) -> tuple[int, ...] | None:
        """The ownership of an expert parameter; None for any other."""
        if parameter.experts is None or self.experts is None:
            return None
        return self.experts.ownership[parameter.experts]

    def placement(
        self, rank: int, fragments: Mapping[str, tuple[int, int]] | None = None
    ) -> tuple[ParameterPlacement, ...]:
        """A rank's placement of every floating parameter, sorted by name.

        Args:
            fragments: below ZeRO-3, where shards follow from DeepSpeed's flat groups: the rank's own, by name.

        Raises:
            RecordError: an ownership that does not fit the world.
        """
        made = []
        for entry in self.parameters:
            place = zero3_placement(entry.logical, rank, self.world_size, self.prefix_of(entry))
            if self.zero_stage < 3:
                fragment = tuple((fragments or {}).get(entry.name, (0, 0)))
                place = ParameterPlacement(**{**vars(place), "fragment": fragment})
            made.append(place)
        return tuple(sorted(made, key=lambda place: place.name))

    # --- the files that it names ----------------------------------------------------------------------------

    def check_files(self, folder: Path, sizes_only: bool = False) -> None:
        """Compare the folder with what the manifest says of it: presence, sizes, then (unless told not to) content.

        Raises:
            CheckpointError: a file is missing, has another size or another checksum, or is one rank's too many.
        """
        self.check_sizes(Path(folder))
        if not sizes_only:
            self.check_sums(Path(folder), self.files)

    def check_sizes(self, folder: Path) -> None:
        """The part of `check_files` that opens no file."""
        present = {path.name: path for path in folder.iterdir() if path.is_file()}
        for name, entry in self.files.items():
            if name not in present:
                raise CheckpointError(f"{folder / name}: missing, expected a file of {entry.bytes:,} bytes")
            size = present[name].stat().st_size
            if size != entry.bytes:
                kind = "truncated" if size < entry.bytes else "altered"
                raise CheckpointError(f"{folder / name}: {kind}, {size:,} bytes, expected {entry.bytes:,}")
        for name in sorted(present.keys() - self.files.keys() - {MANIFEST}):
            if name.endswith("_states.pt") or name.startswith("ruda_"):
                raise CheckpointError(
                    f"{folder / name}: not in the manifest, which is of {self.world_size} ranks: another save's file, "
                    "or one rank's too many"
                )

    def check_sums(self, folder: Path, names: Iterable[str]) -> None:
        """Hash these files; raises CheckpointError at the first whose content is not what was saved."""
        for name in names:
            found = sha256_of(folder / name)
            if found != self.files[name].sha256:
                raise CheckpointError(
                    f"{folder / name}: content was altered, sha256 {found[:16]}..., expected "
                    f"{self.files[name].sha256[:16]}..."
                )


def read_text(folder: Path) -> str:
    """The manifest's text; raises CheckpointError where there is none."""
    path = folder / MANIFEST
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: no such file: the tag is incomplete, or not saved by ruda_ds (engine.load_checkpoint loads what "
            "DeepSpeed alone has saved)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()
