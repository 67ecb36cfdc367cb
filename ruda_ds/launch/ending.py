"""How a rank that has failed ends, so that the others hear why, and none of them waits for it."""

from __future__ import annotations

import os
import sys
import time
import traceback

# The ranks that wait for one that failed get this long to say why they end, before MPI ends them.
GRACE_S = 5.0


def announce(error: BaseException) -> None:
    """Say which rank this error ends, and tell the other ranks, if this one's watchdog has begun."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The guard of a launcher looks for these words.
        said = traceback.format_exception_only(error)[-1].strip()
        print(f"ruda_ds.launch: rank {os.environ.get('RANK')} failed: {said}", file=sys.stderr, flush=True)
    phase = sys.modules.get("ruda_ds.comm.phase")  # without it there is no watchdog, and nothing to load it for
    if phase is not None and phase.PHASES.watchdog is not None:
        phase.PHASES.watchdog.announce(error)


def end_mpi_job() -> None:
    """End the other ranks of an mpirun: they, and this one's MPI_Finalize, would wait for each other for ever."""
    if "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1 and not MPI.Is_finalized():
        sys.stdout.flush()
        print(
            f"ruda_ds.launch: rank {os.environ.get('RANK', MPI.COMM_WORLD.rank)} failed; MPI ends the others in "
            f"{GRACE_S:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(GRACE_S)
        MPI.COMM_WORLD.Abort(1)
