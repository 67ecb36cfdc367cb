"""The preflight: what is measured is measured on real ranks; what differs is named, and the exit code tells."""

import argparse
import contextlib
import io
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ruda_ds.cli import cluster
from ruda_ds.cli import cluster_measure as measured
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.launch import Ranks


def facts(rank: int, host: str, **same: str) -> dict:
    return {"rank": rank, "host": host, "local_rank": 0, "same": {"torch": "2.13.0", **same}}


def test_every_pair_of_hosts_is_measured_once_and_a_round_is_disjoint():
    for count in range(1, 10):
        rounds = measured.pairs_in_rounds(count)
        assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(count), 2))
        for pairs in rounds:
            used = [host for pair in pairs for host in pair]
            assert len(used) == len(set(used))


def test_what_differs_is_named_with_hosts_and_ranks():
    same = [facts(0, "a"), facts(1, "a"), facts(2, "b")]
    assert cluster.differences(same) == []
    assert cluster.hosts_of(same) == [[0, 1], [2]]
    assert cluster.differences([*same, facts(3, "c", torch="2.12.0")]) == [
        "torch: 2.13.0 on a, b (ranks 0, 1, 2); 2.12.0 on c (ranks 3)"
    ]
    assert cluster.differences([*same, facts(3, "c", extra="x")]) == [
        "extra: absent on a, b (ranks 0, 1, 2); x on c (ranks 3)"
    ]


def test_a_slow_pair_and_a_wrong_clock_are_named():
    usual, slow = measured.Speed(10.0, 8.0, 20.0, 20.0), measured.Speed(10.0, 1.0, 20.0, 20.0)
    table = {(0, 0): slow, (0, 1): usual, (0, 2): usual, (1, 2): slow}
    assert cluster.slow_pairs(table, ["a", "b", "c"], 4.0) == ["b - c: all_to_all_gb_s 1, the median of all pairs is 8"]
    assert cluster.slow_pairs(table, ["a", "b", "c"], 10.0) == []
    assert cluster.slow_pairs({(0, 0): slow}, ["a"], 2.0) == []
    lines = cluster.clock_lines({1: (-3.0, 0.1), 2: (1.05, 0.1)}, ["a", "a", "b"], 1.0)
    assert lines == ["clock of a (rank 1): -3.000 s from rank 0's on a"]


def look_at_everything(shared: str):
    """(speeds between "hosts" 0, 1 | 2, clock offsets, ranks that do not see the folder, ranks without their own)."""
    speeds = measured.between_hosts([[0, 1], [2]], torch.device("cpu"), "gloo", 1 << 16, 2)
    clocks = measured.clock_offsets(dist.group.WORLD)
    seen = measured.ranks_without(Path(shared))
    own = Path(shared) / ("elsewhere" if dist.get_rank() == 2 else "")
    return speeds, clocks, seen, measured.ranks_without(own)


def test_measurements_on_real_ranks(tmp_path):
    (speeds, clocks, seen, missing), (others, no_clocks, *_), _ = run_ranks(look_at_everything, 3, str(tmp_path))
    assert sorted(speeds) == [(0, 0), (0, 1)]
    for speed in speeds.values():
        assert min(speed.all_reduce_gb_s, speed.all_to_all_gb_s, speed.all_reduce_us, speed.all_to_all_us) > 0
    assert (others, no_clocks) == ({}, {})
    assert sorted(clocks) == [1, 2]
    for offset, error in clocks.values():
        assert abs(offset) <= error + 1e-3
    assert seen == []
    assert missing == [(2, "No such file or directory")]
    assert list(tmp_path.iterdir()) == []


def preflight(folder: str, png: str, own_folder: bool):
    place = Path(folder) / ("elsewhere" if own_folder and dist.get_rank() == 1 else "")
    args = argparse.Namespace(folder=place, mib=0.1, runs=1, slow_factor=1e9, clock_s=1.0, png=Path(png))
    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2, "127.0.0.1", 1, "a test", "lo")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = cluster.look(args, ranks, torch.device("cpu"), "gloo")
    return code, said.getvalue()


@pytest.mark.parametrize("own_folder", [False, True])
def test_the_exit_code_is_the_same_everywhere_and_a_heat_map_is_drawn(tmp_path, own_folder):
    png = tmp_path / "pictures" / "cluster.png"
    (code, said), (other, nothing) = run_ranks(preflight, 2, str(tmp_path), str(png), own_folder)
    assert code == other == int(own_folder), said
    assert "2 ranks on 1 hosts (started by: a test)" in said
    assert ("not shared with rank 1 on " in said) == own_folder
    assert "deepspeed " in said
    assert "fused experts" in said
    assert nothing == ""
    if pytest.importorskip("matplotlib"):
        assert png.read_bytes()[:4] == b"\x89PNG"
