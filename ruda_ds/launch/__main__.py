"""Run a script with the ranks' variables set, under any launcher: ``mpirun -n 4 python -m ruda_ds.launch train.py ...``

With --check-hostfile FILE: check the file, print ``hosts slots``, and end.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import struct
import sys
import time
import traceback
from pathlib import Path

from ruda_ds.errors import LaunchError
from ruda_ds.launch import find_ranks
from ruda_ds.launch.hostfile import for_mpich, read_hostfile, require_slots

# The ranks that wait for one that failed get this long to say why they end, before MPI ends them.
GRACE_S = 5.0
PR_SET_PDEATHSIG = 1
LINES_AND_COLUMNS = (24, 120)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m ruda_ds.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check-hostfile", metavar="FILE", help="check a hostfile and end")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --check-hostfile: so many slots are needed")
    parser.add_argument("--mpich", action="store_true", help="with --check-hostfile: print the value of Hydra's -hosts")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", nargs="?", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args(arguments)
    if args.check_hostfile is not None:
        return check_hostfile(args.check_hostfile, args.ranks, args.mpich)
    if args.script is None:
        parser.error("a script, or --check-hostfile FILE, is needed")
    return run_script(args.script, args.arguments, args.module)


def check_hostfile(path: str, ranks: int | None, mpich: bool) -> int:
    """0 and a word about the file, or 1 and what is wrong with it."""
    try:
        hosts = read_hostfile(path)
        if ranks is not None:
            require_slots(path, hosts, ranks)
        print(for_mpich(hosts) if mpich else f"{len(hosts)} {sum(hosts.values())}")
    except LaunchError as error:
        print(f"ruda_ds.launch: {error}", file=sys.stderr)
        return 1
    return 0


def run_script(script: str, arguments: list[str], module: bool = False) -> int:
    """Find the ranks and run the script as the main program; if it fails, the other ranks of an MPI job end too."""
    try:
        ranks = find_ranks()
    except LaunchError as error:
        print(f"ruda_ds.launch: {error}", file=sys.stderr, flush=True)
        return 1
    die_with_parent()
    widen_terminal()
    failed = [True]
    atexit.register(lambda: end_mpi_job(ranks.rank) if failed[0] else None)
    sys.argv = [script, *arguments]
    try:
        if module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        failed[0] = end.code not in (None, 0)
        raise
    except BaseException:
        traceback.print_exc()
        return 1
    failed[0] = False
    return 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it is gone.

    An agent of a launcher ends when its connection breaks, and its ranks would stay, if they are stopped or if they
    wait in a collective. On another system than Linux nothing happens.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        return


def widen_terminal() -> None:
    """Open MPI gives its ranks a terminal of no width, in which a progress bar shows nothing: give it one."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl
        import termios

        for stream in (1, 2):
            if os.isatty(stream) and os.get_terminal_size(stream).columns == 0:
                fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", *LINES_AND_COLUMNS, 0, 0))


def end_mpi_job(rank: int) -> None:
    """End the other ranks of an mpirun: they, and this one's MPI_Finalize, would wait for each other for ever."""
    if "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1 and not MPI.Is_finalized():
        sys.stdout.flush()
        print(
            f"ruda_ds.launch: rank {rank} failed; MPI ends the others in {GRACE_S:.0f} s", file=sys.stderr, flush=True
        )
        time.sleep(GRACE_S)
        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    sys.exit(main())
