"""Ranks that wait for one that does not come, before any watchdog runs."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from test_train import environment

WAITS = """
import os, signal, time
from ruda_ds.comm import start
from ruda_ds.launch import find_ranks
start.LEAST_S = 1.0
if os.environ.get("PMI_RANK") == "1":
    print("stopped", os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
if "PMI_RANK" in os.environ:
    find_ranks(limit_s=2.0)
with start.meeting_within(2.0, "the test"):
    time.sleep(60)
"""


def ended(command):
    began = time.monotonic()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert time.monotonic() - began < 40
    return done


def test_a_process_that_waits_too_long_ends_with_its_stacks():
    said = ended([sys.executable, "-c", WAITS]).stderr
    assert re.search(r"rank \? \(host .*\) has waited 2 s in the test .*: a rank has not come, was stopped", said)
    assert 'File "<string>", line' in said


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")
def test_a_rank_that_is_stopped_at_its_start_ends_the_mpirun():
    said = ended(["mpirun", "-n", "2", sys.executable, "-c", WAITS])
    # Its own message, or, where MPI_Init holds Python's lock, faulthandler's.
    assert "rank 0 (host " in said.stderr or "Timeout (0:00:04)!" in said.stderr
    assert "in find_ranks" in said.stderr
    pid = int(said.stdout.split("stopped ")[1].split()[0])
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.1)
    if os.path.exists(f"/proc/{pid}"):
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the stopped rank is still there")
