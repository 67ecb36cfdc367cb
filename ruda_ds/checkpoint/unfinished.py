"""The folder in which a conversion's result grows until it takes its name; one process at a time writes there.

    .OUT.partial/lock            held by the process that writes, and naming it
    .OUT.partial/result/         what takes the name OUT at the end
    .OUT.partial/journal.json    of conversions that go on after an interruption; see `journal`

The lock is the kernel's (flock): it ends with its process, however that ends, so a killed one blocks nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ruda_ds.checkpoint.reader import damaged
from ruda_ds.checkpoint.writer import sync_folder
from ruda_ds.errors import CheckpointError

LOCK, RESULT = "lock", "result"
_TAKEN = (errno.EAGAIN, errno.EACCES)  # the latter from NFS, where flock is a record lock


def check_free(target: Path) -> None:
    """Raise CheckpointError if ``target`` is there already and is not an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise damaged(target, "no such folder, or an empty one", "something there already")


@contextmanager
def held(target: Path) -> Iterator[Path]:
    """The folder beside ``target`` for what is not finished, locked; it goes away at the end if nothing is left in it.

    Raises:
        CheckpointError: ``target`` is there already and not empty, or another process holds the folder.
    """
    check_free(target)
    partial = target.parent / f".{target.name}.partial"
    lock = _lock(partial)
    try:
        check_free(target)  # the process that held the lock before may have finished
        yield partial
    finally:
        with contextlib.suppress(OSError):
            if os.listdir(partial) == [LOCK]:
                (partial / LOCK).unlink()
                partial.rmdir()
        os.close(lock)


def _lock(partial: Path) -> int:
    """An open descriptor of the folder's lock, held."""
    while True:
        try:
            partial.mkdir(parents=True, exist_ok=True)
            lock = os.open(partial / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except (FileNotFoundError, FileExistsError):
            if partial.exists() and not partial.is_dir():
                raise
            continue  # its holder has ended just now and has taken the folder away
        try:
            _take(lock, partial)
            if _is_at(lock, partial / LOCK):
                with contextlib.suppress(OSError):  # a full disk: the name is for a message only
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # of a file that its holder has removed since: whoever comes next would lock another


def _take(lock: int, partial: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _TAKEN:  # such as Lustre mounted without flock: no reason not to convert
            warnings.warn(
                f"{partial}: the file system has no locks ({error.strerror}); see that nothing else writes there",
                stacklevel=4,
            )
            return
        holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
        raise CheckpointError(
            f"{partial}: held by {holder}, which converts to the same target; expected no other conversion to it: wait "
            "for that one, or stop it"
        ) from None


def _is_at(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False


def clear(partial: Path) -> None:
    """Delete all but the lock, which must stay until nothing else is there: it says that somebody is at work.

    What cannot be deleted stays: no reason to fail once the result has its name, or to hide the error before it.
    """
    with contextlib.suppress(OSError):
        for path in list(partial.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)


def publish(result: Path, target: Path) -> None:
    """Give a complete folder, whose files are synced, its name."""
    sync_folder(result)
    if target.exists():
        target.rmdir()
    result.rename(target)
    sync_folder(target.parent)
