"""ruda-selftest: real DeepSpeed ranks on this machine, and how far their gradients are from one process in float64."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ruda_ds.cli.oracle import Case, measure_ours, measure_stock
from ruda_ds.cli.ranks import run_ranks

SPLITS = (("even", 1), ("even", 3), ("uneven", 3), ("empty", 5))
CASES = [
    Case(split, microbatches, model, work)
    for model, work in (("float32", "float32"), ("float32", "float64"), ("bfloat16", "float32"))
    for split, microbatches in SPLITS
]
# bf16: what its own rounding of activations does to a gradient; the reduction must add nothing to that.
GRADIENT_BOUND = {"float32": 1e-6, "bfloat16": 2e-2}
REDUCTION_BOUND = {"float32": 5e-7, "float64": 1e-15}
LEGEND = """\
gradient   largest relative error of a parameter's mean gradient against one process in float64
reduction  the same for the pending sums, against the float64 sum of the very same local gradients
stock      DeepSpeed ZeRO-3 as it comes, fed each micro-batch's local mean: its gradient error on the same rows"""


@dataclass(frozen=True)
class Row:
    """One line of the table; see LEGEND. ``broken`` says which bound does not hold, None if all do."""

    world: int
    split: str
    microbatches: int
    model: str
    work: str
    gradient: float
    reduction: float
    stock: float
    broken: str | None


def judge(world: int, case: Case, gradient: float, reduction: float, stock: float) -> Row:
    """A row with its verdict; a NaN breaks every bound."""
    broken = None
    for name, found, bound in (
        ("gradient", gradient, GRADIENT_BOUND[case.model]),
        ("reduction", reduction, REDUCTION_BOUND[case.work]),
    ):
        if not found <= bound:
            broken = f"{name} is {found:.1e}, bound {bound:.0e}"
    return Row(world, case.split, case.microbatches, case.model, case.work, gradient, reduction, stock, broken)


def measure(worlds: list[int], show_progress: bool) -> list[Row]:
    """All rows; each world runs twice, once with ours and once with stock DeepSpeed."""
    from tqdm import tqdm

    rows = []
    bar = tqdm(total=2 * len(worlds), unit="run", disable=not show_progress, file=sys.stderr)
    with bar, silence():
        for world in worlds:
            bar.set_description(f"{world} ranks, ours")
            ours = run_ranks(measure_ours, world, CASES)[0]
            bar.update()
            bar.set_description(f"{world} ranks, stock DeepSpeed")
            stock = run_ranks(measure_stock, world, CASES)[0]
            bar.update()
            rows += [
                judge(world, case, **found, stock=error) for case, found, error in zip(CASES, ours, stock, strict=True)
            ]
    return rows


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """The ranks' own output: their notes to developers would drown the table. A failure still brings its traceback."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.stdout.flush()
    kept, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.dup2(sink, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(sink)


def format_table(rows: list[Row]) -> str:
    """The table and what its columns mean."""
    lines = [
        f"{'ranks':>5}  {'split':<7} {'micro-':>7}  {'model':<9} {'work':<8} {'gradient':>9} {'reduction':>10} "
        f"{'stock':>9}",
        f"{'':>5}  {'':<7} {'batches':>7}",
    ]
    for row in rows:
        lines.append(
            f"{row.world:>5}  {row.split:<7} {row.microbatches:>7}  {row.model:<9} {row.work:<8} {row.gradient:>9.1e} "
            f"{row.reduction:>10.1e} {row.stock:>9.1e}" + (f"  BROKEN: {row.broken}" if row.broken else "")
        )
    return "\n".join([*lines, "", LEGEND])


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", default="1,2,3", help="numbers of ranks, by commas (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    args = parser.parse_args(arguments)
    rows = measure([int(world) for world in args.world.split(",")], show_progress=not args.json)
    broken = [row for row in rows if row.broken]
    if args.json:
        print(json.dumps({"ok": not broken, "rows": [asdict(row) for row in rows]}))
    else:
        print(format_table(rows))
        print(
            f"\n{len(broken)} of {len(rows)} rows break a bound" if broken else f"\nall {len(rows)} rows within bounds"
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
