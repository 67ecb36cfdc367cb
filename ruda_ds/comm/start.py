"""A limit on the ranks' first meeting, before any watchdog can tell that one of them does not come."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Processes of a job begin far apart: their imports wait for a shared folder.
LEAST_S = 60.0
BACKSTOP_S = 2.0


@contextmanager
def meeting_within(limit_s: float, what: str) -> Iterator[None]:
    """End this process, exit code 1, if the block takes longer: what it waits for in C++ or MPI nobody can interrupt.

    Args:
        limit_s: seconds; at least LEAST_S are given.
        what: the ranks do here, for the message.
    """
    limit_s = max(limit_s, LEAST_S)

    def end() -> None:
        rank = os.environ.get("RANK") or os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "?"
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        print(
            f"ruda_ds: rank {rank} (host {socket.gethostname()}) has waited {limit_s:g} s in {what} (MASTER_ADDR and "
            f"_PORT {place}): a rank has not come, was stopped, or its machine or the network hangs. It ends; its "
            "stacks:",
            file=sys.stderr,
            flush=True,
        )
        with suppress(Exception):  # a stderr without a descriptor
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    # MPI_Init holds Python's lock: only a thread that is not Python's can end it. It says less.
    faulthandler.dump_traceback_later(limit_s + BACKSTOP_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
