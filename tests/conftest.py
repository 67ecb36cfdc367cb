"""Fixtures of the tests over several hosts: made once, for all files that ask for them."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Documents of uneven lengths."""
    path = tmp_path_factory.mktemp("data") / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{n} " * (1 + n * n % 40)}) for n in range(80)))
    return path


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A folder of compiled extensions."""
    from host_helpers import build_extensions

    return build_extensions(tmp_path_factory.mktemp("built") / "extensions")


@pytest.fixture(scope="session")
def one_host(tmp_path_factory, text, built) -> list[str]:
    """The losses of four ranks on one host."""
    from host_helpers import Hosts
    from host_training import mpi, train

    folder = tmp_path_factory.mktemp("one")
    with Hosts(1, folder, built) as hosts:
        found, said = train(hosts, mpi(hosts.hostfile(folder, [4])), text, folder)
    assert "4 ranks (started by: MPICH" in said
    return found
