"""Folders of safetensors: read by byte range, written tensor by tensor, under a temporary name until all is there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ruda_ds.checkpoint.reader import FILES, bytes_of, damaged
from ruda_ds.checkpoint.recipes import Recipe, Source
from ruda_ds.checkpoint.writer import sync_file
from ruda_ds.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
# What a folder may hold beside its weights that a loader needs.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "LICENSE",
)


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file.

    Attributes:
        path: of the file.
        dtype, shape: of the tensor.
        begin: of its bytes in the file.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """(tensors, metadata) of a safetensors file; reads its header only.

    Raises:
        CheckpointError: cut short, overlapping or damaged.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise damaged(path, f"a header of {length} bytes", f"a file of {size}")
            header = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", {})
        entries, place = {}, 0
        for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
            begin, end = item["data_offsets"]
            dtype, shape = DTYPES[item["dtype"]], tuple(item["shape"])
            if begin != place or end - begin != torch.Size(shape).numel() * dtype.itemsize:
                raise damaged(path, f"{name} {shape} at byte {place}", f"bytes {begin}..{end}")
            entries[name] = Entry(path, dtype, shape, 8 + length + begin)
            place = end
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise damaged(path, "a safetensors file", f"{type(error).__name__}: {error}") from error
    if size != 8 + length + place:
        raise damaged(path, f"{8 + length + place} bytes", f"{size}")
    return entries, metadata


class SafetensorsSource:
    """The tensors of some safetensors files as one Source.

    Args:
        entries: by name.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)

    @property
    def paths(self) -> set[Path]:
        """The files that they are in."""
        return {entry.path for entry in self.entries.values()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See Source."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        """See Source."""
        return self.entries[name].dtype

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """See Source."""
        entry = self.entries[name]
        flat = torch.empty(count, dtype=entry.dtype)
        if count:
            FILES.read_into(entry.path, entry.begin + start * entry.dtype.itemsize, flat)
        return flat


def open_folder(folder: Path) -> SafetensorsSource:
    """All tensors of a Hugging Face folder.

    Raises:
        CheckpointError: no weights, a shard that is missing or damaged, or an index that does not agree with them.
    """
    index = folder / INDEX
    if not index.exists():
        paths = sorted(folder.glob("*.safetensors"))
        if len(paths) != 1:
            raise damaged(folder, f"one .safetensors file, or {INDEX}", f"{len(paths)} files")
        return SafetensorsSource(read_header(paths[0])[0])
    try:
        where = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise damaged(index, "a weight_map", f"{type(error).__name__}: {error}") from error
    entries: dict[str, Entry] = {}
    for shard in sorted(set(where.values())):
        found = read_header(folder / shard)[0]
        listed = {name for name, file in where.items() if file == shard}
        if listed != set(found):
            wrong = sorted(listed ^ set(found))
            raise damaged(folder / shard, f"the tensors that {INDEX} lists", f"a difference in {', '.join(wrong[:8])}")
        entries.update(found)
    return SafetensorsSource(entries)


@dataclass(frozen=True)
class Shard:
    """A file to be written: recipes and the dtype of each."""

    name: str
    tensors: tuple[tuple[Recipe, torch.dtype], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(recipe.numel * dtype.itemsize for recipe, dtype in self.tensors)


class Planned:
    """A conversion whose files are known before one is written."""

    shards: list[Shard]

    def files(self) -> list[tuple[str, int, int]]:
        """(name, bytes of tensors, tensors) of what will be written."""
        return [(shard.name, shard.nbytes, len(shard.tensors)) for shard in self.shards]

    @property
    def nbytes(self) -> int:
        """Bytes that will be written."""
        return sum(shard.nbytes for shard in self.shards)


def plan_shards(tensors: Sequence[tuple[Recipe, torch.dtype]], limit: int, stem: str = "model") -> list[Shard]:
    """Deal tensors, in order, to files of at most ``limit`` bytes (a larger tensor gets its own)."""
    groups: list[list[tuple[Recipe, torch.dtype]]] = [[]]
    size = 0
    for recipe, dtype in tensors:
        nbytes = recipe.numel * dtype.itemsize
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append((recipe, dtype))
        size += nbytes
    if len(groups) == 1:
        return [Shard(f"{stem}.safetensors", tuple(groups[0]))]
    total = len(groups)
    return [Shard(f"{stem}-{i + 1:05d}-of-{total:05d}.safetensors", tuple(g)) for i, g in enumerate(groups)]


def write_shard(
    folder: Path,
    shard: Shard,
    source: Source,
    metadata: Mapping[str, str],
    advance: Callable[[int], None],
    allow_empty: bool = False,
) -> None:
    """Write one safetensors file; in the order of the safetensors library: wide dtypes first, then by name.

    Raises:
        CheckpointError: a tensor without elements, unless ``allow_empty``.
    """
    order = sorted(shard.tensors, key=lambda pair: (-pair[1].itemsize, pair[0].name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    place = 0
    for recipe, dtype in order:
        if not recipe.numel and not allow_empty:
            raise damaged(folder / shard.name, f"elements in {recipe.name}", "none")
        end = place + recipe.numel * dtype.itemsize
        header[recipe.name] = {"dtype": _NAMES[dtype], "shape": list(recipe.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / shard.name, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for recipe, dtype in order:
            for chunk in recipe.chunks(source, dtype):
                stream.write(bytes_of(chunk))
                advance(chunk.numel() * dtype.itemsize)
        stream.flush()
        os.fsync(stream.fileno())


def write_index(folder: Path, shards: Sequence[Shard]) -> None:
    """The index of several shards; nothing for one."""
    if len(shards) < 2:
        return
    where = {recipe.name: shard.name for shard in shards for recipe, _ in shard.tensors}
    total = {"total_size": sum(shard.nbytes for shard in shards)}
    write_text(folder / INDEX, json.dumps({"metadata": total, "weight_map": dict(sorted(where.items()))}, indent=2))


def write_text(path: Path, text: str, end: str = "\n") -> None:
    """Write a small file to the disk itself."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text + end)
        stream.flush()
        os.fsync(stream.fileno())


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy configuration and tokenizer files that are there; their names."""
    names = [name for name in SIDE_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
        sync_file(target / name)
    return names
