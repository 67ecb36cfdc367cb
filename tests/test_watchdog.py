"""A rank that stops, loops, or leaves without a word: every other rank ends in time, and says which one it was."""

import os
import re
import time
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist
from fault_messages import SAYS
from helpers import base_config

import ruda_ds
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.comm.lost import FAILED, rendezvous_store
from ruda_ds.comm.watchdog import FOLDER, Watchdog
from ruda_ds.errors import RankFailedError
from ruda_ds.launch import free_port

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 8.0
# What the whole run may take: the limit, the start of the ranks, and a machine under load.
RUN_S = 60.0


def trained(folder):
    """Two windows; in the second, rank 1 of three never comes back from its own code."""
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
        while window and rank == 1:
            time.sleep(0.01)
        engine.accumulator.backward_sum(loss, local_count=2)
        engine.accumulator.step()


def test_a_rank_that_does_not_come_is_named_with_its_stack_and_nobody_waits(tmp_path):
    with pytest.raises(RankFailedError):
        run_ranks(trained, 3, tmp_path, timeout_s=RUN_S, grace_s=LIMIT_S)
    files = {path.name: path.read_text() for path in (tmp_path / FOLDER).iterdir()}
    for name in ("rank_00000.txt", "rank_00002.txt"):
        assert "in a backward" in files[name]
        assert "backward_sum" in files[name]  # its own stacks
        assert re.search(SAYS["loops"], files[name])
        assert "time.sleep(0.01)" in files[name]  # the stack of the one that loops


# A rank of a real job: its own interpreter, torch's TCP store kept by rank 0.
PROGRAM = """
import os, signal, sys, time
import torch, ruda_ds
what, culprit, rank = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
model = torch.nn.Linear(6, 2)
engine, *_ = ruda_ds.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "ruda": {"timeout_s": 8.0},
    },
)
for window in range(1000):
    if window == 2 and rank == culprit:
        print("began", time.time(), flush=True)
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "raises":
            raise ValueError("bad sample 17")
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exits":
            sys.exit(0)
    engine.accumulator.backward_sum(engine(torch.ones(rank + 1, 6)).sum(), local_count=2)
    engine.accumulator.step()
"""


@pytest.mark.parametrize(
    ("what", "culprit"), [("stopped", 0), ("stopped", 1), ("killed", 1), ("raises", 1), ("exits", 1)]
)
def test_processes_of_their_own_end_in_time_and_say_why(tmp_path, what, culprit):
    port, kept = free_port(), {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    where = {"WORLD_SIZE": "3", "LOCAL_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    kept |= {**where, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    logs = [tmp_path / f"log_{rank}" for rank in range(3)]
    ranks = [
        forked.start(
            ["-c", PROGRAM, what, culprit], log, {**kept, "RANK": str(rank), "LOCAL_RANK": str(rank)}, tmp_path
        )
        for rank, log in enumerate(logs)
    ]
    others = [rank for rank in range(3) if rank != culprit]
    try:
        codes = [forked.wait(ranks[rank], RUN_S) for rank in others]
        ended = time.time()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert all(codes), codes
    assert ended - float(logs[culprit].read_text().partition("began ")[2].split()[0]) < LIMIT_S + 3
    for rank in others:
        said = logs[rank].read_text()
        assert f"rank {culprit} (host " in said or culprit == 0
        assert re.search(SAYS["rank 0 stopped" if culprit == 0 else what], said), said


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
