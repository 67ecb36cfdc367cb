"""Files written several at a time: checksums, copies and the disk each keep a core waiting for another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from ruda_ds.checkpoint.reader import FILES

Result = TypeVar("Result")
MOST_WORKERS = 4


def in_parallel(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Results of the jobs, in their order. What a job reads by `reader.FILES` is closed behind it.

    Raises:
        Exception: of the first job that failed; those that run then have ended, and no other was begun.
    """

    def run(job: Callable[[], Result]) -> Result:
        try:
            return job()
        finally:
            FILES.close()

    workers = min(MOST_WORKERS, max(1, len(jobs)))
    with ThreadPoolExecutor(workers, thread_name_prefix="ruda-writer") as pool:
        futures: list[Future[Result]] = [pool.submit(run, job) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
    for future in futures:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]


def one_at_a_time(advance: Callable[[int], None]) -> Callable[[int], None]:
    """``advance`` for several threads: a progress bar is not made for them."""
    lock = threading.Lock()

    def guarded(count: int) -> None:
        with lock:
            advance(count)

    return guarded
