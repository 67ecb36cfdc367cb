"""Finding ranks: the variables of launchers, one process without any, and mixtures that do not add up."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ruda_ds.errors import LaunchError
from ruda_ds.launch import find_ranks
from ruda_ds.launch.by_slurm import meet_by_slurm, slurm_host, slurm_ports
from ruda_ds.launch.claims import read_claims
from ruda_ds.launch.desk import Desk, probe
from ruda_ds.launch.facts import Facts, check_facts
from ruda_ds.launch.hostfile import for_mpich, read_hostfile
from ruda_ds.launch.interfaces import free_port, interface_of, own_addresses, source_towards
from ruda_ds.launch.slurm import expand_hosts, tasks_per_node

ROOT = Path(__file__).resolve().parent.parent
DEEPSPEED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "LOCAL_WORLD_SIZE": "2",
}
REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def hydra(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return dict(zip(names, map(str, (rank, size, local, local_size)), strict=True))


def open_mpi(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = map(str, (rank, size, local, local_size))
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, values, strict=True)}


def slurm(rank: int, size: int, local: int, node: int, spread: str, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": spread,
        "SLURM_STEP_NODELIST": "gpu[01-02]",
        **more,
    }


# --- variables of deepspeed and torchrun --------------------------------------------------------------------------


def test_the_launchers_variables_are_taken():
    environ = {**DEEPSPEED, "GLOO_SOCKET_IFNAME": "ib0"}
    ranks = find_ranks(environ)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (3, 4, 1, 2)
    assert environ["LOCAL_SIZE"] == "2"
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_interface_is_the_one_on_the_route_to_rank_0():
    environ = dict(DEEPSPEED)
    find_ranks(environ)
    source = source_towards("10.0.0.1")
    assert environ.get("GLOO_SOCKET_IFNAME") == (interface_of(source) if source is not None else None)


def test_one_process_needs_no_launcher():
    environ: dict = {}
    ranks = find_ranks(environ)
    assert (ranks.rank, ranks.world_size, ranks.master_addr) == (0, 1, "127.0.0.1")
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert int(environ["MASTER_PORT"]) > 0


def test_a_second_call_finds_the_same_and_knows_who_started_it():
    environ: dict = {}
    first = find_ranks(environ)
    assert find_ranks(environ) == first


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_part_of_the_variables_is_refused_by_name(missing):
    environ = {name: value for name, value in DEEPSPEED.items() if name != missing}
    with pytest.raises(LaunchError, match=f"{missing} missing"):
        find_ranks(environ)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, LOCAL_WORLD_SIZE 2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE 5 and WORLD_SIZE 4"),
        (hydra(3, 2, 1, 2), r"WORLD_SIZE=4 in the environment, but MPICH.*PMI_SIZE=2.*unset"),
        (open_mpi(2, 4, 1, 2), r"RANK=3 in the environment, but Open MPI.*OMPI_COMM_WORLD_RANK=2"),
        (slurm(0, 4, 1, 1, "2(x2)"), r"RANK=3 in the environment, but SLURM says SLURM_PROCID=0"),
    ],
)
def test_values_that_do_not_add_up(changes, words):
    with pytest.raises(LaunchError, match=words):
        find_ranks({**DEEPSPEED, **changes})


def test_without_a_local_world_several_hosts_cannot_be_told():
    environ = {name: DEEPSPEED[name] for name in REQUIRED}
    with pytest.raises(LaunchError, match="LOCAL_WORLD_SIZE missing"):
        find_ranks(environ)
    assert find_ranks({**environ, "MASTER_ADDR": "127.0.0.1"}).local_world_size == 4


def test_agents_that_another_launcher_starts_once_a_host_are_no_contradiction():
    for mark in ("TORCHELASTIC_RUN_ID", "CROSS_SIZE"):
        assert find_ranks({**DEEPSPEED, **open_mpi(1, 2, 0, 1), mark: "2"}).rank == 3


# --- MPI ----------------------------------------------------------------------------------------------------------


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(LaunchError, match=r"Open MPI.*install ruda_ds\[mpi\]"):
        find_ranks(open_mpi(0, 2, 0, 2))


@pytest.mark.parametrize(
    ("environ", "launcher", "values"),
    [
        (open_mpi(3, 5, 0, 2), "Open MPI", (3, 5, 0, 2)),
        (hydra(3, 5, 0, 2), "MPICH or another Hydra", (3, 5, 0, 2)),
        ({**hydra(3, 5, 0, 2), "I_MPI_MPIRUN": "mpirun"}, "Intel MPI", (3, 5, 0, 2)),
        (
            {
                "MV2_COMM_WORLD_RANK": "3",
                "MV2_COMM_WORLD_SIZE": "5",
                "MV2_COMM_WORLD_LOCAL_RANK": "0",
                "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            },
            "MVAPICH",
            (3, 5, 0, 2),
        ),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "job"}, "a PMIx server", (3, None, None, None)),
        ({"PMI_RANK": "3", "PMI_SIZE": "5"}, "MPICH or another Hydra", (3, 5, None, None)),
        (slurm(4, 5, 0, 2, "2(x2),1"), "SLURM", (4, 5, 0, 1)),
    ],
)
def test_what_each_launcher_says(environ, launcher, values):
    (claim,) = read_claims(environ)
    assert claim.launcher == launcher
    assert (claim.rank, claim.world_size, claim.local_rank, claim.local_world_size) == values


def test_one_mpi_process_needs_no_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    ranks = find_ranks(hydra(0, 1, 0, 1))
    assert (ranks.rank, ranks.world_size, ranks.launcher) == (0, 1, "MPICH or another Hydra")


def test_a_launcher_that_says_half_is_refused():
    with pytest.raises(LaunchError, match="PMI_SIZE=2 is set but PMI_RANK is missing"):
        find_ranks({"PMI_SIZE": "2"})


SAY = (
    "import json, os; from ruda_ds.launch import find_ranks; find_ranks();"
    "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT');"
    "print(json.dumps({name: os.environ[name] for name in names}), flush=True)"
)


# Each rank into a file of its own: what ranks write to one terminal at once may be cut into one another.
REFUSED = (
    "import os, pathlib, sys; from ruda_ds.launch import find_ranks\n"
    "try:\n    find_ranks()\n"
    "except Exception as error:\n"
    "    place = pathlib.Path(os.environ['SAID']) / os.environ['PMI_RANK']\n"
    "    place.write_text(f'{type(error).__name__}: {error}')\n"
    "    sys.exit(1)\n"
)


def clean(**changes: str) -> dict[str, str]:
    kept = {n: v for n, v in os.environ.items() if n not in REQUIRED and not n.startswith(("LOCAL_", "SLURM_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine")


def mpirun(*command: str, **changes: str) -> subprocess.CompletedProcess:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ = clean(**allowed, PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe", **changes)
    return subprocess.run(["mpirun", *command], env=environ, capture_output=True, text=True, timeout=60, cwd=ROOT)


def objects(text: str) -> list[dict[str, str]]:
    """JSON objects that may stand in one line, when ranks write at once."""
    found, decoder, rest = [], json.JSONDecoder(), text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].lstrip()
    return sorted(found, key=lambda value: int(value["RANK"]))


@needs_mpirun
def test_ranks_of_a_real_mpirun_agree_on_address_and_port():
    done = mpirun("-n", "3", sys.executable, "-c", SAY)
    assert done.returncode == 0, done.stderr
    said = objects(done.stdout)
    assert [value["RANK"] for value in said] == [value["LOCAL_RANK"] for value in said] == ["0", "1", "2"]
    assert {(value["MASTER_ADDR"], value["WORLD_SIZE"], value["LOCAL_WORLD_SIZE"]) for value in said} == {
        ("127.0.0.1", "3", "3")
    }
    assert len({value["MASTER_PORT"] for value in said}) == 1


def refused(folder: Path, *codes: str) -> list[str]:
    """What each rank of a real mpirun says, each running its own code."""
    ranks = [word for code in codes for word in (":", "-n", "1", sys.executable, "-c", code)][1:]
    done = mpirun(*ranks, SAID=str(folder))
    assert done.returncode != 0
    return [path.read_text() for path in sorted(folder.iterdir())]


@needs_mpirun
def test_every_rank_of_a_real_mpirun_is_told_of_a_contradiction_on_one(tmp_path):
    said = refused(tmp_path, REFUSED, f"import os; os.environ['WORLD_SIZE'] = '7'\n{REFUSED}")
    assert len(said) == 2
    for text in said:
        assert text.startswith("LaunchError: rank 1 on ")
        assert "WORLD_SIZE=7 in the environment" in text


@needs_mpirun
def test_different_addresses_on_ranks_are_refused(tmp_path):
    there = [f"import os; os.environ['MASTER_ADDR'] = '10.0.0.{rank}'\n{REFUSED}" for rank in range(2)]
    said = refused(tmp_path, *there)
    assert len(said) == 2
    for text in said:
        assert text.startswith("LaunchError: MASTER_ADDR is 10.0.0.0 on ")
        assert "10.0.0.1 on" in text


@needs_mpirun
def test_a_given_address_that_nobody_reaches_is_named():
    done = mpirun("-n", "2", sys.executable, "-c", SAY, MASTER_ADDR="no.such.host.invalid")
    assert done.returncode != 0
    assert "no.such.host.invalid is not reached from" in done.stderr


# --- what ranks tell each other -----------------------------------------------------------------------------------


def facts(rank: int, node: int, local: int, local_size: int, world: int = 3, **more) -> Facts:
    return Facts(rank, world, local, local_size, f"host{node}", node, **more)


GOOD = [facts(0, 0, 0, 2), facts(1, 0, 1, 2), facts(2, 2, 0, 1)]


def test_uneven_hosts_add_up():
    assert check_facts(GOOD) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (facts(2, 2, 0, 2), "rank 2 on host2 has a local world of 2, but 1 ranks are there"),
        (facts(2, 0, 1, 3), r"local ranks \[0, 1, 1\] on host0"),
        (facts(1, 2, 0, 1), "two processes are rank 1: one on host0, one on host2"),
        (facts(2, 2, 0, 1, world=4), "rank 2 on host2 has a world of 4, but 3 came"),
        (facts(2, 2, 0, 1, settings={"MASTER_PORT": "1"}), r"MASTER_PORT is not set on host0.*1 on host2 \(rank 2\)"),
        (facts(2, 2, 0, 1, problem="broken"), "rank 2 on host2: broken"),
    ],
)
def test_what_does_not_add_up_is_said_with_its_host(changed, words):
    import re

    assert re.search(words, check_facts([*GOOD[:2], changed]) or "")


# --- SLURM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", ["node7"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
        ("a[099-101]", ["a099", "a100", "a101"]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "gpu[01", "gpu01]", "gpu[3-1]", "gpu[a]", "a,,b", "gpu[]"])
def test_malformed_node_lists_are_refused(text):
    with pytest.raises(LaunchError, match="SLURM node list"):
        expand_hosts(text)


def test_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("4") == [4]
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE is '2x3'"):
        tasks_per_node("2x3")


def test_a_batch_script_outside_of_a_step_is_one_process():
    environ = slurm(0, 8, 0, 0, "4(x2)")
    del environ["SLURM_STEP_ID"]
    assert find_ranks(environ).world_size == 1


def test_the_address_and_the_ports_follow_from_the_step():
    environ = slurm(0, 4, 0, 0, "2(x2)")
    assert slurm_host(environ) == "gpu01"
    ports = slurm_ports(environ)
    assert len(set(ports)) == 8
    assert all(20000 <= port < 30000 for port in ports)
    assert slurm_ports({**environ, "SLURM_STEP_ID": "1"}) != ports
    assert slurm_ports({**environ, "MASTER_PORT": "7777"}) == [7777]


def meet(environs: list[dict[str, str]], limit_s: float = 20.0) -> list:
    """The Agreement or the LaunchError of each task, all met at once in threads."""

    def one(environ: dict[str, str]):
        try:
            return meet_by_slurm(environ, read_claims(environ)[-1], limit_s)
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(one, environs))


def test_tasks_of_a_step_meet_without_mpi_even_beside_a_stranger():
    """Two "hosts" on one: the tasks know only the step's variables and rank 0's address."""
    address = {"MASTER_ADDR": "127.0.0.1", "SLURM_JOB_ID": str(os.getpid())}
    environs = [
        slurm(rank, 3, local, node, "2,1", **address) for rank, local, node in [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    ]
    taken = socket.create_server(("", slurm_ports(environs[0])[0]))
    with taken:
        found = meet(environs)
    assert [(met.facts.rank, met.facts.local_rank, met.facts.local_world_size) for met in found] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 1),
    ]
    assert {(met.address, met.port) for met in found} == {("127.0.0.1", slurm_ports(environs[0])[1])}


def test_tasks_that_do_not_come_are_named_to_those_who_did():
    environs = [
        slurm(rank, 4, rank, 0, "4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        for port in [free_port()]
        for rank in (0, 1)
    ]
    for error in meet(environs, limit_s=2.0):
        assert "ranks [2, 3] have not come to" in str(error)


def test_srun_with_a_pmi_server_needs_no_mpi(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    address = {"SLURM_JOB_ID": str(os.getpid() + 1)}
    environs = [
        {**slurm(rank, 2, rank, 0, "2", **address), "PMI_RANK": str(rank), "PMI_SIZE": "2", "PMIX_RANK": str(rank)}
        for rank in (0, 1)
    ]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(find_ranks, environs))
    assert [ranks.rank for ranks in found] == [0, 1]
    assert {ranks.launcher for ranks in found} == {"SLURM"}
    assert {(ranks.master_addr, ranks.interface) for ranks in found} == {("127.0.0.1", "lo")}


# --- the desk -----------------------------------------------------------------------------------------------------


def test_a_desk_answers_its_own_job_among_strangers():
    desk = Desk(0, "ours")
    try:
        silent = socket.create_connection(("127.0.0.1", desk.port))
        for noise in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 70000 + b"\n", b"[]\n", b'{"token": "ours", "kind": 1}\n'):
            with socket.create_connection(("127.0.0.1", desk.port)) as stranger:
                stranger.sendall(noise)
        assert probe("127.0.0.1", desk.port, "theirs", 2.0) is None
        assert probe("127.0.0.1", desk.port, "ours", 2.0) == "127.0.0.1"
        silent.close()
    finally:
        desk.close()
    assert probe("127.0.0.1", desk.port, "ours", 1.0) is None
    # The port is free again at once, for the store that takes it.
    Desk(desk.port, "again").close()


def test_a_desk_leaves_no_thread():
    before = {thread.name for thread in threading.enumerate()}
    Desk(0, "ours").close()
    assert {thread.name for thread in threading.enumerate()} == before


def test_own_addresses_are_carried_by_their_interfaces():
    for interface, address in own_addresses():
        assert interface_of(address) == interface
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.77") is None


# --- hostfiles ----------------------------------------------------------------------------------------------------


def test_the_example_hostfile_is_one():
    hosts = read_hostfile(ROOT / "launch" / "hostfile.example")
    assert hosts == {"node01": 8, "node02": 8, "node03": 4}
    assert for_mpich(hosts) == "node01:8,node02:8,node03:4"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node01 slots=2\nnode02 slot=2\n", "line 2: 'node02 slot=2', expected"),
        ("node01:2\n", "line 1: 'node01:2', expected"),
        ("# c\n\nnode01 slots=2 # fine\nnode01 slots=1\n", "line 4: node01 again, it stands in line 3"),
        ("node01 slots=0\n", "line 1: node01 has 0 slots"),
        ("node slots=2\n-x slots=1", "line 2: '-x slots=1'"),
        ("# nothing\n", "no host in 1 lines"),
    ],
)
def test_a_bad_hostfile_is_named_with_its_line(tmp_path, text, words):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(LaunchError) as error:
        read_hostfile(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def launch_mpi(*arguments: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(ROOT / "launch" / "mpi"), *arguments]
    return subprocess.run(command, env=clean(PATH=path), capture_output=True, text=True, timeout=60, cwd=ROOT)


@needs_mpirun
def test_launch_mpi_runs_a_script_and_hands_on_its_failure(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nrank, size = os.environ['RANK'], os.environ['WORLD_SIZE']\n"
        "print(f'rank {rank} of {size} {sys.argv[1:]}\\n', end='')\n"
        "sys.exit(int(sys.argv[1]) if rank == '1' else 0)\n"
    )
    done = launch_mpi("-n", "2", str(script), "0", "--flag")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == [f"rank {rank} of 2 ['0', '--flag']" for rank in (0, 1)]
    assert launch_mpi("-n", "2", str(script), "3").returncode != 0


@needs_mpirun
def test_launch_mpi_refuses_a_missing_or_misspelt_hostfile(tmp_path):
    done = launch_mpi("--hostfile", str(tmp_path / "absent"), "script.py")
    assert done.returncode == 1
    assert "absent: cannot be read" in done.stderr
    bad = tmp_path / "hosts"
    bad.write_text("localhost slots=2\nlocalhost2 slot=2\n")
    assert "line 2: 'localhost2 slot=2'" in launch_mpi("--hostfile", str(bad), "script.py").stderr
    bad.write_text("localhost slots=2\n")
    done = launch_mpi("--hostfile", str(bad), "-n", "3", "script.py")
    assert "2 slots on 1 hosts, but 3 ranks are asked for" in done.stderr


def test_a_hostfile_is_checked_by_a_command(tmp_path):
    command = [sys.executable, "-m", "ruda_ds.launch", "--check-hostfile"]
    example = str(ROOT / "launch" / "hostfile.example")
    done = subprocess.run([*command, example], capture_output=True, text=True, env=clean(), cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "3 20\n")
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=clean(), cwd=ROOT)
    assert done.returncode == 1
    assert "cannot be read" in done.stderr


# --- the guard ----------------------------------------------------------------------------------------------------

LOST = "ruda_ds: rank 1 (host h0), in a step, ends: rank 2 (host h1) is gone"


def guarded(code: str, grace_s: float = 1.0) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "ruda_ds.launch.guard",
        sys.executable,
        "-c",
        f"import os, sys, time, signal; {code}",
    ]
    environ = clean(RUDA_LAUNCH_GRACE_S=str(grace_s))
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, cwd=ROOT)


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1),
        (f"sys.stderr.write({LOST!r})", 1),
        ("sys.stderr.write('A daemon failed to report back after being spawned')", 1),
    ],
)
def test_the_guard_hands_on_the_exit_code_and_knows_a_lost_job(code, wanted):
    assert guarded(code).returncode == wanted


def test_the_guard_ends_a_launcher_that_waits_after_its_job_has_failed():
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    done = guarded(f"{ignoring}sys.stderr.write({LOST!r}); sys.stderr.flush(); time.sleep(60)")
    assert done.returncode == 1
    assert LOST in done.stderr
    assert "has not ended within 1 s" in done.stderr
