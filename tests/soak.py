"""Train on several ranks with faults at random times, and compare with the run that had none.

    python tests/soak.py --minutes 30 --ranks 4 --steps 1500

`launch/supervise` starts `mpirun -n RANKS python launch/train.py`; every 30 to 60 s (--every) one rank is killed or
stopped. The final checkpoint must hold, bit for bit, the parameters and moments of a run without faults, and neither
memory nor open files of a rank may grow while it trains. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from test_train import environment

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 10.0


def command(folder: Path, output: Path, ranks: int, steps: int) -> list[str]:
    """The training run."""
    config = json.loads((ROOT / "ds_configs" / "zero3_moe_cpu.json").read_text())
    config["ruda"]["timeout_s"] = LIMIT_S
    (folder / "config.json").write_text(json.dumps(config))
    lines = [json.dumps({"text": f"{number} " * (1 + number * number % 40)}) for number in range(400)]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    options = {
        "--data": folder / "documents.jsonl",
        "--output": output,
        "--steps": steps,
        "--tokens-per-step": 700,
        "--seq-length": 64,
        "--layers": 2,
        "--width": 32,
        "--heads": 2,
        "--warmup": 1,
        "--save-every": 5,
        "--sample": "",
        "--deepspeed_config": folder / "config.json",
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [shutil.which("mpirun") or "mpirun", "-n", str(ranks), sys.executable, str(ROOT / "launch/train.py"), *words]


@dataclass
class Watch:
    """What is seen of the ranks while they train.

    Attributes:
        faults: (seconds since the begin, action, rank) of each fault.
        samples: pid -> [(resident MiB, open files)], once a second, from its 10th window on.
    """

    faults: list[tuple[float, str, int]] = field(default_factory=list)
    samples: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)

    def look(self, ranks: list[psutil.Process], windows: int) -> None:
        """One sample of each rank; ``windows`` are saved."""
        for process in ranks:
            if windows < self.begun.setdefault(process.pid, windows) + 10:
                continue
            try:
                seen = process.memory_info().rss / 2**20, process.num_fds()
            except psutil.Error:
                continue
            self.samples.setdefault(process.pid, []).append(seen)

    def growth(self) -> tuple[int, float, int]:
        """(lives of ranks looked at, the most that memory (MiB), and open files, grew from a life's middle to its end).

        Lives of less than 10 samples are not looked at.
        """
        halves = [(s[len(s) // 2], s[-1]) for s in self.samples.values() if len(s) >= 10]
        memory, files = ([end[i] - middle[i] for middle, end in halves] for i in (0, 1))
        return len(halves), max(memory, default=0.0), max(files, default=0)


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The training processes below a launcher, by rank."""
    found = []
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            if any(word.endswith("launch/train.py") for word in child.cmdline()) and "python" in child.name():
                found.append((int(child.environ().get("PMI_RANK", "0")), child))
    except psutil.Error:
        return []
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def windows_saved(output: Path) -> int:
    """Of the last checkpoint."""
    latest = output / "checkpoints" / "latest"
    digits = re.search(r"\d+", latest.read_text()) if latest.exists() else None
    return int(digits.group()) if digits else 0


def faulty(words: list[str], output: Path, steps: int, seconds: float, every: tuple[float, float], seed: int) -> Watch:
    """Run under supervision; while ``seconds`` last, a fault comes after each random pause, up to the last windows."""
    chance, watch, began = random.Random(seed), Watch(), time.monotonic()
    supervised = [str(ROOT / "launch/supervise"), "--checkpoints", str(output / "checkpoints"), "--pause", "0.5"]
    process = subprocess.Popen(
        [sys.executable, *supervised, "--retries", "8", "--", *words], env=environment(), cwd=output
    )
    due = time.monotonic() + chance.uniform(*every)
    while process.poll() is None:
        time.sleep(1)
        ranks = ranks_of(process)
        saved = windows_saved(output)
        if saved < steps:  # After the last window, rank 0 loads what it draws with.
            watch.look(ranks, saved)
        over = time.monotonic() - began > seconds or saved > steps - 15
        if over or time.monotonic() < due or not ranks:
            continue
        action, rank = chance.choice(["SIGKILL", "SIGSTOP"]), chance.randrange(len(ranks))
        watch.faults.append((round(time.monotonic() - began, 1), action, rank))
        print(f"soak: {action} to rank {rank}", file=sys.stderr, flush=True)
        ranks[rank].send_signal(getattr(signal, action))
        due = time.monotonic() + chance.uniform(*every)
    if process.returncode:
        raise SystemExit(f"the supervised run ended with exit code {process.returncode} after {watch.faults}")
    return watch


def final_state(output: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint's model and optimizer files, by file and place in it."""
    folder = output / "checkpoints"
    tag = folder / (folder / "latest").read_text().strip()
    found: dict[str, torch.Tensor] = {}

    def walk(place: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value
        elif isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{place}/{name}", inner)
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                walk(f"{place}/{number}", inner)

    for file in sorted(tag.glob("*.pt")):
        walk(file.name, torch.load(file, map_location="cpu", weights_only=False))
    return found


def differing(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Places whose tensors are not the same bits."""
    names = sorted(wanted.keys() | found.keys())
    return [n for n in names if n not in wanted or n not in found or not torch.equal(wanted[n], found[n])]


def soak(folder: Path, ranks: int, steps: int, seconds: float, every: tuple[float, float], seed: int = 0) -> dict:
    """Both runs and their comparison.

    Raises:
        SystemExit: the supervised run gave up, or the final states differ, or a rank outlived its run.
    """
    outputs = {name: folder / name for name in ("plain", "faulty")}
    for output in outputs.values():
        output.mkdir(parents=True)
    run = {name: command(folder, output, ranks, steps) for name, output in outputs.items()}
    plain = faulty(run["plain"], outputs["plain"], steps, 0, every, seed)
    watch = faulty(run["faulty"], outputs["faulty"], steps, seconds, every, seed)
    orphans = [pid for pid in (*plain.samples, *watch.samples) if psutil.pid_exists(pid)]
    if orphans:
        raise SystemExit(f"processes {orphans} have outlived their runs")
    states = {name: final_state(output) for name, output in outputs.items()}
    wrong = differing(states["plain"], states["faulty"])
    if wrong or not states["plain"]:
        raise SystemExit(f"{len(wrong)} of {len(states['plain'])} tensors differ after {watch.faults}: {wrong[:5]}")
    growths = [plain.growth(), watch.growth()]
    return {
        "name": "soak",
        "ranks": ranks,
        "steps": steps,
        "faults": watch.faults,
        "tensors_equal": len(states["plain"]),
        "lives_watched": [lives for lives, _, _ in growths],
        "memory_growth_mib": [round(memory, 1) for _, memory, _ in growths],
        "file_growth": [files for _, _, files in growths],
    }


def main() -> None:
    """Run it for as long as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=float, nargs=2, default=(30.0, 60.0), metavar=("LEAST", "MOST"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = soak(Path(folder), args.ranks, args.steps, 60 * args.minutes, tuple(args.every), args.seed)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
