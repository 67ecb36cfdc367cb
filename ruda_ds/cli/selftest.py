"""ruda-selftest: real DeepSpeed ranks on this machine, and how far their gradients are from one process in float64."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ruda_ds.cli.oracle import Case, measure_ours, measure_stock
from ruda_ds.cli.ranks import run_ranks
from ruda_ds.cli.report import build_locks, lock_advice
from ruda_ds.errors import RudaError

SPLITS = (("even", 1), ("even", 3), ("uneven", 1), ("uneven", 3), ("empty", 5))
CASES = [
    Case(split, microbatches, model, work)
    for model, work in (("float32", "float32"), ("float32", "float64"), ("bfloat16", "float32"))
    for split, microbatches in SPLITS
]
# bf16: what its own rounding of activations does to a gradient; the reduction must add nothing to that.
GRADIENT_BOUND = {"float32": 1e-6, "bfloat16": 2e-2}
# float64: sums of a few float32 gradients, 29 bits narrower, come out exact here; 1e-15 leaves their last bit free.
REDUCTION_BOUND = {"float32": 5e-7, "float64": 1e-15}
# A run takes seconds, but the first of all on a machine also compiles DeepSpeed's shared-memory operator.
TIMEOUT_S = 300.0
LEGEND = """\
split      tokens of ranks and micro-batches: even; uneven; empty: uneven, and a rank and a micro-batch have none
model      dtype of parameters and backward          work  dtype of the pending sums and of the wire
gradient   largest relative error of a parameter's mean gradient against one process in float64
reduction  the same for the pending sums, against the float64 sum of the very same local gradients
stock      DeepSpeed ZeRO-3 as it comes, fed each micro-batch's local mean (bf16: float32 wire and sums): its
           gradient error on the same rows"""


@dataclass(frozen=True)
class Row:
    """One line of the table; see LEGEND. ``broken`` says which bounds do not hold, None if all do."""

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
    checks = (
        ("gradient", gradient, GRADIENT_BOUND[case.model]),
        ("reduction", reduction, REDUCTION_BOUND[case.work]),
    )
    broken = [f"{name} is {found:.1e}, bound {bound:.0e}" for name, found, bound in checks if not found <= bound]
    return Row(
        world,
        case.split,
        case.microbatches,
        case.model,
        case.work,
        gradient,
        reduction,
        stock,
        "; ".join(broken) or None,
    )


def measure(worlds: list[int], show_progress: bool) -> list[Row]:
    """All rows; each world runs twice, once with ours and once with stock DeepSpeed, in fresh processes.

    Raises:
        RankFailedError: a rank raised, died or hung; its traceback is in the message.
    """
    from tqdm import tqdm

    # The work dtype is ours alone: stock DeepSpeed is measured once for all of them.
    stock_cases = list(dict.fromkeys(replace(case, work="float32") for case in CASES))
    rows = []
    bar = tqdm(total=2 * len(worlds), unit="run", disable=not show_progress, file=sys.stderr)
    with bar, silence():
        for world in worlds:
            bar.set_description(f"{world} rank{'s' if world > 1 else ''}, ours")
            ours = run_ranks(measure_ours, world, CASES, timeout_s=TIMEOUT_S)[0]
            bar.update()
            bar.set_description(f"{world} rank{'s' if world > 1 else ''}, stock DeepSpeed")
            errors = run_ranks(measure_stock, world, stock_cases, timeout_s=TIMEOUT_S)[0]
            stock = dict(zip(stock_cases, errors, strict=True))
            bar.update()
            rows += [
                judge(world, case, **found, stock=stock[replace(case, work="float32")])
                for case, found in zip(CASES, ours, strict=True)
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


def format_json(rows: list[Row]) -> str:
    """One JSON object; a figure that is not finite, which JSON cannot say, is null."""
    plain = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in map(asdict, rows)
    ]
    return json.dumps({"ok": not any(row.broken for row in rows), "rows": plain}, allow_nan=False)


def parse_worlds(text: str) -> list[int]:
    """ "1,2,3" as numbers of ranks."""
    worlds = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if 0 in worlds:
        raise argparse.ArgumentTypeError(f"{text!r}, expected numbers of ranks from 1 on, separated by commas")
    return worlds


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if a bound is broken or a rank failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--world",
        type=parse_worlds,
        default="1,2,3",
        metavar="N,N,...",
        help="numbers of ranks, by commas (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    args = parser.parse_args(arguments)
    try:
        rows = measure(args.world, show_progress=not args.json)
    except RudaError as error:
        message = "\n".join([str(error), *map(lock_advice, build_locks())])
        print(json.dumps({"ok": False, "rows": [], "error": message}) if args.json else message)
        return 1
    broken = [row for row in rows if row.broken]
    if args.json:
        print(format_json(rows))
    else:
        verdict = (
            f"{len(broken)} of {len(rows)} rows break a bound" if broken else f"all {len(rows)} rows within bounds"
        )
        print(f"{format_table(rows)}\n\n{verdict}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
