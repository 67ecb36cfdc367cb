"""Several hosts for real, over network namespaces: what happens when one of them fails.

RUDA_HOST_TESTS=1 runs all of it (five minutes), without it only the first.
RUDA_OPENMPI and RUDA_INTELMPI as in test_hosts.py.
"""

import os
import re
import shutil
import signal

import pytest
from host_helpers import Hosts, await_save, finish
from host_training import (
    GRACE_S,
    LIMIT_S,
    Running,
    if_asked,
    intel_mpi,
    mpi,
    names_the_lost_rank,
    on_hosts,
    open_mpi,
    train,
)

from ruda_ds.cli.convert import main as convert

pytestmark = [on_hosts, pytest.mark.slow]
packet_filter = pytest.mark.skipif(shutil.which("iptables") is None, reason="iptables is not installed")


def test_a_link_that_goes_down(tmp_path, built, text):
    with Hosts(2, tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, [2, 2])
        hosts.link(run.last, "down")
        names_the_lost_rank(run.ends(), [0, 1], run.last)


@if_asked
@pytest.mark.parametrize("slots", [[2, 2], [2, 1, 1]])
def test_ranks_of_a_host_are_stopped(tmp_path, built, text, slots):
    with Hosts(len(slots), tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, slots)
        for pid in hosts.ranks(run.last):
            os.kill(pid, signal.SIGSTOP)
        names_the_lost_rank(run.ends(), [0, 1], run.last)


@if_asked
def test_a_whole_host_is_stopped(tmp_path, built, text):
    """Its agent too, as where a machine hangs. What is stopped stays until somebody kills it there: a test does."""
    with Hosts(2, tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, [2, 2])
        hosts.signal(run.last, signal.SIGSTOP)
        code, said, _ = finish(run.job, run.log, LIMIT_S + GRACE_S + 3 + 15)
        assert code != 0
        names_the_lost_rank(said, [0, 1], run.last)
        assert list(hosts.left(0)) in ([], [run.last])
        hosts.signal(run.last, signal.SIGCONT)
        assert hosts.left(LIMIT_S) == {}


@if_asked
@pytest.mark.parametrize(
    ("prefix", "name"), [(None, "MPICH"), open_mpi("Open MPI"), intel_mpi("Intel MPI")], ids=["mpich", "open", "intel"]
)
@pytest.mark.parametrize("who", ["one rank", "the whole host"])
def test_a_host_is_killed(tmp_path, built, text, prefix, name, who):
    """MPI sees it at once, says where, and ends the others before they wait for long."""
    with Hosts(2, tmp_path, built) as hosts:
        options = ["--mpirun", f"{prefix}/bin/mpirun"] if prefix else []
        run = Running(hosts, tmp_path, text, [2, 2], mpi(hosts.hostfile(tmp_path, [2, 2]), *options))
        assert f"started by: {name}" in run.log.read_text()
        if who == "one rank":
            os.kill(hosts.ranks(run.last)[0], signal.SIGKILL)
        else:
            hosts.signal(run.last, signal.SIGKILL)
        said = run.ends()
        if who == "one rank":
            assert re.search(
                rf"(?is)running at {run.last}|node {run.last} exited on\s+signal 9|ends: .*host {run.last}", said
            ), said


@if_asked
@packet_filter
def test_all_packets_to_a_host_are_lost(tmp_path, built, text):
    with Hosts(2, tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, [2, 2])
        hosts.drop(run.last, 1.0)
        names_the_lost_rank(run.ends(), [0, 1], run.last)


@if_asked
@packet_filter
@pytest.mark.skipif(shutil.which("tc") is None, reason="iproute2's tc is not installed")
def test_a_lossy_and_slow_link_slows_training_and_does_not_end_it(tmp_path, built, text, one_host):
    with Hosts(2, tmp_path, built) as hosts:
        hosts.drop("h1", 0.02)
        hosts.slow("h1", "20mbit")
        found, _ = train(hosts, mpi(hosts.hostfile(tmp_path, [2, 2])), text, tmp_path)
    assert found == one_host


@if_asked
@pytest.mark.parametrize("fault", ["killed", "stopped", "cut off"])
def test_a_host_fails_while_saving(tmp_path, built, text, fault):
    """The last complete checkpoint stands, and the run goes on from it once the host is back."""
    with Hosts(2, tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, [2, 2], more=("--save-every", "1"))
        saved = tmp_path / "run" / "checkpoints"
        await_save(saved, 30)
        if fault == "cut off":
            hosts.link(run.last, "down")
        for pid in hosts.ranks(run.last) if fault != "cut off" else []:
            os.kill(pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        run.ends()
        assert convert(["verify", str(saved), "-q"]) == 0
        hosts.link(run.last, "up")
        last = int((saved / "latest").read_text().removeprefix("global_step"))
        job = hosts.start([*run.command, "--resume", "--steps", str(last + 3)], tmp_path / "again")
        code, said, _ = finish(job, tmp_path / "again", 150)
        assert code == 0, said[-4000:]
        assert (saved / "latest").read_text() == f"global_step{last + 3}"
        assert hosts.left(5) == {}
