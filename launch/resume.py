"""How far a run has come, saved with the checkpoint so that the run goes on from any micro-batch; and when to save."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import signal
from dataclasses import dataclass
from pathlib import Path

from corpus import Corpus
from figures import PREFIX, LoadHistory
from stop import StopSignals

# The client state's key.
KEY = "ruda_train"


class ResumeError(ValueError):
    """The run asked for is not the one that was saved; the message says what differs."""


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        epoch, window: the window at hand.
        row: rows of it that are in the accumulator already.
    """

    epoch: int = 0
    window: int = 0
    row: int = 0

    def rest(self, window: range) -> range:
        """The rows of the window at hand that are still to come."""
        return window[self.row :]


def data_rules(args: argparse.Namespace, corpus: Corpus) -> dict[str, object]:
    """What decides which tokens are in which window: it must not change in the middle of a run."""
    budget = f"{args.rows_per_step} rows" if args.rows_per_step else f"{args.tokens_per_step} tokens"
    return {
        "data (sha256 of its tokens)": corpus.digest(),
        "seed": args.seed,
        "sequence length": args.seq_length,
        "window": budget,
    }


class Journey:
    """A run's position, and the checkpoints along the way.

    Args:
        args: the command line.
        corpus: the data.
        engine: with an accumulator.
        loads: of the experts so far, for the picture.
        signals: they are agreed on from here on.
    """

    def __init__(
        self, args: argparse.Namespace, corpus: Corpus, engine, loads: LoadHistory, signals: StopSignals
    ) -> None:
        self.engine, self.loads, self.every = engine, loads, args.save_every
        self.output, self.folder = args.output, args.save or args.output / "checkpoints"
        self.rules = data_rules(args, corpus)
        self.position = Position()
        self.signals, self.asked = signals, 0
        signals.begin()
        self._together = engine.world_size * engine.train_micro_batch_size_per_gpu()

    def micro_batch_done(self) -> bool:
        """Note a micro-batch that is in the accumulator; whether all ranks are to stop here, in the window."""
        self.position = dataclasses.replace(self.position, row=self.position.row + self._together)
        self.asked = self.signals.agreed()
        return self.asked != 0

    def window_done(self) -> None:
        """Note a step, and save where one is due."""
        self.position = Position(self.position.epoch, self.position.window + 1)
        if self.every and self.engine.global_steps % self.every == 0:
            self.save()

    def end(self) -> None:
        """The last window is done: save what is not saved yet, and give the signals back."""
        if self.every and self.engine.global_steps % self.every:
            self.save()
        self.signals.close()

    def next_epoch(self) -> int:
        """Begin the next epoch; its number."""
        self.position = Position(self.position.epoch + 1)
        return self.position.epoch

    def save(self) -> Path:
        """Write a checkpoint of this moment; every rank does."""
        import ruda_ds

        state = {"rules": self.rules, "position": dataclasses.astuple(self.position), "loads": None}
        if self.loads.columns and self.engine.global_rank == 0:
            state["loads"] = self.loads.state()
        return ruda_ds.save_checkpoint(self.engine, self.folder, client_state={KEY: state})

    def stop(self) -> None:
        """Save in the window, as a signal asked for, and say so."""
        saved = self.save()
        if self.engine.global_rank == 0:
            done = self.engine.accumulator.state.microbatches
            print(
                f"{signal.Signals(self.asked).name}: saved after micro-batch {done} of window "
                f"{self.engine.global_steps + 1} in {saved}; --resume {self.folder} goes on from there",
                flush=True,
            )

    def resume(self, folder: Path | None) -> None:
        """Stand where the last checkpoint of a folder, by default the run's own, was saved.

        Raises:
            ResumeError: other data, another order of it, or another window.
        """
        import ruda_ds

        place, client = ruda_ds.load_checkpoint(self.engine, folder or self.folder)
        state = client.get(KEY)
        if state is None:
            raise ResumeError(f"{place}: not saved by this program, its client state has no {KEY!r}")
        differing = [
            f"{name} was {state['rules'].get(name)!r}, is {value!r}"
            for name, value in self.rules.items()
            if state["rules"].get(name) != value
        ]
        if differing:
            raise ResumeError(f"{place}: the run that was saved is another one: {'; '.join(differing)}")
        self.position = Position(*state["position"])
        if state["loads"] is not None:
            self.loads.load(state["loads"])
        if self.engine.global_rank == 0:
            forget_after(self.output / "monitor", self.engine.global_steps)
            print(f"resumed from {place}", flush=True)


def forget_after(folder: Path, step: int) -> None:
    """Drop what the monitor's CSV files say of later windows than ``step``: the run goes through them once more."""
    for file in folder.glob(f"{PREFIX}*.csv"):
        with file.open(newline="") as lines:
            rows = list(csv.reader(lines))
        kept = [row for row in rows if row[0] == "step" or int(row[0]) <= step]
        with file.open("w", newline="") as out:
            csv.writer(out).writerows(kept)
