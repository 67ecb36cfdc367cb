"""``ruda-convert``: checkpoints to and from Hugging Face folders and to other topologies; look into them, check them.

Everything streams: memory stays at one tensor and a constant, whatever the size. A result takes its name only when it
is complete; an interrupted run goes on with the same command. Exit code 0: done; 1: refused, with what was found and
what was expected; 2: wrong arguments; 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ruda_ds.errors import CheckpointError, RudaError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def size_of(text: str) -> int:
    """Bytes of "5GB" and the like."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a size such as 5GB or 500MiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def ownership(text: str) -> str | list[int]:
    """ "even", or a prefix such as 0,3,8."""
    if text == "even":
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected 'even' or a prefix such as 0,3,8") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser("ruda-convert", description=str(__doc__).partition("\n\n")[0])
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, help: str, *places: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help)
        for place in places:
            made.add_argument(place, type=Path)
        if "OUT" in places:
            made.add_argument("-n", "--dry-run", action="store_true", help="check and say what would be written")
        made.add_argument("-q", "--quiet", action="store_true", help="no progress bar")
        return made

    to_hf = command("to-hf", "a training checkpoint, or split weights, to a Hugging Face folder", "CKPT", "OUT")
    to_hf.add_argument("--dtype", choices=sorted(DTYPES), help="of floating tensors; default: that of the model")
    to_hf.add_argument("--max-shard-size", type=size_of, default="5GB", help="bytes of a file, such as 5GB")
    to_hf.add_argument("-t", "--tag", help="default: the one that 'latest' names")
    to_hf.add_argument("--layout", choices=("per-expert", "fused"), help="of experts; default: as the family has them")
    to_hf.add_argument(
        "--hf-files", type=Path, metavar="DIR", help="where to copy config.json and tokenizer files from"
    )
    to_hf.add_argument("--lora-scale", type=float, help="alpha / rank of adapters, if the checkpoint does not say it")
    to_hf.add_argument(
        "--lora",
        choices=("merge", "adapter"),
        default="merge",
        help="add adapters to the experts, or write them alone, one file for PEFT and vLLM; default: merge",
    )

    from_hf = command("from-hf", "a Hugging Face folder to weights split by owner", "DIR", "OUT")
    from_hf.add_argument("--ownership", type=ownership, required=True, help="prefix such as 0,3,8, or 'even'")
    from_hf.add_argument("--ep-size", type=int, help="ranks, with --ownership even")
    from_hf.add_argument("--max-shard-size", type=size_of, default="5GB", help="bytes of a file of dense tensors")

    reshard = command("reshard", "a checkpoint for another topology", "CKPT", "OUT")
    reshard.add_argument("--world", type=int, required=True, help="ranks of the target")
    reshard.add_argument("--ep-size", type=int, default=1, help="ranks of an expert-parallel group; default: 1")
    reshard.add_argument("--ownership", type=ownership, help="prefix such as 0,2,2,8, or 'even', the default")
    reshard.add_argument("-t", "--tag", help="default: the one that 'latest' names")

    look = command("inspect", "what is in a checkpoint or folder", "PATH")
    look.add_argument("--json", action="store_true", help="as JSON")
    look.add_argument("--all", action="store_true", help="every parameter")
    look.add_argument("-t", "--tag", help="default: the one that 'latest' names")

    check = command("verify", "checksums, coverage, shapes and finite values of a checkpoint or folder", "PATH")
    check.add_argument("-t", "--tag", help="default: the one that 'latest' names")
    check.add_argument("--no-values", action="store_true", help="do not read every value")
    return top


def _bar(total: int, name: str, quiet: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=name, unit="B", unit_scale=True, disable=quiet, miniters=1)


def _say(text: str) -> None:
    """A line that does not tear the progress bar."""
    from tqdm import tqdm

    tqdm.write(text)


def _run(plan: Any, arguments: argparse.Namespace) -> None:
    """Show a plan, and run it unless it is a dry run."""
    files = plan.files()
    print(f"{arguments.OUT}: {len(files)} files, {plan.nbytes:,} bytes of tensors")
    if arguments.dry_run:
        for name, nbytes, count in files:
            print(f"  {name}  {nbytes:,} bytes, {count} tensors")
        return
    with _bar(plan.nbytes, arguments.command, arguments.quiet) as bar:
        plan.run(arguments.OUT, bar.update, _say)


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}")


def to_hf(arguments: argparse.Namespace) -> None:
    """The subcommand."""
    import torch

    from ruda_ds.checkpoint.adapters_disk import plan_adapters
    from ruda_ds.checkpoint.to_hf import open_origin, plan_to_hf

    apart = arguments.lora == "adapter"
    if apart and arguments.layout == "fused":
        raise CheckpointError("--layout is fused, expected per-expert with --lora adapter: adapters have no other form")
    origin = open_origin(arguments.CKPT, arguments.tag, arguments.hf_files, arguments.lora_scale)
    dtype = getattr(torch, DTYPES[arguments.dtype]) if arguments.dtype else None
    if apart:
        adapters = plan_adapters(origin, dtype)
        _run(adapters, arguments)
        _print_notes(adapters.notes)
        return
    _run(plan_to_hf(origin, dtype, arguments.max_shard_size, arguments.layout), arguments)
    if origin.config is None:
        print("no config.json: the checkpoint does not hold the model's configuration (see --hf-files)")


def from_hf(arguments: argparse.Namespace) -> None:
    """The subcommand."""
    from ruda_ds.checkpoint.from_hf import plan_from_hf

    plan = plan_from_hf(arguments.DIR, arguments.ownership, arguments.ep_size, arguments.max_shard_size)
    _run(plan, arguments)


def reshard(arguments: argparse.Namespace) -> None:
    """The subcommand."""
    from ruda_ds.checkpoint.reshard_disk import plan_reshard

    given = arguments.world, arguments.ep_size, arguments.ownership, arguments.tag
    plan = plan_reshard(arguments.CKPT, *given)
    _run(plan, arguments)
    _print_notes(plan.notes)


def inspect(arguments: argparse.Namespace) -> None:
    """The subcommand."""
    from ruda_ds.checkpoint.inspection import as_table, inspect_folder

    about = inspect_folder(arguments.PATH, arguments.tag)
    limit = len(about["parameters"]) if arguments.all else 40
    print(json.dumps(about, indent=1) if arguments.json else as_table(about, limit))


def verify(arguments: argparse.Namespace) -> int:
    """The subcommand."""
    from ruda_ds.checkpoint.verify import Verification, bytes_to_read

    checks = Verification(arguments.PATH, arguments.tag, not arguments.no_values)
    total = bytes_to_read(arguments.PATH, arguments.tag, checks.values)
    with _bar(total, "verify", arguments.quiet) as bar:
        problems = checks.run(bar.update)
    for problem in problems:
        print(f"wrong: {problem}", file=sys.stderr)
    print(f"{arguments.PATH}: {len(checks.checked)} checks passed, {len(problems)} failed")
    return 1 if problems else 0


COMMANDS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "to-hf": to_hf,
    "from-hf": from_hf,
    "reshard": reshard,
    "inspect": inspect,
    "verify": verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parser().parse_args(argv)
    _one_thread()
    try:
        return COMMANDS[arguments.command](arguments) or 0
    except (RudaError, OSError) as error:
        print(f"ruda-convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(f"ruda-convert: {error}" if str(error) else "ruda-convert: interrupted", file=sys.stderr)
        return 130  # as a shell has it for one that SIGINT ended
    finally:
        _close()


def _one_thread() -> None:
    """Copies and casts gain nothing from torch's threads, and lose where other processes want the cores."""
    import torch

    torch.set_num_threads(1)


def _close() -> None:
    """Close source files: a descriptor would keep a deleted one's space."""
    from ruda_ds.checkpoint.reader import FILES

    FILES.close()


if __name__ == "__main__":
    sys.exit(main())
