"""Find this process's rank, whoever started it, and say so in the variables that DeepSpeed and torch read.

DeepSpeed's own discovery under MPI asks ``hostname -I`` for an address and fails where that program is missing; with
all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set it is not asked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from ruda_ds.errors import LaunchError

LOOPBACK = "127.0.0.1"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# A variable that only this launcher's own processes have, by launcher.
MPI_MARKS = {
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "MPICH, Intel MPI or another Hydra": "PMI_SIZE",
    "MVAPICH": "MV2_COMM_WORLD_SIZE",
}


@dataclass(frozen=True)
class Ranks:
    """Where this process stands.

    Attributes:
        rank, world_size: among all processes of the job.
        local_rank, local_world_size: among those on this host.
        master_addr, master_port: where rank 0 listens.
        launcher: who started the job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str


def find_ranks(environ: MutableMapping[str, str] = os.environ) -> Ranks:
    """Find the ranks and write them to ``environ``; call it before ``deepspeed.init_distributed``.

    Order: the variables of `deepspeed` or `torchrun`; an MPI launcher, through mpi4py; else one process.

    Raises:
        LaunchError: some of the variables are set and others not; or an MPI launcher is there and mpi4py is not; or
            a variable is not a number.
    """
    present = [name for name in NAMES if name in environ]
    marks = [launcher for launcher, mark in MPI_MARKS.items() if mark in environ]
    if len(present) == len(NAMES):
        ranks = _from_environment(environ)
    elif marks:
        ranks = _from_mpi(marks[0])
    elif present and present != ["MASTER_ADDR", "MASTER_PORT"]:
        missing = [name for name in NAMES if name not in environ]
        raise LaunchError(f"{', '.join(present)} set but {', '.join(missing)} missing, expected all of them or none")
    else:
        ranks = Ranks(0, 1, 0, 1, LOOPBACK, free_port(), "none, one process")
    environ.update(
        RANK=str(ranks.rank),
        WORLD_SIZE=str(ranks.world_size),
        LOCAL_RANK=str(ranks.local_rank),
        LOCAL_WORLD_SIZE=str(ranks.local_world_size),
        # The number of processes on this host, under the name that DeepSpeed's CPU backend reads.
        LOCAL_SIZE=str(ranks.local_world_size),
        MASTER_ADDR=ranks.master_addr,
        MASTER_PORT=str(ranks.master_port),
    )
    if ranks.master_addr == LOOPBACK:
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return ranks


def _from_environment(environ: MutableMapping[str, str]) -> Ranks:
    def number(name: str) -> int:
        try:
            return int(environ[name])
        except ValueError:
            raise LaunchError(f"{name} is {environ[name]!r}, expected a whole number") from None

    rank, world, local = number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK")
    if not 0 <= rank < world:
        raise LaunchError(f"RANK is {rank} and WORLD_SIZE is {world}, expected 0 <= RANK < WORLD_SIZE")
    size = next((number(name) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), world)
    return Ranks(rank, world, local, size, environ["MASTER_ADDR"], number("MASTER_PORT"), "deepspeed or torchrun")


def _from_mpi(launcher: str) -> Ranks:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LaunchError(
            f"started by {launcher}, but mpi4py cannot be imported ({error}): install ruda_ds[mpi]"
        ) from None
    world: Any = MPI.COMM_WORLD
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    hosts = world.allgather(socket.gethostname())
    one_host = len(set(hosts)) == 1
    address, port = world.bcast((LOOPBACK if one_host else hosts[0], free_port()) if world.rank == 0 else None)
    return Ranks(world.rank, world.size, host.rank, host.size, address, port, launcher)


def free_port() -> int:
    """A TCP port that was free on this host a moment ago."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
