"""Hosts for tests on one machine: network namespaces with addresses and names of their own, joined by a bridge.

The bridge lives in a namespace too, so nothing of the machine's own network is touched, and no packet leaves.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ruda_ds.checkpoint.writer import LATEST, interrupted

ROOT = Path(__file__).resolve().parent.parent
ETC = Path("/etc/netns")

# Stands for ssh: enters the namespace of a host, with the host's own name, and runs the command there.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -o|-p|-l|-i) shift 2 ;; *) shift ;; esac; done
host=$1; shift
exec ip netns exec {prefix}$host unshare --uts bash -c 'echo "$0" >/proc/sys/kernel/hostname; eval "$1"' "$host" "$*"
"""

# Stands for pdsh: the command on every host of -w at once, %n being the host's number; the worst exit code.
PDSH = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -w) hosts=$2; shift 2 ;; -f) shift 2 ;; *) shift ;; esac; done
jobs=() worst=0 number=0
for host in ${hosts//,/ }; do
  command="$*"
  ssh "$host" "${command//%n/$number}" &
  jobs+=($!) number=$((number + 1))
done
trap 'kill "${jobs[@]}"' TERM INT
for job in "${jobs[@]}"; do wait "$job"; code=$?; [ $code -le $worst ] || worst=$code; done
exit $worst
"""


def ip(*words: str) -> None:
    """Run iproute2's ip; its own words in the error if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def why_not() -> str | None:
    """Why this machine cannot have such hosts; None if it can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "iproute2's ip or unshare is not installed"
    name = f"ruda{os.getpid()}try"
    try:
        ip("netns", "add", name)
    except OSError as error:
        return f"no network namespace can be made here ({error})"
    try:
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
        ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two")
    except OSError as error:
        return f"no bridge and veth pair can be made here ({error})"
    finally:
        ip("netns", "del", name)
    return None


class Hosts:
    """``with Hosts(3, folder, extensions) as hosts:`` makes h0, h1, h2, and removes them and whatever runs there.

    Attributes:
        names: of the hosts.
        prefix: of their namespaces' names.
        tools: folder with stand-ins for ssh and pdsh, for PATH.
        extensions: a copy of compiled extensions: a rank that is killed while it loads leaves a lock behind.
        settings: environment variables of what is started there.
        services: beginnings of the command lines of programs that stay.
    """

    def __init__(self, count: int, folder: Path, extensions: Path) -> None:
        self.names = [f"h{number}" for number in range(count)]
        self.prefix = f"ruda{os.getpid()}"
        self.tools = folder / "tools"
        self.extensions = folder / "extensions"
        self.services: tuple[str, ...] = ()
        self.settings = {
            "PATH": os.pathsep.join([str(self.tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(self.extensions),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        shutil.copytree(extensions, self.extensions)

    def __enter__(self) -> Hosts:
        self.tools.mkdir(parents=True)
        for name, text in (("ssh", SSH.format(prefix=self.prefix)), ("pdsh", PDSH)):
            (self.tools / name).write_text(text)
            (self.tools / name).chmod(0o755)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        switch = f"{self.prefix}switch"
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        addresses = "".join(f"10.99.0.{number}\t{host}\n" for number, host in enumerate(self.names, 1))
        for number, host in enumerate(self.names, 1):
            space = self.prefix + host
            (ETC / space).mkdir(parents=True)
            (ETC / space / "hosts").write_text(f"127.0.0.1\tlocalhost\n{addresses}")
            ip("netns", "add", space)
            ip("-n", switch, "link", "add", host, "type", "veth", "peer", "name", "net0", "netns", space)
            ip("-n", switch, "link", "set", host, "master", "bridge", "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "address", "add", f"10.99.0.{number}/24", "dev", "net0")
            ip("-n", space, "link", "set", "net0", "up")

    def __exit__(self, *_: object) -> None:
        for host in self.names:
            self.signal(host, signal.SIGKILL)
        for host in [*self.names, "switch"]:
            space = self.prefix + host
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=20)
            shutil.rmtree(ETC / space, ignore_errors=True)

    # --- what runs there ---------------------------------------------------------------------------------------

    def processes(self, host: str) -> list[int]:
        """Ids of all processes of a host."""
        done = subprocess.run(["ip", "netns", "pids", self.prefix + host], capture_output=True, text=True, timeout=20)
        return [int(number) for number in done.stdout.split()]

    def ranks(self, host: str) -> list[int]:
        """Ids of the processes of a host that are ranks of a job."""
        return [pid for pid in self.processes(host) if _is_rank(pid)]

    def signal(self, host: str, number: int) -> int:
        """Send a signal to all processes of a host; how many there were."""
        sent = 0
        for pid in self.processes(host):
            try:
                os.kill(pid, number)
                sent += 1
            except ProcessLookupError:
                continue
        return sent

    def left(self, within_s: float) -> dict[str, list[str]]:
        """Command lines, by host, of the processes still there after ``within_s`` seconds, but ``services``."""
        deadline = time.monotonic() + within_s
        while True:
            seen = {host: [_command(pid) for pid in self.processes(host)] for host in self.names}
            found = {host: [c for c in seen[host] if not c.startswith(self.services)] for host in self.names}
            found = {host: commands for host, commands in found.items() if commands}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    # --- faults ------------------------------------------------------------------------------------------------

    def link(self, host: str, state: str) -> None:
        """Take a host's link "down", or "up"; at the switch, as a pulled cable."""
        ip("-n", f"{self.prefix}switch", "link", "set", host, state)

    def drop(self, host: str, probability: float) -> None:
        """From now on, lose packets that reach a host, each with a probability."""
        rule = ["-m", "statistic", "--mode", "random", "--probability", str(probability), "-j", "DROP"]
        command = ["ip", "netns", "exec", self.prefix + host, "iptables", "-A", "INPUT", "-i", "net0", *rule]
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    def slow(self, host: str, rate: str) -> None:
        """From now on, send from a host at most at a rate such as "20mbit"."""
        shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
        command = ["tc", "-n", self.prefix + host, "qdisc", "add", "dev", "net0", *shape]
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    # --- running -----------------------------------------------------------------------------------------------

    def start(self, command: list[str], output: Path, **environ: str) -> subprocess.Popen:
        """Start a command on the first host, its output in a file."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("PMI", "OMPI", "SLURM", "MASTER", "GLOO"))}
        inner = " ".join(f"'{word}'" for word in command)
        with output.open("w") as log:
            return subprocess.Popen(
                [str(self.tools / "ssh"), self.names[0], f"cd '{ROOT}'; exec {inner}"],
                env={**kept, **self.settings, **environ},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def hostfile(self, folder: Path, slots: list[int]) -> Path:
        """A hostfile of these hosts."""
        path = folder / "hosts"
        lines = (f"{host} slots={count}\n" for host, count in zip(self.names, slots, strict=True))
        path.write_text("".join(lines))
        return path


def build_extensions(folder: Path) -> Path:
    """A folder with what a first start compiles: the common one's content, brought up to date."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for name in ("deepspeed_shm_comm", "ruda_fused_experts_*"):
        for library in root.rglob(f"{name}.so"):
            place = library.parent
            shutil.copytree(place, folder / place.name, ignore=shutil.ignore_patterns("lock"), dirs_exist_ok=True)
    command = [sys.executable, "-m", "ruda_ds.cli.warm"]
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=300, cwd=ROOT)
    return folder


def finish(job: subprocess.Popen, output: Path, limit_s: float) -> tuple[int, str, float]:
    """Wait for a job: (exit code, its output, seconds it took). Kills it and fails if it takes longer."""
    began = time.monotonic()
    try:
        code = job.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait(10)
        pytest.fail(f"still running after {limit_s:.0f} s:\n{output.read_text()[-6000:]}")
    return code, output.read_text(), time.monotonic() - began


def await_windows(output: Path, log: Path, limit_s: float, job: subprocess.Popen) -> None:
    """Wait until a training run has written the figures of some windows. Its progress bar may be held back."""
    deadline = time.monotonic() + limit_s
    while not any(len(table.read_text().splitlines()) > 2 for table in output.rglob("*.csv")):
        if time.monotonic() > deadline or job.poll() is not None:
            pytest.fail(f"no window has come (exit code {job.poll()}):\n{log.read_text()[-6000:]}")
        time.sleep(0.1)


def await_save(folder: Path, limit_s: float) -> None:
    """Wait until a save is under way that follows a complete one."""
    deadline = time.monotonic() + limit_s
    while not ((folder / LATEST).exists() and interrupted(folder)):
        if time.monotonic() > deadline:
            pytest.fail(f"no save under way: {sorted(path.name for path in folder.glob('*'))}")
        time.sleep(0.001)


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:120]


def _is_rank(pid: int) -> bool:
    """A Python whose environment, as it was started, has a rank; mpirun's own agents have none."""
    names = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=", b"SLURM_PROCID=", b"\0RANK=")
    return b"python" in _read(pid, "cmdline").split(b"\0")[0] and any(n in _read(pid, "environ") for n in names)
