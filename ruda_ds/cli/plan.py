"""ruda-report --plan: what a run would hold and send on many ranks, before anybody has them.

    ruda-report --plan --world 2048 --ep-size 64 --model DIR --bandwidth 40 --flops 350

DIR holds a transformers config.json. Bandwidth and operations are what a rank reaches in practice: measure them with
ruda-report --cluster and a short run. Activations and gathered parameters are estimates; bytes suppose even routing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from ruda_ds.cli import plan_model
from ruda_ds.errors import ConfigError

GIB = 2**30


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="ruda-report --plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, required=True, metavar="W", help="ranks")
    parser.add_argument("--ep-size", type=int, default=1, metavar="P", help="ranks that share the experts (1)")
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a transformers config.json")
    parser.add_argument("--bandwidth", type=float, required=True, metavar="GB/S", help="that a rank sends, 10^9 bytes")
    parser.add_argument("--flops", type=float, required=True, metavar="TFLOP/S", help="that a rank computes, 10^12")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of one exchange (50)")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="B", help="rows (1)")
    parser.add_argument("--seq-length", type=int, default=4096, metavar="S", help="tokens a row (4096)")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="G", help="a window (1)")
    parser.add_argument("--memory", type=float, default=80.0, metavar="GIB", help="of a rank's device (80)")
    parser.add_argument("--checkpointing", action="store_true", help="each block is recomputed in the backward")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if the run cannot be, or does not fit."""
    args = parse(arguments)
    given = (args.micro_batch, args.seq_length, args.micro_batches)
    run = plan_model.Run(args.world, args.ep_size, *given, checkpointing=args.checkpointing)
    try:
        for name in ("micro_batch", "seq_length", "micro_batches", "bandwidth", "flops", "memory"):
            if getattr(args, name) <= 0:
                raise ConfigError(name, getattr(args, name), "expected a number above 0")
        shape = plan_model.read_shape(args.model)
        plan_model.check(shape, run)
    except ConfigError as error:
        print(f"ruda-report --plan: {str(error).removeprefix('DeepSpeed config: ')}", file=sys.stderr)
        return 1
    held = plan_model.memory(shape, run)
    moved = plan_model.traffic(shape, run)
    spent = plan_model.times(shape, run, args.flops * 1e12, args.bandwidth * 1e9, args.latency_us * 1e-6)
    rows = plan_model.largest_rows(shape, run, args.memory * GIB)
    if args.json:
        report = {
            "parameters": shape.total,
            "active": shape.active,
            "memory": held,
            "traffic": [asdict(entry) for entry in moved],
            "seconds": spent,
            "largest_micro_batch": rows,
        }
        print(json.dumps(report))
        return int(rows < 1)
    print(
        f"{shape.total:,} parameters, {shape.active:,.0f} used by a token; {shape.experts} experts, {shape.top_k} a "
        f"token, in {shape.moe_layers} of {shape.layers} layers\n{run.world} ranks, experts over {run.ep_size}, each "
        f"held by {run.world // run.ep_size}; {run.rows} x {run.length} tokens a micro-batch, "
        f"{run.micro_batches} a window"
    )
    show_tables(held, moved, spent)
    at_most = f"at {run.length} tokens a row, within {args.memory:g} GiB"
    print(f"\nLargest micro-batch: {rows} rows {at_most}" if rows else f"\nNot even one row fits {at_most}")
    if rows:
        best = plan_model.times(
            shape, replace(run, rows=rows), args.flops * 1e12, args.bandwidth * 1e9, args.latency_us * 1e-6
        )
        print(f"  share of time in exchange then: {best['share in exchange']:.1%}")
    return int(rows < 1)


def show_tables(held: dict[str, float], moved: list[plan_model.Traffic], spent: dict[str, float]) -> None:
    """Memory, bytes and seconds, in columns."""
    print("\nMemory of a rank, GiB")
    for name, size in {**held, "together": sum(held.values())}.items():
        print(f"  {name:<44}{size / GIB:>12.3f}")
    print(f"\n{'A window of a rank':<46}{'ranks':>12}{'handed over, MB':>18}{'sent, MB':>14}")
    for entry in moved:
        print(f"  {entry.name:<44}{entry.group:>12}{entry.given / 1e6:>18.3f}{entry.sent / 1e6:>14.3f}")
    print("\nSeconds of a window")
    for name, value in spent.items():
        print(f"  {name:<44}{f'{value:.1%}' if 'share' in name else f'{value:.4g}':>12}")


if __name__ == "__main__":
    sys.exit(main())
