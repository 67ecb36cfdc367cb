"""The ranks of an MPI job agree, through mpi4py, on who they are and on an address of rank 0 that all of them reach."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruda_ds.errors import LaunchError
from ruda_ds.launch.claims import Claim, contradictions
from ruda_ds.launch.desk import open_desk, probe
from ruda_ds.launch.facts import Agreement, Facts, check_facts, settings_of
from ruda_ds.launch.interfaces import LOOPBACK, free_port, interface_of, own_addresses

PROBE_S = 3.0


def _point_to_library(environ: Mapping[str, str]) -> None:
    """mpi4py's wheel takes the first libmpi that it finds, which need not be that of the mpirun that runs.

    Open MPI's lies beside the program that started this process; another one's would end the process in MPI_Init.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return
    prefixes = [Path(environ[name]) for name in ("PMIX_PREFIX", "PRTE_PREFIX") if name in environ]
    with contextlib.suppress(OSError):
        prefixes.append(Path(os.readlink(f"/proc/{os.getppid()}/exe")).parent.parent)
    for prefix in prefixes:
        # Not libmpi.so itself: in wheels that is a stand-in without content.
        for library in sorted((prefix / "lib").glob("libmpi.so.[0-9]*")):
            os.environ.setdefault("MPI4PY_LIBMPI", str(library))


def meet_by_mpi(environ: Mapping[str, str], claims: list[Claim]) -> Agreement:
    """See the module's text.

    Raises:
        LaunchError: on every rank, if something does not add up or rank 0 cannot be reached by all.
    """
    _point_to_library(environ)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py's wheel raises the second where it finds no libmpi
        raise LaunchError(
            f"started by {claims[0].launcher}, but mpi4py cannot be imported ({error}): install ruda_ds[mpi]"
        ) from None
    world: Any = MPI.COMM_WORLD
    claim = next((claim for claim in claims if claim.agrees(world.rank, world.size)), None)
    if claim is None:
        library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        raise LaunchError(
            f"the launcher says {' and '.join(f'{claim.said} ({claim.launcher})' for claim in claims)}, but mpi4py "
            f"({library}) says rank {world.rank} of {world.size}: mpi4py has loaded another MPI than the launcher's"
        )
    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    facts = Facts(
        world.rank,
        world.size,
        host.rank if claim.local_rank is None else claim.local_rank,
        host.size if claim.local_world_size is None else claim.local_world_size,
        socket.gethostname(),
        host.bcast(world.rank),
        settings_of(environ),
        contradictions(environ, claim),
    )
    everyone = world.allgather(facts)
    problem = check_facts(everyone)
    if problem is not None:
        raise LaunchError(problem)
    if len({other.node for other in everyone}) == 1 and "MASTER_ADDR" not in facts.settings:
        port = int(facts.settings.get("MASTER_PORT", 0)) or world.bcast(free_port() if world.rank == 0 else None)
        return Agreement(facts, LOOPBACK, port, "lo")
    return _reachable_address(world, facts, everyone)


def _reachable_address(world: Any, facts: Facts, everyone: list[Facts]) -> Agreement:
    """The first of rank 0's addresses that every rank reaches; each rank tries all of them."""
    desk, offer = None, None
    if world.rank == 0:
        given = facts.settings.get("MASTER_ADDR")
        addresses = [given] if given else [address for _, address in own_addresses()]
        token, port = secrets.token_hex(8), int(facts.settings.get("MASTER_PORT", 0)) or free_port()
        desk = open_desk([port], token)
        taken = f"port {port} is taken on {facts.host}, where rank 0 is" if desk is None else None
        offer = (addresses, desk.port if desk is not None else 0, token, taken)
    addresses, port, token, problem = world.bcast(offer)
    if problem is not None:
        raise LaunchError(problem)
    reached = [probe(address, port, token, PROBE_S) for address in addresses]
    table = world.allgather(reached)
    if desk is not None:
        desk.close()
    for index, address in enumerate(addresses):
        if all(row[index] is not None for row in table):
            return Agreement(facts, address, port, interface_of(reached[index] or LOOPBACK))
    missing = {
        address: sorted({other.host for other, row in zip(everyone, table, strict=True) if row[index] is None})
        for index, address in enumerate(addresses)
    }
    tried = "; ".join(f"{address} is not reached from {', '.join(hosts)}" for address, hosts in missing.items())
    raise LaunchError(
        f"no address of rank 0's host {everyone[0].host} is reached by every rank ({tried or 'it has no address'}): "
        "set MASTER_ADDR to one that is, or open port(s) between the hosts"
    )
