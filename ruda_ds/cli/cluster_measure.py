"""What `ruda-report --cluster` measures: collectives over all ranks and between hosts, clocks, and a shared folder.

Every function here is a collective: all ranks call it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

SMALL = 2  # float32 elements a rank of a collective whose time is its latency
LATENCY_RUNS, CLOCK_RUNS = 20, 7


@dataclass(frozen=True)
class Speed:
    """Of one group of ranks; gigabytes are 10^9 bytes.

    Attributes:
        all_reduce_gb_s: 2 (n - 1) / n times the bytes of the tensor, over the time: what each rank has to send.
        all_to_all_gb_s: the most bytes that a rank sends to others, over the time.
        all_reduce_us, all_to_all_us: median time of a collective of 8 bytes a rank, in microseconds.
    """

    all_reduce_gb_s: float
    all_to_all_gb_s: float
    all_reduce_us: float
    all_to_all_us: float


def pairs_in_rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of ``count`` hosts in rounds of disjoint pairs, which are measured at the same time."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        table = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in table if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def measure(group: dist.ProcessGroup, ranks: list[int], device: torch.device, size: int, runs: int) -> Speed:
    """The speed of a group.

    Args:
        group, ranks: at least two ranks, in order.
        size: bytes of the large collectives, a rank.
        runs: of each large collective; the median counts.
    """
    own, count = ranks.index(dist.get_rank()), len(ranks)
    rows = max(1, size // 4 // count)

    def splits(rank: int, unit: int) -> list[int]:
        """Uneven, as an exchange of experts is."""
        return [unit * (2 + (rank + peer) % 3) // 3 for peer in range(count)]

    def reduce(elements: int) -> Callable[[], Any]:
        tensor = torch.zeros(elements, device=device)
        return lambda: dist.all_reduce(tensor, group=group)

    def exchange(unit: int) -> Callable[[], Any]:
        sent, received = splits(own, unit), [splits(peer, unit)[own] for peer in range(count)]
        source, target = torch.zeros(sum(sent), device=device), torch.zeros(sum(received), device=device)
        return lambda: dist.all_to_all_single(target, source, received, sent, group=group)

    reduced = 2 * (count - 1) / count * rows * count * 4
    moved = max(sum(splits(rank, rows)) - splits(rank, rows)[rank] for rank in range(count)) * 4
    return Speed(
        reduced / _seconds(reduce(rows * count), group, device, runs) / 1e9,
        moved / _seconds(exchange(rows), group, device, runs) / 1e9,
        _seconds(reduce(SMALL), group, device, LATENCY_RUNS) * 1e6,
        _seconds(exchange(SMALL), group, device, LATENCY_RUNS) * 1e6,
    )


def _seconds(run: Callable[[], Any], group: dist.ProcessGroup, device: torch.device, runs: int) -> float:
    """Median over runs; each starts after a barrier and ends when the device has."""
    times = []
    for number in range(runs + 1):
        dist.barrier(group)
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:  # the first makes the connections
            times.append(time.perf_counter() - began)
    return median(times)


def between_hosts(
    hosts: list[list[int]], device: torch.device, backend: str, size: int, runs: int
) -> dict[tuple[int, int], Speed]:
    """The speed between every two hosts, by their numbers; (h, h) is within a host. On rank 0; others get {}.

    Args:
        hosts: ranks of each host.
        backend: of the groups that are made for it, and taken down again.
    """
    own = next(number for number, ranks in enumerate(hosts) if dist.get_rank() in ranks)
    within = [(host, host) for host, ranks in enumerate(hosts) if len(ranks) > 1]
    found: dict[tuple[int, int], Speed] = {}
    for pairs in [within, *pairs_in_rounds(len(hosts))]:
        dist.barrier()
        for pair in pairs:
            if own in pair:
                ranks = sorted({rank for host in pair for rank in hosts[host]})
                group: Any = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
                speed = measure(group, ranks, device, size, runs)
                if dist.get_rank() == ranks[0]:
                    found[pair] = speed
                dist.destroy_process_group(group)
    tables: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tables, found)
    return {pair: speed for table in tables for pair, speed in table.items()} if dist.get_rank() == 0 else {}


def clock_offsets(group: dist.ProcessGroup) -> dict[int, tuple[float, float]]:
    """Seconds by which each rank's clock is ahead of rank 0's, and the error of that, by rank; {} but on rank 0.

    The other rank's time is compared with the middle of a round trip, of the shortest one; half of it is the error.

    Args:
        group: of all ranks, whose backend sends from the CPU.
    """
    rank, clock = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    offsets: dict[int, tuple[float, float]] = {}
    for peer in range(1, dist.get_world_size()):
        trips = []
        for _ in range(CLOCK_RUNS):
            if rank == 0:
                began = time.time()
                dist.send(clock, peer, group=group)
                dist.recv(clock, peer, group=group)
                ended = time.time()
                trips.append(((ended - began) / 2, clock.item() - (began + ended) / 2))
            elif rank == peer:
                dist.recv(clock, 0, group=group)
                clock.fill_(time.time())
                dist.send(clock, 0, group=group)
        if trips:
            error, offset = min(trips)
            offsets[peer] = (offset, error)
    return offsets


def ranks_without(folder: Path) -> list[tuple[int, str]]:
    """(rank, reason) of the ranks that do not see in ``folder`` what rank 0 writes there, or cannot write themselves.

    Leaves the folder as it was.
    """
    rank = dist.get_rank()
    word: list[Any] = [secrets.token_hex(8)]
    dist.broadcast_object_list(word, src=0)
    base = folder / f".ruda_cluster_{word[0]}"
    reason = _try(lambda: base.write_text(word[0])) if rank == 0 else None
    dist.barrier()
    own = base.with_name(f"{base.name}_{rank}")
    if rank:
        reason = _try(lambda: _same(base.read_text(), word[0])) or _try(lambda: own.write_text(""))
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    for path in (own, base) if rank == 0 else (own,):
        path.unlink(missing_ok=True)
    return [(peer, reason) for peer, reason in enumerate(reasons) if reason is not None]


def _same(found: str, wanted: str) -> None:
    if found != wanted:
        raise OSError("another content than rank 0 wrote")


def _try(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None
