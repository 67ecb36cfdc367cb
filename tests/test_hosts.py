"""Several hosts for real: the training program over network namespaces, and what happens when one of them fails.

RUDA_HOST_TESTS=1 runs it (about ten minutes).
RUDA_OPENMPI=/path/to/prefix, of an Open MPI beside the MPICH in PATH, adds its mpirun.
"""

import csv
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from host_helpers import Hosts, await_save, await_windows, build_extensions, finish, why_not

from ruda_ds.cli.convert import main as convert

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 10  # "ruda": {"timeout_s": ...}
GRACE_S = 5  # RUDA_LAUNCH_GRACE_S
SMALL = [
    "--tokens-per-step",
    "700",
    "--seq-length",
    "64",
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "2",
    "--warmup",
    "1",
    "--sample=",
]
TINY = [
    "--tokens-per-step",
    "300",
    "--seq-length",
    "64",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--experts",
    "0",
    "--warmup",
    "1",
    "--sample=",
]
SWITCH = "RUDA_HOST_TESTS=1 runs these: several hosts in network namespaces, minutes each"
REASON = SWITCH if os.environ.get("RUDA_HOST_TESTS") != "1" else why_not()
OPENMPI = os.environ.get("RUDA_OPENMPI")

pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.slow]
open_mpi = pytest.mark.skipif(OPENMPI is None, reason="RUDA_OPENMPI is not set to the prefix of an Open MPI")
packet_filter = pytest.mark.skipif(shutil.which("iptables") is None, reason="iptables is not installed")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{n} " * (1 + n * n % 40)}) for n in range(80)))
    return path


def losses(output: Path) -> list[str]:
    """As they are printed, so that equal means equal."""
    with (output / "metrics.csv").open(newline="") as lines:
        return [row["loss"] for row in csv.DictReader(lines)]


def mpi(hostfile: Path, *options: str) -> list[str]:
    return ["launch/mpi", *options, "--hostfile", str(hostfile), "launch/train.py"]


def train(hosts: Hosts, command: list[str], text: Path, folder: Path, limit_s: float = 150) -> tuple[list[str], str]:
    log, output = folder / "log", folder / "run"
    job = hosts.start([*command, "--data", str(text), "--output", str(output), "--steps", "3", *SMALL], log)
    code, said, _ = finish(job, log, limit_s)
    assert code == 0, said[-4000:]
    assert hosts.left(5) == {}
    return losses(output), said


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return build_extensions(tmp_path_factory.mktemp("built") / "extensions")


@pytest.fixture(scope="module")
def one_host(tmp_path_factory, text, built) -> list[str]:
    folder = tmp_path_factory.mktemp("one")
    with Hosts(1, folder, built) as hosts:
        found, said = train(hosts, mpi(hosts.hostfile(folder, [4])), text, folder)
    assert "4 ranks (started by: MPICH" in said
    return found


def test_two_hosts_of_mpich_equal_one(tmp_path, built, text, one_host):
    with Hosts(2, tmp_path, built) as hosts:
        found, _ = train(hosts, mpi(hosts.hostfile(tmp_path, [3, 1])), text, tmp_path)
    assert found == one_host


def test_three_uneven_hosts_of_mpich_equal_one(tmp_path, built, text, one_host):
    with Hosts(3, tmp_path, built) as hosts:
        found, _ = train(hosts, mpi(hosts.hostfile(tmp_path, [1, 2, 1])), text, tmp_path)
    assert found == one_host


@open_mpi
@pytest.mark.parametrize("slots", [[2, 2], [2, 1, 1]])
def test_hosts_of_open_mpi_equal_one(tmp_path, built, text, one_host, slots):
    with Hosts(len(slots), tmp_path, built) as hosts:
        command = mpi(hosts.hostfile(tmp_path, slots), "--mpirun", f"{OPENMPI}/bin/mpirun")
        found, said = train(hosts, command, text, tmp_path)
    assert "(started by: Open MPI)" in said
    assert found == one_host


@pytest.mark.parametrize("launcher", ["mpich", "pdsh", pytest.param("openmpi", marks=open_mpi)])
def test_the_deepspeed_launcher_on_two_hosts_equals_one(tmp_path, built, text, one_host, launcher):
    """ssh and pdsh are stand-ins that enter a namespace; all else is DeepSpeed's own."""
    with Hosts(2, tmp_path, built) as hosts:
        command = ["deepspeed", "--log_level", "error", "--hostfile", str(hosts.hostfile(tmp_path, [2, 2]))]
        command += ["--launcher", launcher, "--master_addr", "10.99.0.1", "--master_port", "29511"]
        if launcher == "openmpi":
            command += ["--launcher_args", "--mca btl_tcp_if_include net0 --bind-to none"]
            for name in ("mpirun", "ompi_info"):
                (hosts.tools / name).write_text(f'#!/bin/sh\nexec {OPENMPI}/bin/{name} "$@"\n')
                (hosts.tools / name).chmod(0o755)
        found, _ = train(hosts, [*command, "launch/train.py", "--deepspeed"], text, tmp_path)
    assert found == one_host


# --- faults -------------------------------------------------------------------------------------------------------


class Running:
    """A training run over hosts that has made its first steps."""

    def __init__(
        self, hosts: Hosts, folder: Path, text: Path, slots: list[int], *options: str, more: list[str] | None = None
    ) -> None:
        config = json.loads((ROOT / "ds_configs" / "zero3_cpu.json").read_text())
        config["ruda"] = {**config.get("ruda", {}), "timeout_s": LIMIT_S}
        (folder / "config.json").write_text(json.dumps(config))
        arguments = ["--deepspeed_config", str(folder / "config.json"), "--data", str(text), *TINY]
        arguments += [*(more or []), "--output", str(folder / "run")]
        self.command = [*mpi(hosts.hostfile(folder, slots), *options), *arguments]
        self.hosts, self.log = hosts, folder / "log"
        self.job = hosts.start([*self.command, "--steps", "100000"], self.log, RUDA_LAUNCH_GRACE_S=str(GRACE_S))
        await_windows(folder / "run", self.log, 120, self.job)
        self.last = hosts.names[-1]
        assert len(hosts.ranks(self.last)) == slots[-1]

    def ends(self) -> str:
        """Its output; the launcher has failed in time, and nothing is left anywhere."""
        # The limit, the guard's grace, SIGTERM to SIGKILL, and a busy machine.
        code, said, _ = finish(self.job, self.log, LIMIT_S + GRACE_S + 3 + 15)
        assert code != 0
        assert self.hosts.left(LIMIT_S) == {}
        return said


def names_the_lost_rank(said: str, survivors: list[int], host: str) -> None:
    """Each survivor has said who is lost, on which host, and where it stood itself."""
    for rank in survivors:
        words = rf"rank {rank} \(host h\d\), in [a-z ]+, ends: .*rank \d+.*host {host}"
        assert re.search(words, said), said[-4000:]


def test_a_link_that_goes_down(tmp_path, built, text):
    with Hosts(2, tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, [2, 2])
        hosts.link(run.last, "down")
        names_the_lost_rank(run.ends(), [0, 1], run.last)


@pytest.mark.parametrize("slots", [[2, 2], [2, 1, 1]])
def test_ranks_of_a_host_are_stopped(tmp_path, built, text, slots):
    with Hosts(len(slots), tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, slots)
        for pid in hosts.ranks(run.last):
            os.kill(pid, signal.SIGSTOP)
        names_the_lost_rank(run.ends(), [0, 1], run.last)


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


@pytest.mark.parametrize("options", [[], pytest.param(["--mpirun", f"{OPENMPI}/bin/mpirun"], marks=open_mpi)])
@pytest.mark.parametrize("who", ["one rank", "the whole host"])
def test_a_host_is_killed(tmp_path, built, text, options, who):
    """MPI sees it at once, says where, and ends the others before they wait for long."""
    with Hosts(2, tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, [2, 2], *options)
        if who == "one rank":
            os.kill(hosts.ranks(run.last)[0], signal.SIGKILL)
        else:
            hosts.signal(run.last, signal.SIGKILL)
        said = run.ends()
        if who == "one rank":
            assert re.search(
                rf"(?is)running at {run.last}|node {run.last} exited on\s+signal 9|ends: .*host {run.last}", said
            ), said


@packet_filter
def test_all_packets_to_a_host_are_lost(tmp_path, built, text):
    with Hosts(2, tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, [2, 2])
        hosts.drop(run.last, 1.0)
        names_the_lost_rank(run.ends(), [0, 1], run.last)


@packet_filter
@pytest.mark.skipif(shutil.which("tc") is None, reason="iproute2's tc is not installed")
def test_a_lossy_and_slow_link_slows_training_and_does_not_end_it(tmp_path, built, text, one_host):
    with Hosts(2, tmp_path, built) as hosts:
        hosts.drop("h1", 0.02)
        hosts.slow("h1", "20mbit")
        found, _ = train(hosts, mpi(hosts.hostfile(tmp_path, [2, 2])), text, tmp_path)
    assert found == one_host


@pytest.mark.parametrize("fault", ["killed", "stopped", "cut off"])
def test_a_host_fails_while_saving(tmp_path, built, text, fault):
    """The last complete checkpoint stands, and the run goes on from it once the host is back."""
    with Hosts(2, tmp_path, built) as hosts:
        run = Running(hosts, tmp_path, text, [2, 2], more=["--save-every", "1"])
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
