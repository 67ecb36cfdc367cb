"""Find this process's rank, whoever started it, and say so in the variables that DeepSpeed and torch read.

DeepSpeed's own discovery under MPI asks ``hostname -I`` for an address and fails where that program is missing; with
all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set it is not asked.
``python -m ruda_ds.launch script.py ...`` runs any script with these variables set.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from ruda_ds.comm.start import meeting_within
from ruda_ds.errors import LaunchError
from ruda_ds.launch.by_mpi import meet_by_mpi
from ruda_ds.launch.by_slurm import meet_by_slurm
from ruda_ds.launch.claims import AGENT_MARKS, PMIX, SLURM, Claim, contradictions, number, read_claims
from ruda_ds.launch.facts import Agreement
from ruda_ds.launch.interfaces import LOOPBACK, default_interface, free_port, interface_towards, resolve

__all__ = ["LOOPBACK", "NAMES", "LaunchError", "Ranks", "find_ranks", "free_port"]

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Who started the job, for a second call in the same process or in one that it starts.
STARTED_BY = "RUDA_LAUNCHER"


@dataclass(frozen=True)
class Ranks:
    """Where this process stands.

    Attributes:
        rank, world_size: among all processes of the job.
        local_rank, local_world_size: among those on this host.
        master_addr, master_port: where rank 0 listens.
        launcher: who started the job.
        interface: network interface that leads to the other hosts; None if it is not known.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str
    interface: str | None = None


def find_ranks(environ: MutableMapping[str, str] = os.environ, limit_s: float = 1800.0) -> Ranks:
    """Find the ranks and write them to ``environ``; call it before ``deepspeed.init_distributed``.

    Order: the variables of `deepspeed` or `torchrun`; SLURM's tasks; an MPI launcher, through mpi4py; else one process.
    Under SLURM and MPI it is a collective: all ranks compare what they found, and try the address.
    GLOO_SOCKET_IFNAME is set to the interface that leads to the other hosts, unless it is set already.

    Args:
        limit_s: seconds, at least 60, in which all ranks must have come; else this process ends, as `meeting_within`.

    Raises:
        LaunchError: on every rank that can be told, what was found does not add up, with what was found where; or an
            MPI launcher is there and mpi4py is not; or no address of rank 0 is reached by all.
    """
    present = [name for name in NAMES if name in environ]
    claims = read_claims(environ)
    if len(present) == len(NAMES):
        ranks = _from_environment(environ, claims)
    elif claims:
        with meeting_within(limit_s, "the search for the ranks of the job"):
            ranks = _from_claims(environ, claims)
    elif present and present != ["MASTER_ADDR", "MASTER_PORT"]:
        missing = [name for name in NAMES if name not in environ]
        raise LaunchError(f"{', '.join(present)} set but {', '.join(missing)} missing, expected all of them or none")
    else:
        ranks = Ranks(0, 1, 0, 1, LOOPBACK, free_port(), "none, one process", "lo")
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
    environ[STARTED_BY] = ranks.launcher
    if ranks.interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", ranks.interface)
    return ranks


def _from_environment(environ: MutableMapping[str, str], claims: list[Claim]) -> Ranks:
    rank, world, local = (number(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not 0 <= rank < world:
        raise LaunchError(f"RANK is {rank} and WORLD_SIZE is {world}, expected 0 <= RANK < WORLD_SIZE")
    address, port = environ["MASTER_ADDR"], number(environ, "MASTER_PORT")
    size_name = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environ), None)
    if size_name is None and not _is_loopback(address):
        raise LaunchError(
            f"LOCAL_WORLD_SIZE missing, expected the number of ranks on this host: MASTER_ADDR is {address}, so there "
            "may be several hosts"
        )
    size = world if size_name is None else number(environ, size_name)
    if not 0 <= local < size <= world:
        raise LaunchError(
            f"LOCAL_RANK is {local}, {size_name or 'LOCAL_WORLD_SIZE'} {size} and WORLD_SIZE {world}, expected "
            "0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE"
        )
    inner = [claim for claim in claims if claim.launcher != SLURM] or claims
    if inner and not any(mark in environ for mark in AGENT_MARKS):
        differing = [contradictions(environ, claim) for claim in inner]
        if all(differing):
            raise LaunchError("; ".join(map(str, differing)))
    launcher = environ.get(STARTED_BY, "deepspeed or torchrun")
    return Ranks(rank, world, local, size, address, port, launcher, _interface(address, size == world))


def _interface(address: str, one_host: bool) -> str | None:
    if _is_loopback(address) and one_host:
        return "lo"
    # A host that knows its own name as a loopback address has to be reached by its own ranks too.
    return default_interface() if _is_loopback(address) else interface_towards(address)


def _is_loopback(host: str) -> bool:
    address = resolve(host)
    return address is not None and ipaddress.ip_address(address).is_loopback


def _from_claims(environ: MutableMapping[str, str], claims: list[Claim]) -> Ranks:
    first, last = claims[0], claims[-1]
    # srun may serve PMI or PMIx to its tasks; that needs no MPI. Another MPI launcher inside a step does.
    by_slurm = last.launcher == SLURM and all(
        claim.launcher.startswith(("MPICH", PMIX)) and claim.agrees(last.rank, last.world_size or 1)
        for claim in claims[:-1]
    )
    known = last if by_slurm else first
    if known.world_size == 1:
        problem = contradictions(environ, known)
        if problem is not None:
            raise LaunchError(problem)
        port = number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else free_port()
        met = None
    else:
        met = meet_by_slurm(environ, last) if by_slurm else meet_by_mpi(environ, claims)
    if met is None:
        return Ranks(0, 1, 0, 1, environ.get("MASTER_ADDR", LOOPBACK), port, known.launcher, "lo")
    return _ranks(met, known.launcher)


def _ranks(met: Agreement, launcher: str) -> Ranks:
    facts = met.facts
    return Ranks(
        facts.rank,
        facts.world_size,
        facts.local_rank,
        facts.local_world_size,
        met.address,
        met.port,
        launcher,
        met.interface,
    )
