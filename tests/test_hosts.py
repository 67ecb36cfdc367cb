"""Several hosts for real, over network namespaces: whoever starts the training program, its losses are the same.

RUDA_HOST_TESTS=1 runs all of it (four minutes), without it only the first.
RUDA_OPENMPI=/path/to/prefix, of an Open MPI beside the MPICH in PATH, adds its mpirun; RUDA_INTELMPI an Intel MPI's.
"""

import pytest
from host_helpers import Hosts
from host_training import if_asked, intel_mpi, mpi, on_hosts, open_mpi, train

pytestmark = [on_hosts, pytest.mark.slow]


def test_two_hosts_of_mpich_equal_one(tmp_path, built, text, one_host):
    with Hosts(2, tmp_path, built) as hosts:
        found, _ = train(hosts, mpi(hosts.hostfile(tmp_path, [3, 1])), text, tmp_path)
    assert found == one_host


@if_asked
def test_three_uneven_hosts_of_mpich_equal_one(tmp_path, built, text, one_host):
    with Hosts(3, tmp_path, built) as hosts:
        found, _ = train(hosts, mpi(hosts.hostfile(tmp_path, [1, 2, 1])), text, tmp_path)
    assert found == one_host


@if_asked
@pytest.mark.parametrize("slots", [[2, 2], [2, 1, 1]])
@pytest.mark.parametrize(("prefix", "name"), [open_mpi("Open MPI"), intel_mpi("Intel MPI")])
def test_hosts_of_another_mpi_equal_one(tmp_path, built, text, one_host, prefix, name, slots):
    with Hosts(len(slots), tmp_path, built) as hosts:
        command = mpi(hosts.hostfile(tmp_path, slots), "--mpirun", f"{prefix}/bin/mpirun")
        found, said = train(hosts, command, text, tmp_path)
    assert f"(started by: {name})" in said
    assert found == one_host


@if_asked
@pytest.mark.parametrize(
    ("prefix", "launcher"), [(None, "mpich"), (None, "pdsh"), open_mpi("openmpi"), intel_mpi("impi")]
)
def test_the_deepspeed_launcher_on_two_hosts_equals_one(tmp_path, built, text, one_host, prefix, launcher):
    """ssh and pdsh are stand-ins that enter a namespace; all else is DeepSpeed's own."""
    with Hosts(2, tmp_path, built) as hosts:
        command = ["deepspeed", "--log_level", "error", "--hostfile", str(hosts.hostfile(tmp_path, [2, 2]))]
        command += ["--launcher", launcher, "--master_addr", "10.99.0.1", "--master_port", "29511"]
        if launcher == "openmpi":
            command += ["--launcher_args", "--mca btl_tcp_if_include net0 --bind-to none"]
        for name in ("mpirun", "mpiexec.hydra", "ompi_info") if prefix else ():
            (hosts.tools / name).write_text(f'#!/bin/sh\nexec {prefix}/bin/{name} "$@"\n')
            (hosts.tools / name).chmod(0o755)
        found, _ = train(hosts, [*command, "launch/train.py", "--deepspeed"], text, tmp_path)
    assert found == one_host
