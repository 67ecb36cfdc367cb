"""The rank runner: a rank that raises, dies or hangs ends the run with its own word, quickly."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ruda_ds.cli.ranks import run_ranks
from ruda_ds.errors import RankFailedError


def total(offset):
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return value.item()


def test_results_come_by_rank():
    assert run_ranks(total, 3, 10) == [33] * 3


def fails(how):
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("the reason of rank 1")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ("raise", "(?s)rank 1 of 2 failed.*the reason of rank 1"),
        ("kill", "exit code -9"),
        ("exit", "exit code 7"),
    ],
)
def test_a_failing_rank_is_named_long_before_the_time_out(how, word):
    began = time.monotonic()
    with pytest.raises(RankFailedError, match=word):
        run_ranks(fails, 2, how, timeout_s=60)
    assert time.monotonic() - began < 30


def sleeps():
    if dist.get_rank() == 0:
        time.sleep(60)


def test_a_rank_that_hangs_is_named():
    with pytest.raises(RankFailedError, match=r"ranks \[0\] of 2 did not finish within 3 s"):
        run_ranks(sleeps, 2, timeout_s=3)


def unpicklable():
    return lambda: None


def test_a_result_that_does_not_pickle_is_an_error():
    with pytest.raises(RankFailedError, match="pickle"):
        run_ranks(unpicklable, 1)


def test_a_build_lock_is_waited_for_and_removed_when_its_owner_is_gone(tmp_path, capsys):
    from ruda_ds.cli.warm import await_lock

    lock = tmp_path / "lock"
    assert not await_lock(tmp_path)
    lock.touch()
    threading.Timer(0.5, lock.unlink).start()
    began = time.monotonic()
    assert not await_lock(tmp_path)
    assert 0.4 < time.monotonic() - began < 5
    lock.touch()
    assert await_lock(tmp_path, stale_s=1)
    assert not lock.exists()
    assert "left by a build that was killed" in capsys.readouterr().err
