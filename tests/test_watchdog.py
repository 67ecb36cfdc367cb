"""A rank that stops, loops, or leaves without a word: every other rank ends in time, and says which one it was."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import base_config

import ruda_ds
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.comm.lost import FAILED, rendezvous_store
from ruda_ds.comm.phase import PHASES
from ruda_ds.comm.watchdog import FOLDER, Watchdog
from ruda_ds.errors import RankFailedError, RankLostError

LIMIT_S = 8.0
# What the whole run may take: the limit, the start of the ranks, and a machine under load.
RUN_S = 60.0


def leave_with_an_exception():
    """What the interpreter does after an exception that nobody catches, inside a phase."""
    with contextlib.suppress(ValueError), PHASES.within("a backward"):
        raise ValueError("bad sample 17")
    PHASES.watchdog._at_exit()
    os._exit(3)


def trained(folder, what):
    """Two windows; in the second, rank 1 of three misbehaves between forward and backward, or before."""
    os.chdir(folder)
    rank = dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
    engine, *_ = ruda_ds.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=base_config(ruda={"timeout_s": LIMIT_S}),
    )
    for window in range(2):
        loss = engine(torch.ones(rank + 1, 6)).sum()
        if window and rank == 1:
            began = time.monotonic()
            Path("began").write_text(repr(began))
            if what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            while what == "loops":
                time.sleep(0.01)
            if what == "raises":
                leave_with_an_exception()
        engine.accumulator.backward_sum(loss, local_count=2)
        engine.accumulator.step()


@pytest.mark.parametrize("what", ["stopped", "loops"])
def test_a_rank_that_does_not_come_is_named_and_nobody_waits(tmp_path, what):
    with pytest.raises(RankFailedError):
        run_ranks(trained, 3, tmp_path, what, timeout_s=RUN_S, grace_s=LIMIT_S)
    files = {path.name: path for path in (tmp_path / FOLDER).iterdir()}
    survivors = {"rank_00000.txt", "rank_00002.txt"}
    assert survivors <= set(files)
    began = float((tmp_path / "began").read_text())
    for name in survivors:
        said = files[name].read_text()
        assert "rank 1" in said or "[1]" in said
        assert "backward" in said or "no sign of life" in said
        assert "tests/test_watchdog.py" in said or "backward_sum" in said  # its own stacks
        written = time.monotonic() - (time.time() - files[name].stat().st_mtime)
        assert written - began < LIMIT_S + 2
    if what == "loops":
        assert "ranks that have not come: [1]" in files["rank_00000.txt"].read_text()
        assert "time.sleep(0.01)" in files["rank_00000.txt"].read_text()  # the stack of the one that loops


def left(folder):
    """What the survivors of a rank that ends with an exception raise."""
    os.chdir(folder)
    try:
        trained(folder, "raises")
    except RankLostError as error:
        Path(f"said_{dist.get_rank()}").write_text(str(error))


def test_the_word_of_a_rank_that_ends_reaches_the_others(tmp_path):
    with pytest.raises(RankFailedError):
        run_ranks(left, 3, tmp_path, timeout_s=RUN_S, grace_s=LIMIT_S)
    said = {path.name: path.read_text() for path in tmp_path.glob("said_*")}
    assert set(said) == {"said_0", "said_2"}
    for text in said.values():
        assert text.startswith("rank 1 is gone")
        assert "rank 1 (host" in text
        assert "ValueError in a backward: bad sample 17" in text


def in_order():
    """A watchdog that is stopped says so, and nobody takes that for a failure."""
    watchdog = Watchdog.of_this_process(2.0)
    assert Watchdog.of_this_process(5.0) is watchdog
    if dist.get_rank() == 1:
        watchdog.stop()
    time.sleep(2.5)
    failed = rendezvous_store(1.0).check([FAILED])
    watchdog.stop()
    again = Watchdog.of_this_process(5.0)
    again.stop()
    return failed, again is watchdog


def test_a_rank_that_stops_watching_in_order_is_no_failure():
    assert run_ranks(in_order, 2) == [(False, False)] * 2
