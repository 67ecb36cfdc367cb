"""One builder at a time: a lock file that says who holds it, and is recognised as dead when its owner is gone.

Works between processes and, on a shared folder, between machines. It is made by `os.link`, which either succeeds or
finds the file there, on network file systems too. The holder touches the file every few seconds: a waiter on another
machine, which cannot ask for the process, takes a lock that stays still for `SILENT_S` of its own clock for dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruda_ds.errors import BuildError

BEAT_S = 5.0
# Network file systems may show an old time stamp for a minute; three times that, and many beats.
SILENT_S = 180.0
WAIT_S = 1800.0
ANNOUNCE_S = 3.0


def say(message: str) -> None:
    """A line on standard error, at once: a build must not look like a hang."""
    print(f"ruda_ds: {message}", file=sys.stderr, flush=True)


def machine_name() -> str:
    """Host, boot and process-number space: only where all are the same does a process number mean the same."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def started(pid: int) -> str | None:
    """When a process of this machine began (kernel ticks), "" where the system does not tell; None if it is gone."""
    try:
        # The name in parentheses may hold spaces: count the fields after the last one. A zombie is gone.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


def owner_text() -> str:
    """What a holder writes into its lock."""
    pid = os.getpid()
    return json.dumps({"machine": machine_name(), "pid": pid, "started": started(pid), "token": uuid.uuid4().hex})


def read_owner(lock: Path) -> dict[str, Any] | None:
    """The owner of a lock; None if there is no lock, an empty dict if what is there was not written by us."""
    try:
        found = json.loads(lock.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) and {"machine", "pid", "started", "token"} <= set(found) else {}


def describe(owner: dict[str, Any]) -> str:
    """An owner in words."""
    return f"process {owner['pid']} on {owner['machine'].split()[0]}" if owner else "an unknown process"


def is_gone(owner: dict[str, Any], silent_s: float) -> bool:
    """Whether a lock's owner no longer exists; ``silent_s``: for how long the lock has stayed as it is."""
    if owner and owner["machine"] == machine_name():
        return started(int(owner["pid"])) != owner["started"]
    return silent_s >= SILENT_S


def _create(lock: Path, text: str) -> bool:
    """Make the lock with its owner in it, in one step; False if it is there already."""
    draft = lock.with_name(f"{lock.name}.{uuid.uuid4().hex}")
    draft.write_text(text)
    try:
        os.link(draft, lock)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        try:
            with open(lock, "x") as file:
                file.write(text)
        except FileExistsError:
            return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _remove_dead(lock: Path, owner: dict[str, Any]) -> None:
    """Remove a dead lock, unless another waiter has done so and a new owner has it now."""
    guard = lock.with_name(f"{lock.name}.removing")
    with contextlib.suppress(FileNotFoundError):
        if time.time() - guard.stat().st_mtime > SILENT_S:
            guard.unlink(missing_ok=True)
    if not _create(guard, owner_text()):
        return
    try:
        if read_owner(lock) == owner:
            say(f"removed the lock {lock}: {describe(owner)}, which held it, is gone")
            lock.unlink(missing_ok=True)
    finally:
        guard.unlink(missing_ok=True)


def _mtime(lock: Path) -> float | None:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:
        return None


def _wait(lock: Path, what: str, limit_s: float) -> set[str]:
    """Take the lock; returns the tokens of those waited for. Announces the wait, and gives up after ``limit_s``."""
    mine, seen, announced = owner_text(), set[str](), False
    begun = changed = time.monotonic()
    last: tuple[Any, ...] = ()
    while not _create(lock, mine):
        owner, now = read_owner(lock), time.monotonic()
        state = (owner and owner.get("token"), _mtime(lock))
        if state != last:
            last, changed = state, now
        if owner is None:
            continue
        seen.add(owner.get("token", ""))
        if is_gone(owner, now - changed):
            _remove_dead(lock, owner)
            continue
        if not announced and now - begun >= ANNOUNCE_S:
            say(f"waiting for {describe(owner)}, which is building {what} ({lock})")
            announced = True
        if now - begun >= limit_s:
            raise BuildError(
                f"{what}: waited {limit_s:.0f} s for the lock {lock} of {describe(owner)}; if that process does not "
                "run any more, delete the file, otherwise raise RUDA_BUILD_WAIT_S"
            )
        time.sleep(0.1)
    return seen


def _wait_limit() -> float:
    asked = os.environ.get("RUDA_BUILD_WAIT_S") or str(WAIT_S)
    try:
        return float(asked)
    except ValueError:
        raise BuildError(f"RUDA_BUILD_WAIT_S is {asked!r}, expected seconds") from None


def _beat(lock: Path, stop: threading.Event) -> None:
    while not stop.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(lock)


@contextlib.contextmanager
def build_lock(lock: Path, what: str, limit_s: float | None = None) -> Iterator[tuple[str, set[str]]]:
    """Hold a lock file while the body runs.

    Args:
        lock: the file; its folder is made.
        what: what is built, for the messages.
        limit_s: seconds to wait for another owner; by default RUDA_BUILD_WAIT_S, or half an hour.

    Yields:
        (our token, the tokens of the owners that were waited for).

    Raises:
        BuildError: another owner, who is not known to be gone, held it for longer than the limit, or the folder
            cannot be written.
    """
    limit = _wait_limit() if limit_s is None else limit_s
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        waited_for = _wait(lock, what, limit)
    except OSError as error:
        raise BuildError(f"{what}: the folder {lock.parent} cannot be written: {error}") from error
    token = (read_owner(lock) or {}).get("token", "")
    stop = threading.Event()
    beat = threading.Thread(target=_beat, args=(lock, stop), daemon=True)
    beat.start()
    try:
        yield token, waited_for
    finally:
        stop.set()
        beat.join()
        # A holder that was suspended for minutes may have been taken for dead: leave its successor's lock alone.
        if (read_owner(lock) or {}).get("token") == token:
            lock.unlink(missing_ok=True)
