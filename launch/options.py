"""The command line of train.py."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "ds_configs" / "zero3_cpu.json"


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}, expected at least 1")
    return value


def parse(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line of train.py; DeepSpeed's own arguments included."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        help=".txt, .jsonl (text | prompt, response | messages) or a folder of them; default: "
        "the sources of the Python library, one document a file",
    )
    data.add_argument("--tokenizer", help="folder of a Hugging Face tokenizer; default: bytes")
    data.add_argument("--seq-length", type=positive, default=256, help="tokens a row (default %(default)s)")
    budget = data.add_mutually_exclusive_group()
    budget.add_argument("--rows-per-step", type=positive, help="rows a window, over all ranks, in place of tokens")
    budget.add_argument(
        "--tokens-per-step",
        type=positive,
        default=4096,
        help="supervised tokens a window, over all ranks (default %(default)s)",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        help="folder of a Hugging Face causal model: fine-tuned if it has weights, trained "
        "from scratch if it has only a config; default: a small decoder",
    )
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--width", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--experts", type=int, default=8, help="experts a layer, 0 for none (default %(default)s)")
    model.add_argument("--top-k", type=positive, default=2, help="experts a token (default %(default)s)")
    model.add_argument("--shared-expert", action="store_true", help="a dense expert beside the routed ones")
    model.add_argument("--gradient-checkpointing", action="store_true")
    run = parser.add_argument_group("run")
    run.add_argument("--steps", type=positive, help="windows to train; default: --epochs")
    run.add_argument("--epochs", type=positive, default=1)
    run.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (default %(default)s)")
    run.add_argument("--warmup", type=int, default=10, help="windows of linear warm-up, then cosine to a tenth")
    run.add_argument("--weight-decay", type=float, default=0.1)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--output", type=Path, default=Path("runs/train"), help="folder for all results")
    run.add_argument("--save-every", type=positive, metavar="N", help="save a checkpoint every N windows")
    run.add_argument("--save", type=Path, metavar="DIR", help="folder of checkpoints (default: OUTPUT/checkpoints)")
    run.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=True,
        metavar="DIR",
        help="go on from the last checkpoint of DIR (default: the folder of --save), in the middle of a window too. "
        "SIGTERM and SIGUSR1 save one at the end of a micro-batch and end the run",
    )
    run.add_argument("--sample", default="def ", help="prompt of the text written at the end; empty for none")
    run.add_argument("--verbose", action="store_true", help="show DeepSpeed's own log")
    run.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # from the deepspeed launcher
    run.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)  # always on
    run.add_argument("--deepspeed_config", default=str(DEFAULT_CONFIG), help="DeepSpeed JSON (default: zero3_cpu.json)")
    return parser.parse_args(arguments)
