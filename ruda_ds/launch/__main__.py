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
import traceback
from pathlib import Path

from ruda_ds.errors import LaunchError
from ruda_ds.launch import find_ranks
from ruda_ds.launch.ending import announce, end_mpi_job
from ruda_ds.launch.hostfile import for_mpich, read_hostfile, require_slots

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
        find_ranks()
    except LaunchError as error:
        print(f"ruda_ds.launch: {error}", file=sys.stderr, flush=True)
        return 1
    die_with_parent()
    widen_terminal()
    failed = [True]
    atexit.register(lambda: end_mpi_job() if failed[0] else None)
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
    except BaseException as error:
        traceback.print_exc()
        announce(error)
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


if __name__ == "__main__":
    sys.exit(main())
