"""A SLURM of its own over the hosts of a test: munged, slurmctld on the first host, a slurmd on each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from host_helpers import Hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo")

CONF = """
ClusterName=ruda
SlurmctldHost={first}(10.99.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
MessageTimeout=10
SlurmdTimeout=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """Why there is no SLURM to start here; None if there is one."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed (Debian: munge slurmctld slurmd slurm-client)" if missing else None


class Slurm:
    """``with Slurm(hosts, folder, slots):`` lets programs started on the hosts use srun and sbatch.

    Args:
        hosts: they have been made.
        folder: new; for the daemons' files.
        slots: tasks that a host takes.

    Raises:
        TimeoutError: the nodes are not up within 30 seconds; with the daemons' logs.
    """

    def __init__(self, hosts: Hosts, folder: Path, slots: list[int]) -> None:
        self.hosts, self.folder, self.daemons = hosts, folder, list[subprocess.Popen]()
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        nodes = (
            f"NodeName={host} NodeAddr=10.99.0.{number} CPUs={count} State=UNKNOWN"
            for number, (host, count) in enumerate(zip(hosts.names, slots, strict=True), 1)
        )
        conf = CONF.format(first=hosts.names[0], folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # else it looks for one, and a namespace has none
        # A step's own daemon goes on trying to tell a host that is lost of its end.
        hosts.services = ("slurmctld ", "slurmd ", "slurmstepd: ", ": slurmscriptd")
        hosts.settings["SLURM_CONF"] = str(folder / "slurm.conf")

    def __enter__(self) -> Slurm:
        try:
            files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("log", "pid", "seed")]
            files += [f"--key-file={self.folder}/key", f"--socket={self.folder}/munge.socket"]
            self._start(["munged", "--foreground", "--force", *files])
            self._await(lambda: (self.folder / "munge.socket").exists())
            self._start(["slurmctld", "-D"], self.hosts.names[0])
            for host in self.hosts.names:
                (self.folder / f"spool-{host}").mkdir()
                self._start(["slurmd", "-D", "-N", host], host)
            self._await(lambda: self.run("sinfo", "--noheader", "--Node", "--format=%T").split() == self._all_idle())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait(10)

    def run(self, *command: str) -> str:
        """The output of one of SLURM's programs on the first host; its errors too."""
        line = [str(self.hosts.tools / "ssh"), self.hosts.names[0], " ".join(f"'{word}'" for word in command)]
        environ = {**os.environ, **self.hosts.settings}
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=30)
        return done.stdout + done.stderr

    def _all_idle(self) -> list[str]:
        return ["idle"] * len(self.hosts.names)

    def _start(self, command: list[str], host: str | None = None) -> None:
        line = command if host is None else [str(self.hosts.tools / "ssh"), host, f"exec {' '.join(command)}"]
        with (self.folder / f"{command[0]}-{host}.out").open("w") as log:
            self.daemons.append(
                subprocess.Popen(
                    line,
                    env={**os.environ, **self.hosts.settings},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

    def _await(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not ready():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{p.name}:\n{p.read_text()[-1500:]}" for p in sorted(self.folder.glob("*.[ol]*")))
                raise TimeoutError(f"SLURM has not started:\n{logs}")
            time.sleep(0.2)
