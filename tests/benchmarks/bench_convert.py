"""Conversion against ``cp`` of the same bytes, and against DeepSpeed's own zero_to_fp32; peak memory; 512 ranks.

    python tests/benchmarks/bench_convert.py [--gigabytes 4] [--folder DIR] [--rounds 3]

A synthetic ZeRO-3 checkpoint of random float32 masters and two moments, experts split over 2 of 2 ranks. Each race
runs in a process of its own, in turn with the others. Times are of the conversion itself; what importing costs is said
apart.
Ours syncs what it writes, so ``cp`` is followed by ``sync`` of the copies; without the sync it is said too. "vs_cp" is
the speed of the slower one of to-hf (float32) and reshard as a share of that. Needs four times the size on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from synthetic_checkpoint import make, shapes_of, small_shapes

# --- races, each in a process of its own ----------------------------------------------------------------------------


def child(kind: str, words: list[str]) -> dict[str, Any]:
    """One race: seconds of it, seconds of importing, peak resident bytes before and in all."""
    begin = time.monotonic()
    if kind == "zero_to_fp32":
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as run

        work = lambda: run(words[0], words[1], max_shard_size="5GB")  # noqa: E731
    elif kind == "make":
        from ruda_ds.checkpoint import reshard_disk

        parameters, world, dense = int(words[1]), int(words[2]), words[3] == "dense"
        shapes = small_shapes() if parameters == 0 else shapes_of(parameters, dense)
        work = lambda: make(Path(words[0]), shapes, world, [0, 3, 8])  # noqa: E731
    elif kind == "plan":
        from ruda_ds.checkpoint.reshard_disk import plan_reshard
        from ruda_ds.checkpoint.to_hf import open_origin, plan_to_hf

        def work() -> Any:
            plan_to_hf(open_origin(Path(words[0])))
            return len(plan_reshard(Path(words[0]), 256, 2, [0, 5, 8]).files())
    else:
        from ruda_ds.checkpoint import inspection, reshard_disk, to_hf, verify  # noqa: F401
        from ruda_ds.cli.convert import main

        work = lambda: main([kind, *words, "-q"])  # noqa: E731
    imported, before = time.monotonic(), peak_bytes()
    result = work()
    seconds = time.monotonic() - imported
    found = {"seconds": seconds, "import_s": imported - begin, "result": result}
    return found | {"before_bytes": before, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def race(kind: str, *words: object) -> dict[str, Any]:
    """Run `child` in a new process."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", kind, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def copy(source: Path, target: Path) -> tuple[float, float]:
    """(seconds of cp, of cp and sync) for a folder or its files."""
    begin = time.monotonic()
    subprocess.run(["cp", "-r", source, target], check=True)
    copied = time.monotonic() - begin
    subprocess.run(["sync", *[path for path in target.rglob("*") if path.is_file()]], check=True)
    return copied, time.monotonic() - begin


def compete(root: Path, rounds: int) -> dict[str, list[Any]]:
    """Ours and cp of what ours has written, in turn."""
    out, twin = root / "out", root / "twin"
    ways = {
        "to-hf": ("to-hf", root / "moe", out, "--dtype", "fp32"),
        "bf16": ("to-hf", root / "moe", out, "--dtype", "bf16"),
        "reshard": ("reshard", root / "moe", out, "--world", 3, "--ep-size", 3, "--ownership", "0,2,2,8"),
    }
    found: dict[str, list[Any]] = {f"{name}{end}": [] for name in ways for end in ("", " cp")}
    for _ in range(rounds):
        for name, words in ways.items():
            ours = race(*words)
            assert ours["result"] == 0, ours
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            found[name].append({**ours, "bytes": size})
            found[f"{name} cp"].append(copy(out, twin))
            shutil.rmtree(out)
            shutil.rmtree(twin)
    return found


def dense_race(root: Path, gigabytes: float) -> dict[str, Any]:
    """DeepSpeed's zero_to_fp32 and our to-hf over the same dense checkpoint."""
    parameters = int(gigabytes * 1e9 / 12)
    race("make", root / "dense", parameters, 2, "dense")
    found = {"theirs": race("zero_to_fp32", root / "dense", root / "theirs")}
    shutil.rmtree(root / "theirs")
    found["ours"] = race("to-hf", root / "dense", root / "out", "--dtype", "fp32")
    shutil.rmtree(root / "out")
    shutil.rmtree(root / "dense")
    return found


def main() -> None:
    """Run all races and print figures; the last line is JSON."""
    words = argparse.ArgumentParser()
    words.add_argument("--gigabytes", type=float, default=4.0)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--folder", type=Path)
    arguments = words.parse_args()
    root = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="bench_convert_"))
    try:
        size = race("make", root / "moe", int(arguments.gigabytes * 1e9 / 12), 2, "moe")["result"]
        print(f"a checkpoint of {size / 1e9:.2f} GB, 2 ranks, {arguments.rounds} rounds")
        found = compete(root, arguments.rounds)
        shutil.rmtree(root / "moe")
        dense = dense_race(root, arguments.gigabytes)
        race("make", root / "many", 0, 512, "moe")
        plan = race("plan", root / "many")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report(found, dense, plan)


def extra(run: dict[str, Any]) -> int:
    """Bytes that a race took above what importing took."""
    return max(run["peak_bytes"] - run["before_bytes"], 1)


def report(found: dict[str, list[Any]], dense: dict[str, Any], plan: dict[str, Any]) -> None:
    """Print the figures."""
    shares = {}
    for name in ("to-hf", "bf16", "reshard"):
        size = found[name][0]["bytes"] / 1e9
        ours = statistics.median(run["seconds"] for run in found[name])
        plain, synced = (statistics.median(run[i] for run in found[f"{name} cp"]) for i in (0, 1))
        pairs = zip(found[name], found[f"{name} cp"], strict=True)
        ratios = [theirs[1] / run["seconds"] for run, theirs in pairs]
        shares[name] = statistics.median(ratios)
        peak = max(run["peak_bytes"] for run in found[name])
        before = max(run["before_bytes"] for run in found[name])
        print(
            f"{name:8} {size:.2f} GB written: {ours:.2f} s, {size / ours:.2f} GB/s; cp and sync {synced:.2f} s, cp "
            f"alone {plain:.2f} s; speed {min(ratios):.2f} .. {max(ratios):.2f} of cp and sync, {plain / ours:.2f} of "
            f"cp alone; peak {peak / 1e6:.0f} MB, of which {before / 1e6:.0f} MB after importing"
        )
    theirs, ours = dense["theirs"], dense["ours"]
    print(
        f"dense: zero_to_fp32 {theirs['seconds']:.2f} s, peak {theirs['peak_bytes'] / 1e6:.0f} MB, "
        f"{extra(theirs) / 1e6:.0f} MB above importing; to-hf {ours['seconds']:.2f} s, peak "
        f"{ours['peak_bytes'] / 1e6:.0f} MB, {extra(ours) / 1e6:.0f} MB above importing"
    )
    print(f"512 ranks: to-hf and reshard planned in {plan['seconds']:.1f} s, peak {plan['peak_bytes'] / 1e6:.0f} MB")
    print(f"importing takes {found['to-hf'][0]['import_s']:.1f} s, not counted above")
    peak = max(run["peak_bytes"] for name in ("to-hf", "bf16", "reshard") for run in found[name])
    print(
        json.dumps(
            {
                "name": "convert",
                "vs_cp": round(min(shares["to-hf"], shares["reshard"]), 3),
                "peak_bytes": peak,
                "to_hf_vs_cp": round(shares["to-hf"], 3),
                "reshard_vs_cp": round(shares["reshard"], 3),
                "vs_zero_to_fp32_time": round(ours["seconds"] / theirs["seconds"], 3),
                "vs_zero_to_fp32_memory": round(ours["peak_bytes"] / theirs["peak_bytes"], 3),
                "vs_zero_to_fp32_memory_above_importing": round(extra(ours) / extra(theirs), 3),
                "plan_512_ranks_s": round(plan["seconds"], 2),
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.path.insert(0, os.getcwd())
        print(json.dumps(child(sys.argv[2], sys.argv[3:])))
    else:
        main()
