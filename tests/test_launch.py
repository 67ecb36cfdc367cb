"""Finding ranks: the variables of launchers, one process without any, and mixtures that do not add up."""

import pytest

from ruda_ds.errors import LaunchError
from ruda_ds.launch import find_ranks

DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_the_launchers_variables_are_taken():
    environ = {**DEEPSPEED, "LOCAL_WORLD_SIZE": "2"}
    ranks = find_ranks(environ)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (3, 4, 1, 2)
    assert environ["LOCAL_SIZE"] == "2"
    assert "GLOO_SOCKET_IFNAME" not in environ


def test_one_process_needs_no_launcher():
    environ: dict = {}
    ranks = find_ranks(environ)
    assert (ranks.rank, ranks.world_size, ranks.master_addr) == (0, 1, "127.0.0.1")
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert int(environ["MASTER_PORT"]) > 0


@pytest.mark.parametrize("missing", list(DEEPSPEED))
def test_a_part_of_the_variables_is_refused_by_name(missing):
    environ = {name: value for name, value in DEEPSPEED.items() if name != missing}
    with pytest.raises(LaunchError, match=f"{missing} missing"):
        find_ranks(environ)


def test_values_that_do_not_add_up():
    with pytest.raises(LaunchError, match="RANK is 4 and WORLD_SIZE is 4"):
        find_ranks({**DEEPSPEED, "RANK": "4"})
    with pytest.raises(LaunchError, match="MASTER_PORT is 'http'"):
        find_ranks({**DEEPSPEED, "MASTER_PORT": "http"})


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    with pytest.raises(LaunchError, match=r"Open MPI.*install ruda_ds\[mpi\]"):
        find_ranks({"OMPI_COMM_WORLD_SIZE": "2"})
