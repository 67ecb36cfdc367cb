"""What an unfinished conversion has written, and out of what: ``journal.json`` in its folder.

It is replaced by a rename after each file: a kill or a power cut at any moment leaves the old one or the new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import ruda_ds
from ruda_ds.checkpoint.hf import Shard
from ruda_ds.checkpoint.writer import write_atomic

FORMAT, VERSION = "ruda_ds unfinished conversion", 1
JOURNAL = "journal.json"


@dataclass(frozen=True)
class Identity:
    """What decides the bytes of a conversion's files: two that are equal write the same.

    Attributes:
        plan: what is written; of safetensors files the last entry is a checksum of all recipes, and those before it
            are for people.
        source: name of each file of tensors -> size, mtime in ns, inode. The inode tells a file that another took the
            place of with its time stamp, as ``cp -p`` does; a file system that deals new inodes at each mount costs a
            fresh start, never a wrong file.
    """

    plan: dict[str, Any]
    source: dict[str, list[int]]

    def difference(self, earlier: Identity) -> str | None:
        """How an earlier conversion was another ("is of another plan: ..."); None if it was not."""
        for what, now, then in (("plan", self.plan, earlier.plan), ("source", self.source, earlier.source)):
            for name in [*now, *(then.keys() - now.keys())]:
                if now.get(name) != then.get(name):
                    return f"is of another {what}: {name} {then.get(name)}, now {now.get(name)}"
        return None


def identity_of(command: str, plan: Mapping[str, Any], paths: Iterable[Path]) -> Identity:
    """That of a conversion.

    Args:
        command: of ``ruda-convert``.
        plan: what else decides what is written; JSON values.
        paths: the files that tensors are read from; in one folder.
    """
    # Another version may lay out files, or round a merge of adapters, in another way.
    made = {"command": command, "versions": f"ruda_ds {ruda_ds.__version__}, torch {torch.__version__}", **plan}
    return Identity(made, {path.name: _stamp(path) for path in sorted(paths)})


def plan_of_shards(shards: Sequence[Shard], metadata: Mapping[str, str]) -> dict[str, Any]:
    """What `identity_of` is told of a conversion to safetensors files with this metadata in each."""
    digest = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for shard in shards:
        digest.update(shard.name.encode())
        for recipe, dtype in shard.tensors:  # one after another: all at once would take memory
            digest.update(repr((recipe, dtype)).encode())
    return {
        "dtypes": sorted({str(dtype).removeprefix("torch.") for shard in shards for _, dtype in shard.tensors}),
        "tensors": sum(len(shard.tensors) for shard in shards),
        "bytes": sum(shard.nbytes for shard in shards),
        "files": len(shards),
        "sha256 of all recipes": digest.hexdigest(),
    }


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


@dataclass
class Journal:
    """The content of ``journal.json``.

    Attributes:
        identity: of the conversion.
        complete: name of a file that is complete and synced -> "bytes", and "sha256" where the conversion needs it.
    """

    identity: Identity
    complete: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, partial: Path) -> None:
        """Replace the journal of a folder and sync it."""
        write_atomic(partial / JOURNAL, json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode())

    @classmethod
    def read(cls, partial: Path) -> Journal | None:
        """That of a folder; None if there is no valid one.

        Raises:
            OSError: it is there and cannot be read.
        """
        try:
            raw = json.loads((partial / JOURNAL).read_text(encoding="utf-8"))
            if (raw["format"], raw["version"]) != (FORMAT, VERSION):
                return None
            found = {
                str(name): {"bytes": int(e["bytes"]), "sha256": e["sha256"]} for name, e in raw["complete"].items()
            }
            identity = raw["identity"]
            return cls(Identity(dict(identity["plan"]), dict(identity["source"])), found)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return None
