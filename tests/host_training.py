"""What the tests over several hosts share: the training program, started on them and looked at."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path

import pytest
from host_helpers import Hosts, await_windows, finish, why_not

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
IMPOSSIBLE = why_not()
ASKED_FOR = os.environ.get("RUDA_HOST_TESTS") == "1"
on_hosts = pytest.mark.skipif(IMPOSSIBLE is not None, reason=str(IMPOSSIBLE))
if_asked = pytest.mark.skipif(not ASKED_FOR, reason="RUDA_HOST_TESTS=1 runs these too: half an hour in all")


def _installed(variable: str, word: str):
    prefix = os.environ.get(variable)
    return pytest.param(prefix, word, marks=pytest.mark.skipif(prefix is None, reason=f"{variable} is not set"))


def open_mpi(word: str):
    """A test's parameters for Open MPI: (its prefix, ``word``); skipped where there is none."""
    return _installed("RUDA_OPENMPI", word)


def intel_mpi(word: str):
    """The same for Intel MPI."""
    return _installed("RUDA_INTELMPI", word)


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


class Running:
    """A training run over hosts that has made its first steps.

    Args:
        command: up to the script and with it; None for `launch/mpi` with one rank a slot.
        more: options of the script.
    """

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        text: Path,
        slots: list[int],
        command: list[str] | None = None,
        more: tuple[str, ...] = (),
    ) -> None:
        config = json.loads((ROOT / "ds_configs" / "zero3_cpu.json").read_text())
        config["ruda"] = {**config.get("ruda", {}), "timeout_s": LIMIT_S}
        (folder / "config.json").write_text(json.dumps(config))
        arguments = ["--deepspeed_config", str(folder / "config.json"), "--data", str(text), *TINY]
        arguments += [*more, "--output", str(folder / "run")]
        self.command = [*(command or mpi(hosts.hostfile(folder, slots))), *arguments]
        self.hosts, self.log = hosts, folder / "log"
        self.job = hosts.start([*self.command, "--steps", "100000"], self.log, RUDA_LAUNCH_GRACE_S=str(GRACE_S))
        await_windows(folder / "run", self.log, 120, self.job)
        self.last = hosts.names[-1]
        assert len(hosts.ranks(self.last)) == slots[-1]

    def ends(self, slack_s: float = 15) -> str:
        """Its output; the launcher has failed in time, and nothing is left anywhere."""
        # The limit, the guard's grace, SIGTERM to SIGKILL, and a busy machine.
        code, said, _ = finish(self.job, self.log, LIMIT_S + GRACE_S + 3 + slack_s)
        assert code != 0
        assert self.hosts.left(LIMIT_S) == {}
        return said


def names_the_lost_rank(said: str, survivors: list[int], host: str) -> None:
    """Each survivor has said who is lost, on which host, and where it stood itself."""
    for rank in survivors:
        words = rf"rank {rank} (\(host h\d\), in [a-z ]+, ends|failed): .*rank \d+.*host {host}"
        assert re.search(words, said), said[-4000:]
