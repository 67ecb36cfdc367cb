"""Train a language model with exact windows: ``deepspeed launch/train.py --deepspeed --deepspeed_config FILE``.

Runs under the deepspeed launcher, ``mpirun -n 2 python launch/train.py``, torchrun, or plain ``python``. A window is a
budget of supervised tokens over all ranks; its gradient is the mean over exactly those tokens, whatever the number of
ranks and however unevenly the rows fall.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]

from stop import StopSignals  # noqa: E402


def quiet() -> None:
    """DeepSpeed's and torch's notes to developers would drown the progress bar."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("ruda_ds").setLevel(logging.WARNING)


def learning_rate(step: int, warmup: int, total: int) -> float:
    """Factor of the peak rate: linear warm-up, then a cosine to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def build_model(args: argparse.Namespace, config: dict, rank: int, vocabulary: int):
    """The model of the command line, the same on every rank but for the experts that a rank owns."""
    import torch
    from decoder import Decoder, DecoderConfig, FolderModel

    from ruda_ds.config import check
    from ruda_ds.moe import ownership_of

    torch.manual_seed(args.seed)
    experts = check(config).experts
    if args.model:
        place = rank % experts.ep_size if experts is not None else 0
        return FolderModel(args.model, args.gradient_checkpointing, vocabulary, experts, place)
    ownership, place = None, 0
    if args.experts and experts is not None:
        ownership = ownership_of(experts.ownership, args.experts, experts.ep_size).prefix
        place = rank % experts.ep_size
    return Decoder(
        DecoderConfig(
            vocabulary,
            args.width,
            args.layers,
            args.heads,
            experts=args.experts,
            top_k=args.top_k,
            shared=args.shared_expert,
            ownership=ownership,
            rank=place,
            checkpointing=args.gradient_checkpointing,
        )
    )


def build_engine(args: argparse.Namespace, config: dict, model, total_steps: int):
    """The DeepSpeed engine with an exact accumulator, AdamW, warm-up and cosine."""
    import torch

    import ruda_ds

    # The table and the picture are made from what this monitor writes; others go beside it, by config.
    config = dict(config)
    config["csv_monitor"] = {"enabled": True, "output_path": str(args.output), "job_name": "monitor"}
    groups = [
        {
            "params": [p for p in model.parameters() if p.requires_grad and p.ndim >= 2],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=args.lr, betas=(0.9, 0.95))
    schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(  # noqa: E731
        optimizer, lambda step: learning_rate(step, args.warmup, total_steps)
    )
    engine, *_ = ruda_ds.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    return engine


def batch_of(rows, share: range, window: range, device):
    """(tokens, positions, documents, targets), each [B, S]; of an empty share, one row without a target."""
    import torch
    from corpus import NO_TARGET

    picked = slice(share.start, share.stop) if share else slice(window.start, window.start + 1)
    columns = [torch.from_numpy(c[picked]).long() for c in (rows.inputs, rows.positions, rows.documents, rows.targets)]
    if not share:
        columns[3] = torch.full_like(columns[3], NO_TARGET)
    return [column.to(device) for column in columns]


def train_window(engine, rows, window: range, journey):
    """All micro-batches of a window, then its step: the accumulation contract in five lines. None if told to stop."""
    import torch.nn.functional as F
    from corpus import NO_TARGET, deal

    from ruda_ds.moe import uncounted

    accumulator, rest = engine.accumulator, journey.position.rest(window)
    for share in deal(rest, engine.global_rank, engine.world_size, engine.train_micro_batch_size_per_gpu()):
        tokens, positions, documents, targets = batch_of(rows, share, window, engine.device)
        # A rank without rows takes part with one that counts for nothing, in the loss and in the experts' load.
        with contextlib.nullcontext() if share else uncounted(engine.module):
            logits = engine(tokens, positions, documents)
        loss_sum = F.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum"
        )
        accumulator.backward_sum(loss_sum, local_count=int((targets != NO_TARGET).sum()))
        if journey.micro_batch_done():
            return None
    return accumulator.step()


def count_parameters(engine) -> int:
    """Parameters of the whole model, every expert counted once. A collective."""
    import torch

    placement = engine.accumulator.placement
    dense = sum(p.numel for p in placement if not p.experts)
    own = sum(p.numel / p.world_size for p in placement if p.experts)  # as many ranks hold a copy of these
    experts = torch.tensor(own, dtype=torch.float64, device=engine.device)
    torch.distributed.all_reduce(experts)
    return dense + round(experts.item())


def plan_epoch(args: argparse.Namespace, corpus, epoch: int):
    """(rows, windows) of an epoch."""
    from corpus import windows

    rows = corpus.rows(args.seed, epoch, args.seq_length)
    if args.rows_per_step:
        return rows, windows([1] * len(rows.counts), args.rows_per_step)
    return rows, windows(rows.counts, args.tokens_per_step)


def total_windows(args: argparse.Namespace, corpus) -> int:
    """Windows of the run. Epochs differ: where prompts are masked, each order fills the budget in its own way."""
    return args.steps or sum(len(plan_epoch(args, corpus, epoch)[1]) for epoch in range(args.epochs))


class ExpertLoads:
    """Tokens by layer and expert, window by window, and the selection biases that follow from them."""

    # Scores are softmax probabilities: within some dozens of windows the biases can outweigh them.
    rate = 0.01

    def __init__(self, model) -> None:
        from figures import LoadHistory

        from ruda_ds.moe import expert_layers

        self.model = model
        self.history = LoadHistory()
        self.watched = bool(expert_layers(model))

    def take(self) -> dict[str, float]:
        """The window's load: the most used expert of the worst layer, in even shares. Empty without experts."""
        if not self.watched:
            return {}
        from ruda_ds.moe import expert_layers, take_expert_counts, update_correction_biases

        taken = take_expert_counts(self.model)
        if all(layer.correction_bias is not None for layer in expert_layers(self.model)):
            update_correction_biases(self.model, taken, self.rate)
        counts = taken.cpu().numpy()
        self.history.add(counts)
        return {"expert_load": float((counts.max(1) / counts.mean(1).clip(min=1)).max())}


def describe(result, speed: float, load: float | None) -> str:
    """What the progress bar says of a window."""
    if result.skipped:
        return f"skipped: {result.reason}"
    norm = f"{result.grad_norm:.2f}"
    if result.clipped_norm < result.grad_norm:
        norm += f" -> {result.clipped_norm:.2f}"
    unused = f", {len(result.untouched)} parameters unused" if result.untouched else ""
    experts = f", load {load:.1f}" if load is not None else ""
    return f"loss {result.loss:.3f}, norm {norm}{experts}, {speed:,.0f} tok/s{unused}"


def run_windows(args: argparse.Namespace, corpus, engine, journey, loads: ExpertLoads, total: int) -> bool:
    """The windows from where the journey stands up to ``total``; False if a signal ended it before."""
    from tqdm import tqdm

    from ruda_ds.monitor import write_window

    rows, plan = plan_epoch(args, corpus, journey.position.epoch)
    look = {"unit": "step", "dynamic_ncols": True, "file": sys.stdout, "mininterval": 0.5}
    begin = engine.global_steps
    bar = tqdm(range(begin, total), initial=begin, total=total, disable=engine.global_rank != 0, **look)
    for _ in bar:
        if journey.position.window == len(plan):
            rows, plan = plan_epoch(args, corpus, journey.next_epoch())
        began, rate = time.perf_counter(), engine.get_lr()[0]
        result = train_window(engine, rows, plan[journey.position.window], journey)
        if result is None:
            bar.close()
            return False
        speed = result.count / (time.perf_counter() - began)
        load = loads.take()
        write_window(engine, result, {"tokens_per_s": speed, "learning_rate": rate, **load})
        bar.set_postfix_str(describe(result, speed, load.get("expert_load")), refresh=False)
        journey.window_done()
    return True


def train(args: argparse.Namespace, signals: StopSignals) -> None:
    """The whole run."""
    from ruda_ds.launch import find_ranks

    ranks = find_ranks(limit_s=start_limit(args))
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not args.verbose:
        quiet()
    import figures
    from corpus import ByteTokenizer, Corpus, FolderTokenizer
    from resume import Journey

    from ruda_ds import _deepspeed

    leader = ranks.rank == 0
    tokenizer = FolderTokenizer(args.tokenizer) if args.tokenizer else ByteTokenizer()
    corpus = Corpus(args.data, tokenizer)
    total, windows = total_windows(args, corpus), len(plan_epoch(args, corpus, 0)[1])
    if leader and not args.resume:
        figures.clear(args.output / "monitor")
    config = _deepspeed.load_config(args.deepspeed_config)
    engine = build_engine(args, config, build_model(args, config, ranks.rank, tokenizer.vocabulary), total)
    loads = ExpertLoads(engine.module)
    size = count_parameters(engine)
    if leader:
        args.output.mkdir(parents=True, exist_ok=True)
        print(
            f"{len(corpus.documents):,} documents, {corpus.targets:,} targets, {windows:,} windows an epoch; "
            f"{size:,} parameters on {ranks.world_size} ranks (started by: {ranks.launcher})",
            flush=True,
        )
    journey = Journey(args, corpus, engine, loads.history, signals)
    if args.resume:
        journey.resume(None if args.resume is True else args.resume)
    if run_windows(args, corpus, engine, journey, loads, total):
        journey.end()
        finish(args, engine, tokenizer, leader, loads)
    else:
        journey.stop()


def finish(args: argparse.Namespace, engine, tokenizer, leader: bool, loads: ExpertLoads) -> None:
    """A few lines of text from the model, the table, the picture, and where they are."""
    import figures
    from decoder import generate

    if args.sample:
        engine.eval()
        prompt = tokenizer.encode(args.sample)
        tokens = generate(engine, prompt, tokenizer.end, length=160, context=args.seq_length, seed=args.seed)
        if leader:
            print("\n--- a sample " + "-" * 60 + f"\n{tokenizer.decode(tokens)}\n" + "-" * 73)
    if leader:
        table = figures.collect(args.output / "monitor")
        figures.write_table(table, args.output / "metrics.csv")
        figures.draw(table, args.output / "loss.png")
        pictures = [args.output / "loss.png"]
        if loads.history.columns:
            pictures.append(args.output / "experts.png")
            figures.draw_experts(loads.history, pictures[-1])
        losses = [row["loss"] for row in table if "loss" in row]
        fell = "no loss was finite" if table else "nothing was left to train"
        if losses:
            fell = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
        places = "".join(f"\n  {place}" for place in [*pictures, args.output / "metrics.csv"])
        print(f"{fell} in {len(table)} windows{places}\n  {args.output / 'monitor'}/", flush=True)


def start_limit(args: argparse.Namespace) -> float:
    """Seconds for the ranks to find each other: "ruda": {"timeout_s"}, read before anything heavy is loaded."""
    try:
        return float(json.loads(Path(args.deepspeed_config).read_text())["ruda"]["timeout_s"])
    except (OSError, ValueError, KeyError, TypeError):  # silent, or wrong: the config is checked later
        return 1800.0


def main() -> None:
    """Run, and leave nothing waiting."""
    from options import parse

    from ruda_ds.launch.ending import announce, end_mpi_job

    args = parse(__doc__)
    try:
        train(args, StopSignals())
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        announce(error)
        end_mpi_job()
        sys.exit(1)
    import torch.distributed as dist

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
