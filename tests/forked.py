"""Python programs in processes of their own that need not load torch and DeepSpeed first: forks of one that has.

What is tested is the program, its exit code and what it prints; a start takes milliseconds instead of five seconds.
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ruda_ds.cli.ranks import PRELOAD


def ready() -> None:
    """Start the process that all are forks of, in today's environment: it loads, and compiles where that is needed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()


def start(command: list[str], log: Path, environ: dict[str, str], cwd: Path) -> multiprocessing.Process:
    """Start ``SCRIPT ...`` or ``-c CODE ...``, the words after python, in a session of its own; output to a file."""
    ready()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_main, args=(list(map(str, command)), str(log), environ, str(cwd)), daemon=True)
    process.start()
    return process


def run(command: list[str], environ: dict[str, str], cwd: Path, timeout_s: float) -> tuple[int, str]:
    """Its exit code (negative: the signal that ended it), and all that it said."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = start(command, log, environ, cwd)
        code = wait(process, timeout_s)
        return code, log.read_text()


def wait(process: multiprocessing.Process, timeout_s: float) -> int:
    """Its exit code; killed, and a TimeoutExpired, after ``timeout_s`` seconds."""
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(process.name, timeout_s)
    return process.exitcode


def _main(command: list[str], log: str, environ: dict[str, str], cwd: str) -> None:
    os.setsid()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of forks ignores it
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    sys.path[:0] = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    code = 0
    try:
        _run(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
    # A fork ends without what a program does at its end.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _run(command: list[str]) -> None:
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path.insert(0, "")
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
