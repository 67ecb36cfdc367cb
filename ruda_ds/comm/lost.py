"""Which ranks are gone, when a collective breaks: a roll call over the rendezvous store.

gloo and NCCL say that a connection closed, and give an address; who it was, they do not know. Every survivor writes its
name (its watchdog does so for one that waits elsewhere) and reads those of the others; who does not answer is lost.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from ruda_ds.comm.phase import PHASES
from ruda_ds.errors import RankLostError

# Longer than a watchdog's interval, since one that waits elsewhere answers through it.
ROLL_CALL_S = 3.0
ROLL_CALL, ALIVE, FAILED = "ruda/roll_call", "ruda/alive/", "ruda/failed"
BEAT = "ruda/beat/"  # what a rank's watchdog says of it
SHOWN = 8  # ranks that a message tells of
SIGNS = ("gloo", "Connection closed", "Connection reset", "Connection refused", "Broken pipe", "NCCL", "Socket")


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of a collective says that another rank is gone, and not that this one called it wrongly."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in SIGNS)


def rendezvous_store(limit_s: float) -> dist.Store:
    """A connection of one's own to the store of the job, whose calls end after ``limit_s`` seconds."""
    store: Any = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=limit_s))
    return store


@dataclass(frozen=True)
class Word:
    """What one rank leaves for all about a failure.

    Attributes:
        ranks: global ranks that have failed.
        text: for people.
    """

    ranks: list[int]
    text: str


def announce_failure(store: dist.Store, ranks: list[int], text: str) -> Word:
    """Leave word of a failure for all ranks; the first word stays. Returns the word that stands."""
    standing = store.compare_set(FAILED, "", json.dumps({"ranks": ranks, "text": text}))
    return Word(**json.loads(standing))


def word_of_failure(store: dist.Store) -> Word | None:
    """The word that `announce_failure` left, if any."""
    return Word(**json.loads(store.get(FAILED))) if store.check([FAILED]) else None


def lost_ranks(group: dist.ProcessGroup, phase: str, limit_s: float = ROLL_CALL_S) -> Word | None:
    """Who of ``group`` is gone: as a word of failure says, or who does not answer a roll call. For a broken group.

    Args:
        group: whose collective has failed on this rank.
        phase: in which this rank was.
        limit_s: how long the others may take to answer.

    Returns:
        The word that stands; rank 0 alone if the store cannot be reached, since rank 0 keeps it; None if all answer.
    """
    missing = dist.get_process_group_ranks(group)
    deadline = time.monotonic() + limit_s
    try:
        store = rendezvous_store(limit_s)
        store.set(f"{ALIVE}{dist.get_rank()}", "")
        store.set(ROLL_CALL, "")
        while missing and time.monotonic() < deadline:
            word = word_of_failure(store)
            if word is not None:
                return word
            missing = [rank for rank in missing if not store.check([f"{ALIVE}{rank}"])]
            time.sleep(0.02 if missing else 0)
        if not missing:
            return None
        who = ", ".join(_last_seen(store, rank) for rank in missing[:SHOWN])
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        return announce_failure(
            store, missing, f"no answer from {who}{more} to the roll call that rank {dist.get_rank()} made in {phase}"
        )
    except (RuntimeError, dist.DistError):
        return Word(
            [0],
            "rank 0, which keeps the rendezvous store, cannot be reached; it may have ended because of an earlier "
            "failure, so look for the first error in all outputs",
        )


def _last_seen(store: dist.Store, rank: int) -> str:
    """A rank, its host, and what it did when its watchdog last spoke."""
    if not store.check([f"{BEAT}{rank}"]):
        return f"rank {rank}"
    facts = json.loads(store.get(f"{BEAT}{rank}"))
    return f"rank {rank} (host {facts['host']}, last seen in {facts.get('phase', 'an orderly end')})"


@contextlib.contextmanager
def naming_lost_ranks(group: dist.ProcessGroup | None, phase: str) -> Iterator[None]:
    """Around code with collectives of ``group``: a broken connection becomes a RankLostError on every survivor.

    Where every rank answers, nobody is lost, and the error of the collective is raised as it was.

    Args:
        group: None: all ranks.
        phase: what this rank is doing, for this message and for the watchdog's.
    """
    try:
        with PHASES.within(phase):
            yield
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        with PHASES.within(f"{phase} that broke"):
            word = lost_ranks(cast(dist.ProcessGroup, group if group is not None else dist.group.WORLD), phase)
        if word is None:
            raise
        raise RankLostError(word.ranks, phase, word.text) from error
