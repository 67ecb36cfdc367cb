"""Run a function on several real ranks of this machine: gloo, one process each, from a warm fork server.

The self-test and the package's own tests use it. A rank that raises, dies or hangs ends the run with its traceback;
its peers, which then wait for it in a collective, are ended too.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from ruda_ds.errors import RankFailedError
from ruda_ds.launch import free_port

# Loaded once in the fork server: a fresh rank is then there in a fraction of a second instead of nine.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.runtime.zero.stage3",
    # DeepSpeed imports it in initialize, and it compiles at import.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "ruda_ds.engine",
    "ruda_ds.cli.warm",
]
# After one rank has failed, the others have this long to fail by themselves and be reported with it.
GRACE_S = 1.0


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    environ: Mapping[str, str] | None = None,
    grace_s: float = GRACE_S,
) -> list[Any]:
    """Call ``function(*args)`` on each of ``world_size`` ranks, inside an initialised process group.

    Args:
        function: importable by name; its result must pickle.
        world_size: number of processes.
        timeout_s: for the whole run.
        environ: additional environment variables of the ranks.
        grace_s: after one rank has failed, the others have this long to end by themselves.

    Returns:
        The results, by rank.

    Raises:
        RankFailedError: with the traceback of the rank that failed first, or the ranks that did not finish in time.
    """
    # The fork server inherits this; a rank must not grab every core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        port = free_port()  # nobody listens there: DeepSpeed names shared memory after it, and runs must not share
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            settings = (rank, world_size, port, os.path.join(folder, "store"), timeout_s, dict(environ or {}))
            process = context.Process(target=_rank_main, args=(theirs, settings, function, args), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(processes, pipes, timeout_s, grace_s)
        finally:
            for pipe in pipes:
                pipe.close()
            deadline = time.monotonic() + GRACE_S
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(processes: list[Any], pipes: list[Connection], timeout_s: float, grace_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) + len(failures) < len(pipes) and time.monotonic() < deadline:
        open_pipes = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results and rank not in failures}
        for pipe in wait(list(open_pipes), timeout=deadline - time.monotonic()):
            rank = open_pipes[pipe]  # type: ignore[index]
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(1)
                succeeded, value = False, f"the process ended without a result, exit code {processes[rank].exitcode}"
            (results if succeeded else failures)[rank] = value
            if not succeeded:
                deadline = min(deadline, time.monotonic() + grace_s)
    if failures:
        first, *others = failures.items()
        later = "".join(f"\n[rank {rank} afterwards: {text.strip().splitlines()[-1]}]" for rank, text in others)
        raise RankFailedError(f"rank {first[0]} of {len(pipes)} failed:\n{first[1]}{later}")
    if len(results) < len(pipes):
        missing = [rank for rank in range(len(pipes)) if rank not in results]
        raise RankFailedError(f"ranks {missing} of {len(pipes)} did not finish within {timeout_s:g} s")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(pipe: Connection, settings: tuple, function: Callable[..., Any], args: tuple) -> None:
    rank, world_size, port, store_path, timeout_s, environ = settings
    try:
        os.environ.update(environ)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            GLOO_SOCKET_IFNAME="lo",
        )
        _join_group(rank, world_size, store_path, timeout_s)
        # Plain pickle: torch's own would share memory with a process that is about to end.
        succeeded, answer = True, pickle.dumps((True, function(*args)))
    except BaseException:
        succeeded, answer = False, pickle.dumps((False, traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(answer)
        if succeeded:  # its peers may still be connecting to it: until the run is over, or the other end closed
            pipe.poll(timeout_s)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if succeeded else 1)  # a rank whose peers are gone would wait for them in an orderly shutdown


def _join_group(rank: int, world_size: int, store_path: str, timeout_s: float) -> None:
    from datetime import timedelta

    import deepspeed
    import torch

    from ruda_ds import _deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = torch.distributed.FileStore(store_path, world_size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    _deepspeed.forget_shared_memory_buffer()
