"""What `tests/gpu/run` does: build, check, measure, write. See there."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def no_card() -> str | None:
    """Why there is nothing to run on; None if there is a card of sm_80 or newer."""
    import torch

    if not torch.cuda.is_available():
        return (
            f"no CUDA card is visible to torch {torch.__version__} (built for CUDA: {torch.version.cuda}); "
            "nothing was built, checked or measured"
        )
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if major < 8:
        return f"{name} has compute capability {major}.{minor}; the kernels need 8.0 or newer"
    return None


def git(*arguments: str) -> str:
    """One line of git's answer; "unknown" outside of a checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def heading() -> dict[str, str]:
    """When, on what, and of which commit."""
    import torch

    from ruda_ds.ops import build_tools

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "ruda_ds/ops")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "card": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "CUDA": f"{torch.version.cuda}, nvcc {build_tools.cuda_release()}",
        "commit": git("rev-parse", "--short", "HEAD") + (" with uncommitted changes in ruda_ds/ops" if changed else ""),
    }


def table(rows: list[dict[str, str]]) -> str:
    """Markdown."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows])


def main() -> int:
    """See the top of `tests/gpu/run`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--results", type=Path, default=ROOT / "tests" / "benchmarks" / "results")
    args = parser.parse_args()
    reason = no_card()
    if reason:
        print(f"tests/gpu/run: {reason}", file=sys.stderr)
        return 2
    import bench
    import checks

    from ruda_ds.errors import BuildError
    from ruda_ds.ops.builder import load_fused_experts

    head = heading()
    begun = time.monotonic()
    try:
        head["binary"] = load_fused_experts(explicit=True).reason
    except BuildError as error:
        print(f"tests/gpu/run: {error}", file=sys.stderr)
        return 1
    head["build or load"] = f"{time.monotonic() - begun:.1f} s"
    checked = checks.run(args.quick)
    print(table(checked), flush=True)
    failed = [row["check"] for row in checked if row["result"] != "ok"]
    measured = bench.run(args.quick)
    print(table(measured), flush=True)
    text = "\n\n".join(
        [
            f"# Fused experts on {head['card']}",
            "\n".join(f"- {name}: {value}" for name, value in head.items() if name != "binary"),
            "## Checks\n\n" + table(checked),
            "## Times\n\n" + bench.LEGEND + "\n\n" + table(measured),
        ]
    )
    args.results.mkdir(parents=True, exist_ok=True)
    name = f"cuda-{head['date'][:10]}-{head['card'].replace(' ', '-')}-{head['commit'].split()[0]}.md"
    (args.results / name).write_text(text + "\n")
    print(f"written: {args.results / name}")
    print(json.dumps({"name": "fused_experts_cuda", **head, "failed": failed, "rows": measured}))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
