"""Run a launcher, and end it when its job has failed but it does not: ``python -m ruda_ds.launch.guard mpirun ...``

A launcher waits for every host that it started something on. Where a host is cut off or a rank is stopped, that takes
until the network gives up, a quarter of an hour or for ever, long after the ranks that it can reach have failed. From
the first word of such a rank on, the launcher has GRACE_S seconds (or RUDA_LAUNCH_GRACE_S) to end by itself.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time

GRACE_S = 20.0
KILL_S = 3.0  # between SIGTERM and SIGKILL
# What the watchdog of a rank, and ruda_ds.launch for a script that raised, write when a job is lost; and Open MPI where
# a host is lost, to standard output: it then ends with exit code 0, as if all were well.
FAILED = re.compile(
    rb"ruda_ds: rank \d+ \(host [^)]*\), in .{1,200} ends: |ruda_ds\.launch: rank \d+ failed"
    rb"|A daemon failed to report back|lost communication with a remote daemon"
)
KEPT = 400  # bytes of one reading that are looked at together with the next
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(command: list[str], grace_s: float) -> int:
    """The command's exit code; 1 if it had to be ended, ended by a signal, or says 0 though the job has failed.

    Its output passes through; its standard input is empty, since it is not in the terminal's foreground.
    """
    pipe = subprocess.PIPE
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: _send(job, number))
    failed_at = _pass_on(job, grace_s)
    if failed_at is not None:
        try:
            job.wait(max(0.1, grace_s - (time.monotonic() - failed_at)))
        except subprocess.TimeoutExpired:
            _end(job, command[0], grace_s)
    code = job.wait()
    return code if code > 0 else int(code < 0 or failed_at is not None)


def _pass_on(job: subprocess.Popen, grace_s: float) -> float | None:
    """Copy what the job writes until it ends or time is up after a failure; when the failure was seen."""
    failed_at: float | None = None
    before = {1: b"", 2: b""}
    with selectors.DefaultSelector() as selector:
        for target, source in ((1, job.stdout), (2, job.stderr)):
            selector.register(source, selectors.EVENT_READ, target)  # type: ignore[arg-type]
        while selector.get_map() and (failed_at is None or time.monotonic() - failed_at < grace_s):
            ready = selector.select(0.5)
            if not ready and job.poll() is not None:
                break  # something else holds the pipes open
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                if not piece:
                    selector.unregister(key.fileobj)
                    continue
                _write_all(key.data, piece)
                text = before[key.data] + piece
                if failed_at is None and FAILED.search(text):
                    failed_at = time.monotonic()
                before[key.data] = text[-KEPT:]
    return failed_at


def _write_all(target: int, piece: bytes) -> None:
    while piece:
        piece = piece[os.write(target, piece) :]


def _end(job: subprocess.Popen, name: str, grace_s: float) -> None:
    print(
        f"ruda_ds.launch: the job has failed, but {name} has not ended within {grace_s:g} s: a host does not "
        "answer; ending it. Processes on that host end by themselves, or have to be ended there",
        file=sys.stderr,
        flush=True,
    )
    _send(job, signal.SIGTERM)
    try:
        job.wait(KILL_S)
    except subprocess.TimeoutExpired:
        _send(job, signal.SIGKILL)


def _send(job: subprocess.Popen, number: int) -> None:
    """To the launcher; the last signal to all that it has started here, too."""
    try:
        if number == signal.SIGKILL:
            os.killpg(job.pid, number)
        else:
            job.send_signal(number)
    except ProcessLookupError:
        return


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    command = sys.argv[1:] if arguments is None else arguments
    if not command:
        print("usage: python -m ruda_ds.launch.guard COMMAND ...", file=sys.stderr)
        return 2
    return run(command, float(os.environ.get("RUDA_LAUNCH_GRACE_S", GRACE_S)))


if __name__ == "__main__":
    sys.exit(main())
