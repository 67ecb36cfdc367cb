"""ruda-report --cluster: look at the machines before training on them. Run it under the launcher of the training.

    launch/mpi --hostfile FILE -m ruda_ds.cli.cluster        srun python -m ruda_ds.cli.cluster

Every rank says what it is; what differs between ranks is named, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from ruda_ds.cli.report import compiled_experts, deepspeed_notes_aside, versions
from ruda_ds.errors import LaunchError
from ruda_ds.launch import Ranks, find_ranks

SETTINGS = ("OMP_NUM_THREADS", "DS_ACCELERATOR", "NCCL_IB_DISABLE", "NCCL_PROTO", "NCCL_ALGO", "TORCH_EXTENSIONS_DIR")
# Paths may differ and mean the same; what is compared is whether, and for which machine, an operator is there.
SPEEDS = ("all_reduce_gb_s", "all_to_all_gb_s")


def own_facts(ranks: Ranks) -> dict[str, Any]:
    """What this rank is: place, and everything that should be equal on all ranks under "same"."""
    import torch

    same = {**versions(), "machine": platform.machine(), "kernel": platform.release()}
    cuda = torch.cuda.is_available()
    same["device"] = torch.cuda.get_device_name(ranks.local_rank) if cuda else "cpu"
    same["processor cores"] = str(os.cpu_count())
    with deepspeed_notes_aside():
        same |= {f"fused experts: {name}": text for name, text in compiled_experts().items()}
    same |= {name: os.environ.get(name, "not set") for name in SETTINGS}
    return {"rank": ranks.rank, "local_rank": ranks.local_rank, "host": socket.gethostname(), "same": same}


def hosts_of(everyone: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Ranks of each host: a local rank 0 begins one, and the name joins the others."""
    names: dict[str, list[int]] = {}
    for facts in everyone:
        names.setdefault(facts["host"], []).append(facts["rank"])
    return list(names.values())


def differences(everyone: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each fact that is not equal on all ranks: who holds what."""
    lines = []
    for name in dict.fromkeys(name for facts in everyone for name in facts["same"]):
        holders: dict[str, list[Mapping[str, Any]]] = {}
        for facts in everyone:
            holders.setdefault(facts["same"].get(name, "absent"), []).append(facts)
        if len(holders) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on {_who(group)}" for value, group in holders.items()))
    return lines


def _who(group: Sequence[Mapping[str, Any]]) -> str:
    hosts = dict.fromkeys(facts["host"] for facts in group)
    ranks = ", ".join(str(facts["rank"]) for facts in group[:8]) + (", ..." if len(group) > 8 else "")
    return f"{', '.join(list(hosts)[:4])}{', ...' if len(hosts) > 4 else ''} (ranks {ranks})"


def slow_pairs(table: Mapping[tuple[int, int], Any], names: Sequence[str], factor: float) -> list[str]:
    """A line for each two hosts between which a collective has less than 1 / ``factor`` of the median bandwidth."""
    lines = []
    between = {pair: speed for pair, speed in table.items() if pair[0] != pair[1]}
    for field in SPEEDS if between else ():
        usual = median(getattr(speed, field) for speed in between.values())
        for (one, other), speed in between.items():
            value = getattr(speed, field)
            if value * factor < usual:
                lines.append(
                    f"{names[one]} - {names[other]}: {field} {value:.3g}, the median of all pairs is {usual:.3g}"
                )
    return lines


def clock_lines(offsets: Mapping[int, tuple[float, float]], hosts: Sequence[str], limit_s: float) -> list[str]:
    """A line for each rank whose clock is certainly more than ``limit_s`` off rank 0's."""
    return [
        f"clock of {hosts[rank]} (rank {rank}): {offset:+.3f} s from rank 0's on {hosts[0]}"
        for rank, (offset, error) in offsets.items()
        if abs(offset) - error > limit_s
    ]


def draw(table: Mapping[tuple[int, int], Any], names: Sequence[str], path: Path) -> str:
    """A heat map of the bandwidths between hosts, as PNG; what became of it, in words."""
    try:
        import matplotlib
    except ImportError:
        return "no heat map: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    side = max(3.0, 0.4 * len(names) + 1.5)
    figure, axes = plt.subplots(1, 2, figsize=(2 * side + 2, side + 0.5), layout="constrained")
    for axis, field, title in zip(axes, SPEEDS, ("all-reduce", "all-to-all-v"), strict=True):
        grid = np.full((len(names), len(names)), np.nan)
        for (one, other), speed in table.items():
            grid[one, other] = grid[other, one] = getattr(speed, field)
        picture = axis.imshow(grid, cmap="viridis", vmin=0)
        axis.set_xticks(range(len(names)), names, rotation=90)
        axis.set_yticks(range(len(names)), names)
        axis.set_title(f"{title}, GB/s between hosts")
        figure.colorbar(picture, ax=axis, shrink=0.8)
        for (row, column), value in np.ndenumerate(grid) if len(names) <= 16 else ():
            if np.isfinite(value):
                axis.text(column, row, f"{value:.2g}", ha="center", va="center", color="white")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return f"heat map: {path}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="ruda-report --cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="a folder that all hosts should share (here)")
    parser.add_argument("--mib", type=float, default=16.0, help="size of the large collectives, a rank (16)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each large collective (5)")
    parser.add_argument("--slow-factor", type=float, default=4.0, help="a pair of hosts this much below the median (4)")
    parser.add_argument("--clock-s", type=float, default=1.0, help="clocks may differ by so many seconds (1)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="to wait for all ranks (120)")
    parser.add_argument("--png", type=Path, default=Path("ruda_cluster.png"), help="the heat map (ruda_cluster.png)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if something differs, is slow, or is not there. The same code on every rank."""
    args = parse(arguments)
    try:
        ranks = find_ranks()
    except LaunchError as error:
        print(f"ruda-report --cluster: {error}", file=sys.stderr, flush=True)
        return 1
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", ranks.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    # Objects travel by gloo; what is measured goes the way that training goes.
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout_s))
    try:
        return look(args, ranks, device, "nccl" if cuda else "gloo")
    finally:
        dist.destroy_process_group()


def look(args: argparse.Namespace, ranks: Ranks, device: Any, backend: str) -> int:
    """Everything after the ranks have met; `main`'s exit code. A collective."""
    import torch.distributed as dist

    from ruda_ds.cli import cluster_measure as measured

    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, own_facts(ranks))
    hosts = hosts_of(everyone)
    whole: Any = None
    if ranks.world_size > 1:
        group = dist.new_group(backend=backend)
        whole = measured.measure(group, list(range(ranks.world_size)), device, int(args.mib * 2**20), args.runs)
        dist.destroy_process_group(group)
    table = measured.between_hosts(hosts, device, backend, int(args.mib * 2**20), args.runs)
    offsets = measured.clock_offsets(dist.group.WORLD)  # type: ignore[arg-type]
    missing = measured.ranks_without(args.folder)
    verdict: list[Any] = [None]
    if ranks.rank == 0:
        place = [facts["host"] for facts in everyone]
        names = [place[group[0]] for group in hosts]
        findings = [
            *differences(everyone),
            *slow_pairs(table, names, args.slow_factor),
            *clock_lines(offsets, place, args.clock_s),
            *(f"folder {args.folder}: not shared with rank {rank} on {place[rank]} ({why})" for rank, why in missing),
        ]
        show(ranks, everyone, hosts, whole, table, offsets)
        print(draw(table, names, args.png))
        print("\n".join(["", "Differences", *(f"  {line}" for line in findings or ["none"])]), flush=True)
        verdict = [int(bool(findings))]
    dist.broadcast_object_list(verdict, src=0)
    return int(verdict[0])


def show(
    ranks: Ranks,
    everyone: Sequence[Mapping[str, Any]],
    hosts: list[list[int]],
    whole: Any,
    table: Mapping[tuple[int, int], Any],
    offsets: Mapping[int, tuple[float, float]],
) -> None:
    """Print what was found, on rank 0."""
    print(
        f"{ranks.world_size} ranks on {len(hosts)} hosts (started by: {ranks.launcher}), rank 0 at "
        f"{ranks.master_addr}, interface {os.environ.get('GLOO_SOCKET_IFNAME', 'not set')}"
    )
    for group in hosts:
        clock = max((offsets[rank] for rank in group if rank in offsets), key=lambda pair: abs(pair[0]), default=None)
        ahead = f"clock {clock[0] * 1e3:+.2f} ms (within {clock[1] * 1e3:.2f})" if clock else "clock is the reference"
        print(f"  {everyone[group[0]]['host']:<20} ranks {', '.join(map(str, group))}; {ahead}")
    print("\nOn rank 0")
    for name, value in everyone[0]["same"].items():
        print(f"  {name:<34} {value}")
    columns = ("all-reduce GB/s", "all-to-all-v GB/s", "all-reduce us", "all-to-all-v us")
    print(f"\n{'':<34}" + "".join(f"{column:>20}" for column in columns))
    rows = {"all ranks": whole} if whole is not None else {}
    for one, other in sorted(table):
        first, second = everyone[hosts[one][0]]["host"], everyone[hosts[other][0]]["host"]
        rows[f"within {first}" if one == other else f"{first} - {second}"] = table[one, other]
    for name, speed in rows.items():
        values = (speed.all_reduce_gb_s, speed.all_to_all_gb_s, speed.all_reduce_us, speed.all_to_all_us)
        print(f"  {name:<32}" + "".join(f"{value:>20.4g}" for value in values))


if __name__ == "__main__":
    sys.exit(main())
