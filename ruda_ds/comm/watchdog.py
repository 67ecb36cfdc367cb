"""A thread on every rank that finds out who has failed, and ends a rank that would wait for it for ever.

[Note: who notices what]
A rank that is killed breaks its connections: its peers' collectives raise, and `lost.py` asks who is gone; the thread
answers for ranks that wait elsewhere. A rank that stops (SIGSTOP, a hung machine, a lost network) breaks nothing: its
signs of life cease. Rank 0 reads those of all ranks, and every rank reads rank 0's. A rank whose training thread waits
too long in a collective while others live has peers that have not come: rank 0 asks all for their stacks and names
those that stand elsewhere. In each case ONE word of failure is left in the store. Every rank prints it, writes its
stacks into a file, gives its training thread a moment to fail by itself, and ends the process with exit code 1: no
other way leads out of a collective that waits.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ruda_ds.comm.lost import ALIVE, BEAT, ROLL_CALL, SHOWN, announce_failure, rendezvous_store, word_of_failure
from ruda_ds.comm.phase import OWN_CODE, PHASES
from ruda_ds.errors import RankLostError

STACK, WANT_STACKS = "ruda/stack/", "ruda/want_stacks"
FOLDER = "ruda_faults"


@dataclass
class Sign:
    """The last sign of life of a rank.

    Attributes:
        text: what it said.
        seen: monotonic seconds at which it was new here.
        facts: its decoded fields: host, phase, number, waited, ended.
    """

    text: str
    seen: float
    facts: dict[str, Any]


class Watchdog:
    """See [Note: who notices what].

    Args:
        limit_s: within this time of a failure every rank has ended. Half of it may pass without a sign of life, or in
            one collective, before that counts as a failure.
    """

    def __init__(self, limit_s: float) -> None:
        self.interval_s = min(max(limit_s / 20, 0.1), 1.0)
        self.patience_s = limit_s / 2
        self.grace_s = min(max(limit_s / 10, 0.5), 5.0)
        self.rank, self.world_size, self.host = dist.get_rank(), dist.get_world_size(), socket.gethostname()
        self._store = rendezvous_store(max(limit_s / 4, 1.0))
        self._beats = 0
        self._signs: dict[int, Sign] = {}
        self._stacks_sent = False
        self._store_error = "the call did not return"
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ruda_watchdog", daemon=True)
        self._second = threading.Thread(target=self._watch_the_store, name="ruda_watchdog_store", daemon=True)

    @classmethod
    def of_this_process(cls, limit_s: float) -> Watchdog:
        """The one of this process; begins to watch at the first call, with that call's limit."""
        present = PHASES.watchdog
        if isinstance(present, cls) and not present._stopped.is_set():
            return present
        PHASES.watchdog = cls(limit_s)
        return PHASES.watchdog._start()

    def _start(self) -> Watchdog:
        self._beat()
        self._looked = time.monotonic()
        self._thread.start()
        self._second.start()
        atexit.register(self._at_exit)
        return self

    def stop(self) -> None:
        """Watch no longer; the other ranks are told that this one has ended in order."""
        if not self._stopped.is_set():
            self._stopped.set()
            atexit.unregister(self._at_exit)
            self._thread.join(2 * self.interval_s)
            self._say_goodbye()

    # --- the threads ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped.wait(self.interval_s):
            if not dist.is_initialized():
                self._stopped.set()
                atexit.unregister(self._at_exit)
                self._say_goodbye()
                return
            try:
                self._look()
                self._looked = time.monotonic()
            except (RuntimeError, dist.DistError) as error:
                self._store_error = str(error).strip().splitlines()[0][:160]

    def _watch_the_store(self) -> None:
        """In a thread of its own: a call to a store whose keeper is stopped never returns, whatever its time limit."""
        while not self._stopped.wait(self.interval_s):
            if time.monotonic() - self._looked > self.patience_s:
                self._end(
                    f"rank 0, which keeps the rendezvous store, has not answered rank {self.rank} (host {self.host}) "
                    f"for {time.monotonic() - self._looked:.0f} s: it was killed or stopped, or its machine or the "
                    f"network to it hangs [{self._store_error}]"
                )

    def _look(self) -> None:
        word = word_of_failure(self._store)
        if word is not None:
            self._end(word.text)
        self._beat()
        if self._store.check([ROLL_CALL]):
            self._store.set(f"{ALIVE}{self.rank}", "")
        if not self._stacks_sent and self._store.check([WANT_STACKS]):
            self._stacks_sent = True
            self._store.set(f"{STACK}{self.rank}", training_stack()[-2000:])
        self._read_signs(range(self.world_size) if self.rank == 0 else [0])
        silent = self._silent()
        if silent is not None:
            self._fail(*silent)
        elif self.rank == 0:
            self._find_those_who_have_not_come()

    def _beat(self) -> None:
        self._beats += 1
        facts = {
            "beat": self._beats,
            "host": self.host,
            "phase": PHASES.name,
            "number": PHASES.number,
            "waited": round(time.monotonic() - PHASES.since, 1),
        }
        self._store.set(f"{BEAT}{self.rank}", json.dumps(facts))

    def _read_signs(self, ranks: Any) -> None:
        keys = [f"{BEAT}{rank}" for rank in ranks]
        if not self._store.check(keys):
            return  # some have not begun; a read would wait for them
        for rank, value in zip(ranks, self._store.multi_get(keys), strict=True):
            text = value.decode()
            if rank not in self._signs or self._signs[rank].text != text:
                self._signs[rank] = Sign(text, time.monotonic(), json.loads(text))

    def _silent(self) -> tuple[int, str] | None:
        now = time.monotonic()
        for rank, sign in self._signs.items():
            quiet_s = now - sign.seen
            if rank != self.rank and quiet_s > self.patience_s and not sign.facts.get("ended"):
                return (
                    rank,
                    f"rank {rank} (host {sign.facts['host']}) has given no sign of life for {quiet_s:.0f} s; it was in "
                    f"{sign.facts['phase']}: killed, stopped, or its machine or network hangs",
                )
        return None

    def _find_those_who_have_not_come(self) -> None:
        waiting = {r: s for r, s in self._signs.items() if s.facts.get("phase", OWN_CODE) != OWN_CODE}
        longest = max(waiting, key=lambda rank: waiting[rank].facts["waited"], default=None)
        if longest is None or waiting[longest].facts["waited"] < self.patience_s:
            return
        facts = waiting[longest].facts
        absent = [
            rank
            for rank, sign in self._signs.items()
            if (sign.facts.get("phase"), sign.facts.get("number")) != (facts["phase"], facts["number"])
        ]
        self._store.set(WANT_STACKS, "")
        self._store.set(f"{STACK}{self.rank}", training_stack()[-2000:])
        self._stacks_sent = True
        time.sleep(2 * self.interval_s)
        where = "; ".join(
            f"rank {rank} (host {self._signs[rank].facts['host']}) is in "
            f"{self._signs[rank].facts.get('phase')} (number {self._signs[rank].facts.get('number')})"
            for rank in absent[:SHOWN]
        )
        stacks = "".join(
            f"\n--- rank {rank}\n{self._store.get(f'{STACK}{rank}').decode()}"
            for rank in (absent or [longest])[:SHOWN]
            if self._store.check([f"{STACK}{rank}"])
        )
        self._fail(
            absent,
            f"rank {longest} (host {facts['host']}) has waited {facts['waited']:.0f} s in {facts['phase']} (number "
            f"{facts['number']}); ranks that have not come: {absent or 'none, all wait there'}. {where}{stacks}",
        )

    # --- the end --------------------------------------------------------------------------------------------

    def _fail(self, ranks: int | list[int], text: str) -> None:
        self._end(announce_failure(self._store, [ranks] if isinstance(ranks, int) else ranks, text).text)

    def _end(self, text: str) -> None:
        """Say it once, leave the stacks in a file, let the training thread fail by itself, and end the process."""
        if not self._ending.acquire(blocking=False):
            return  # the other thread is at it
        shown = text if self.rank == 0 else text.split("\n--- rank")[0]
        place = self._write_stacks(text)
        print(
            f"ruda_ds: rank {self.rank} (host {self.host}), in {PHASES.name}, ends: {shown}\n"
            f"ruda_ds: stacks of rank {self.rank}: {place}; resume from the last complete checkpoint",
            file=sys.stderr,
            flush=True,
        )
        self._stopped.wait(self.grace_s)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def _write_stacks(self, text: str) -> Path:
        for folder in (Path.cwd(), Path(tempfile.gettempdir())):
            place = folder / FOLDER / f"rank_{self.rank:05d}.txt"
            try:
                place.parent.mkdir(exist_ok=True)
                place.write_text(f"{text}\n\n{all_stacks()}")
                return place
            except OSError:
                continue
        return Path("nowhere: no folder could be written")

    def announce(self, error: BaseException) -> None:
        """Tell the others of an error that ends this rank, and watch no longer. The first word of a failure stays."""
        self._stopped.set()
        if isinstance(error, RankLostError):
            return  # another one's failure, and known
        doing = "" if PHASES.failed_in is None else f" in {PHASES.failed_in}"
        text = f"rank {self.rank} (host {self.host}) failed{doing}: {type(error).__name__}: {str(error).strip()[:300]}"
        self._tell(lambda: announce_failure(self._store, [self.rank], text))

    def _at_exit(self) -> None:
        """The interpreter ends: in order, or with an exception that nobody caught, of which the others are told."""
        uncaught = getattr(sys, "last_value", None)
        if uncaught is not None and dist.is_initialized():
            self.announce(uncaught)
        elif not self._stopped.is_set():
            self._stopped.set()
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        facts = json.dumps({"host": self.host, "ended": True})
        self._tell(lambda: self._store.set(f"{BEAT}{self.rank}", facts))

    def _tell(self, call: Callable[[], Any]) -> None:
        """The last call to the store, which may be gone, or its keeper stopped: then nobody is told."""

        def attempt() -> None:
            with contextlib.suppress(RuntimeError, dist.DistError):
                call()

        last = threading.Thread(target=attempt, name="ruda_watchdog_last", daemon=True)
        last.start()
        last.join(2.0)


def training_stack() -> str:
    """The Python stack of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "no main thread"


def all_stacks() -> str:
    """The Python stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )
