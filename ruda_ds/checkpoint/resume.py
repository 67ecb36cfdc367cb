"""Conversions that go on where an earlier run of the same command was interrupted, file by file.

[Note: what an interruption leaves]
A kill, a power cut, Ctrl-C, a full disk or any other error that is not the source's leaves ``.OUT.partial`` with the
files that are complete and a journal of them; the same command takes those over and writes the rest. With none complete
nothing is left. A source that is found damaged leaves nothing either: what was made of it is not to be built upon.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruda_ds.checkpoint.hf import Shard, write_shard
from ruda_ds.checkpoint.journal import Identity, Journal
from ruda_ds.checkpoint.manifest import sha256_of
from ruda_ds.checkpoint.recipes import Source
from ruda_ds.checkpoint.unfinished import LOCK, RESULT, clear, held, publish
from ruda_ds.errors import RudaError, UnfinishedError

Note = Callable[[str], None]


def silent(text: str) -> None:
    """A Note that nobody reads."""


class Growing:
    """The folder of a conversion that has begun, perhaps in an earlier process.

    Args:
        partial: what `unfinished.held` gives.
        identity: of the conversion.
        note: told what the user should know.
    """

    def __init__(self, partial: Path, identity: Identity, note: Note) -> None:
        self.partial, self.folder, self._note = partial, partial / RESULT, note
        self._journal, self._lock = Journal(identity), threading.Lock()
        earlier = Journal.read(partial)
        self._reason: str | None = None
        if earlier is not None:
            self._reason = identity.difference(earlier.identity)
        elif any(path.name != LOCK for path in partial.iterdir()):
            self._reason = "has no journal that can be read"
        if earlier is not None and self._reason is None:
            self._journal.complete |= {name: e for name, e in earlier.complete.items() if self._is_whole(name, e)}

    @property
    def complete(self) -> dict[str, dict[str, Any]]:
        """Name -> "bytes" and "sha256" (or None) of the files that are complete."""
        return self._journal.complete

    def _is_whole(self, name: str, entry: dict[str, Any]) -> bool:
        # By size alone. The journal named the file after it was synced, so no kill and no power cut can have left it
        # with other bytes; hashing terabytes again would take the hours that going on is to save. Its time stamp may
        # be another: a full disk is a reason to copy the folder to a larger one.
        path = self.folder / name
        found, expected = f"{path.stat().st_size} bytes" if path.is_file() else "no file", f"{entry['bytes']} bytes"
        if found != expected:
            self._note(f"{path}: found {found}, expected {expected}, as when it was complete: written again")
        return found == expected

    def begin(self, total: int) -> None:
        """Keep what is complete of ``total`` files, and delete the rest."""
        if self._reason is not None:
            self._note(f"started afresh: {self.partial} {self._reason}")
            clear(self.partial)
        self.folder.mkdir(exist_ok=True)
        self._sweep()
        self._journal.write(self.partial)
        if self.complete:
            self._note(f"going on: {len(self.complete)} of {total} files are complete")

    def _sweep(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in self.complete:
                path.unlink()

    def add(self, name: str, sha256: str | None) -> None:
        """Note that a file, its name relative to ``folder``, is complete and synced. Any thread may."""
        entry = {"bytes": (self.folder / name).stat().st_size, "sha256": sha256}
        with self._lock:
            longer = Journal(self._journal.identity, {**self.complete, name: entry})
            longer.write(self.partial)
            self._journal = longer  # only now: the disk may be full

    def leave(self, error: BaseException, total: int) -> BaseException:
        """Keep the files that are complete, if any; the error to be raised, which says so where it can."""
        if not self.complete:
            clear(self.partial)
            return error
        with contextlib.suppress(OSError):
            self._sweep()  # of a full disk, the file that has no room
        if isinstance(error, OSError):
            return UnfinishedError(str(error), self.partial, len(self.complete), total)
        if isinstance(error, KeyboardInterrupt):
            return KeyboardInterrupt(str(UnfinishedError("interrupted", self.partial, len(self.complete), total)))
        return error


@contextmanager
def growing(target: Path, identity: Identity, total: int, note: Note) -> Iterator[Growing]:
    """A folder to write into that takes its name ``target`` only when the block ends without an error.

    See [Note: what an interruption leaves].

    Args:
        total: files that are taken over if they are complete.

    Raises:
        CheckpointError: ``target`` is there already and not empty, another process converts to it, or the source is
            damaged.
        UnfinishedError: an OSError, such as a full disk, with complete files left to go on from.
    """
    with held(target) as partial:
        result = Growing(partial, identity, note)
        try:
            result.begin(total)
            yield result
            publish(result.folder, target)
        except RudaError:
            clear(partial)
            raise
        except BaseException as error:
            left = result.leave(error, total)
            if left is error:
                raise
            raise left from error
        clear(partial)


def write_shards(
    result: Growing,
    shards: Sequence[Shard],
    source: Source,
    metadata: dict[str, str],
    advance: Callable[[int], None],
    hashed: bool = False,
) -> None:
    """Write the files that are not complete.

    Args:
        advance: told the bytes of tensors: those that are taken over at once, the others as they are written.
        hashed: note the sha256 of each; read back while the file is still in memory, which costs least.
    """
    advance(sum(shard.nbytes for shard in shards if shard.name in result.complete))
    for shard in shards:
        if shard.name not in result.complete:
            write_shard(result.folder, shard, source, metadata, advance)
            result.add(shard.name, sha256_of(result.folder / shard.name) if hashed else None)
