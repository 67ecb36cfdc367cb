"""What the variables of each launcher say about a process. Pure: reads a mapping, asks nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ruda_ds.errors import LaunchError
from ruda_ds.launch.slurm import tasks_per_node

# Variables of rank, world size, local rank and local world size, by launcher.
MPI_VARIABLES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    # Hydra names the local ones; another PMI server, such as srun's, may not.
    "MPICH or another Hydra": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
HYDRA, INTEL, PMIX, SLURM = "MPICH or another Hydra", "Intel MPI", "a PMIx server", "SLURM"
# Only processes of a launcher that starts one agent a host have these; what started the agents is then not our world.
AGENT_MARKS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")


@dataclass(frozen=True)
class Claim:
    """What one launcher says.

    Attributes:
        launcher: its name.
        rank: among all processes that it started.
        world_size: None where it does not say.
        local_rank, local_world_size: on this host; None where it does not say.
        said: the variables and values that this was read from, for messages.
    """

    launcher: str
    rank: int
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    said: str

    def agrees(self, rank: int, world_size: int) -> bool:
        """Whether this could be the launcher of a process with this rank and world."""
        return self.rank == rank and self.world_size in (None, world_size)


def number(environ: Mapping[str, str], name: str) -> int:
    """The whole number in a variable.

    Raises:
        LaunchError: it holds something else.
    """
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(f"{name} is {environ[name]!r}, expected a whole number") from None


def read_claims(environ: Mapping[str, str]) -> list[Claim]:
    """The claims of all launchers but `deepspeed` and `torchrun`; SLURM's last.

    Raises:
        LaunchError: a launcher gives a part of what it always gives, or not a number.
    """
    found = [_mpi_claim(environ, name) for name, (_, size, *_) in MPI_VARIABLES.items() if size in environ]
    if not found and "PMIX_RANK" in environ and "PMIX_NAMESPACE" in environ:
        rank = number(environ, "PMIX_RANK")
        found.append(Claim(PMIX, rank, None, None, None, f"PMIX_RANK={rank}"))
    slurm = _slurm_claim(environ)
    return [*found, slurm] if slurm is not None else found


def _mpi_claim(environ: Mapping[str, str], launcher: str) -> Claim:
    rank, size, local, local_size = MPI_VARIABLES[launcher]
    if rank not in environ:
        raise LaunchError(f"{size}={environ[size]} is set but {rank} is missing, expected both from {launcher}")
    locals_ = [number(environ, name) if name in environ else None for name in (local, local_size)]
    said = ", ".join(f"{name}={environ[name]}" for name in (rank, size, local, local_size) if name in environ)
    if launcher == HYDRA and any(name.startswith("I_MPI_") for name in environ):
        launcher = INTEL
    return Claim(launcher, number(environ, rank), number(environ, size), locals_[0], locals_[1], said)


def _slurm_claim(environ: Mapping[str, str]) -> Claim | None:
    """Of a task of srun. A batch script itself has SLURM_PROCID too, but belongs to no step."""
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), None)
    if size is None or not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"} <= environ.keys():
        return None
    spread = next((name for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if name in environ), None)
    local_size = None
    if spread is not None and "SLURM_NODEID" in environ:
        tasks, node = tasks_per_node(environ[spread], spread), number(environ, "SLURM_NODEID")
        if node >= len(tasks):
            raise LaunchError(f"SLURM_NODEID is {node}, but {spread}={environ[spread]} describes {len(tasks)} nodes")
        local_size = tasks[node]
    names = ("SLURM_PROCID", size, "SLURM_LOCALID", *([spread] if spread else []))
    return Claim(
        SLURM,
        number(environ, "SLURM_PROCID"),
        number(environ, size),
        number(environ, "SLURM_LOCALID"),
        local_size,
        ", ".join(f"{name}={environ[name]}" for name in names),
    )


def contradictions(environ: Mapping[str, str], claim: Claim) -> str | None:
    """How RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, where set, differ from a claim; None if they do not."""
    wanted = {
        "RANK": claim.rank,
        "WORLD_SIZE": claim.world_size,
        "LOCAL_RANK": claim.local_rank,
        "LOCAL_WORLD_SIZE": claim.local_world_size,
    }
    differing = [
        f"{name}={environ[name]}"
        for name, value in wanted.items()
        if name in environ and value is not None and number(environ, name) != value
    ]
    if not differing:
        return None
    return f"{', '.join(differing)} in the environment, but {claim.launcher} says {claim.said}: unset one of them"
