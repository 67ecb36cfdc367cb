"""The tasks of a SLURM step meet without MPI.

They meet at a desk on the first host of the step, at one of a few ports that follow from the job's number, so that
every rank knows where to look without being told.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict

from ruda_ds.errors import LaunchError
from ruda_ds.launch.claims import Claim, contradictions, number
from ruda_ds.launch.desk import join, open_desk
from ruda_ds.launch.facts import Agreement, Facts, check_facts, settings_of
from ruda_ds.launch.interfaces import FIRST_PORT, LAST_PORT, LOOPBACK, interface_of, interface_towards, resolve
from ruda_ds.launch.slurm import expand_hosts

# A batch system may start the tasks of a step minutes apart.
MEETING_S = 300.0
PORTS = 8


def slurm_ports(environ: Mapping[str, str]) -> list[int]:
    """Where to look for rank 0's desk: MASTER_PORT, or ports that follow from the numbers of the job and the step."""
    if "MASTER_PORT" in environ:
        return [number(environ, "MASTER_PORT")]
    start = number(environ, "SLURM_JOB_ID") * 131 + number(environ, "SLURM_STEP_ID") * 17
    return [FIRST_PORT + (start + 1009 * index) % (LAST_PORT - FIRST_PORT) for index in range(PORTS)]


def slurm_host(environ: Mapping[str, str]) -> str:
    """Where task 0 runs: MASTER_ADDR, or the first host of the step."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    name = next((n for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if n in environ), None)
    if name is None:
        raise LaunchError("SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are missing, and MASTER_ADDR too")
    return expand_hosts(environ[name])[0]


def meet_by_slurm(environ: Mapping[str, str], claim: Claim, limit_s: float = MEETING_S) -> Agreement:
    """See the module's text.

    Raises:
        LaunchError: on every rank that came, if something does not add up, or a rank did not come within ``limit_s``.
    """
    world = claim.world_size or 1
    one_host = claim.local_world_size == world and "MASTER_ADDR" not in environ
    host, ports = LOOPBACK if one_host else slurm_host(environ), slurm_ports(environ)
    token = f"ruda-{environ.get('SLURM_JOB_ID')}-{environ.get('SLURM_STEP_ID')}-{os.getuid()}"
    facts = Facts(
        claim.rank,
        world,
        claim.local_rank or 0,
        claim.local_world_size or world,
        socket.gethostname(),
        number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0,
        settings_of(environ),
        contradictions(environ, claim),
    )
    if claim.rank == 0:
        return _lead(facts, host, ports, token, limit_s)
    answer = join(host, ports, token, claim.rank, asdict(facts), limit_s)
    if answer is None:
        raise LaunchError(
            f"rank {facts.rank} on {facts.host} found nobody of this job at {host}, ports {ports}, within "
            f"{limit_s:.0f} s: is rank 0 elsewhere (set MASTER_ADDR), or are these ports closed (set MASTER_PORT)?"
        )
    verdict, port = answer
    if verdict.get("problem"):
        raise LaunchError(str(verdict["problem"]))
    address = str(verdict["address"])
    return Agreement(facts, address, port, interface_towards(address))


def _lead(facts: Facts, host: str, ports: list[int], token: str, limit_s: float) -> Agreement:
    """Rank 0's part: wait for all, judge, and answer."""
    desk = open_desk(ports, token)
    if desk is None:
        raise LaunchError(f"ports {ports} are all taken on {facts.host}, where rank 0 is: set MASTER_PORT")
    others = set(range(1, facts.world_size))
    came = desk.gather(others, limit_s)
    absent = sorted(others - came.keys())
    everyone = [facts, *(Facts(**told) for _, (told, _) in sorted(came.items()))]
    problem = check_facts(everyone)
    if absent and all(other.problem is None for other in everyone):
        problem = f"ranks {absent} have not come to {facts.host}, port {desk.port}, within {limit_s:.0f} s"
    reached = {address for _, address in came.values() if not ipaddress.ip_address(address).is_loopback}
    # Ranks that came over different addresses of a host with several agree on its name instead.
    address = facts.settings.get("MASTER_ADDR") or (host if len(reached) > 1 else min(reached, default=LOOPBACK))
    desk.close({"problem": problem, "address": address})
    if problem is not None:
        raise LaunchError(problem)
    return Agreement(facts, address, desk.port, interface_of(resolve(address) or LOOPBACK))
