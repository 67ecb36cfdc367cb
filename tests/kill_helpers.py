"""Processes that are killed at a chosen moment of their work on files."""

from __future__ import annotations

import os
import signal
import sys


class KillAt:
    """Ends this process by SIGKILL at its n-th operation on files below a folder; counts them if n is None."""

    EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")

    def __init__(self, folder: str, at: int | None) -> None:
        self.folder, self.at, self.count = folder, at, 0
        sync = os.fsync
        os.fsync = lambda number: (self.tick(), sync(number))[1]
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple) -> None:
        if event in self.EVENTS and str(arguments[0]).startswith(self.folder):
            self.tick()

    def tick(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def run_killed(folder: str, at: int | None, words: list[str], count: str) -> None:
    """``ruda-convert``, killed at its operation number ``at`` below ``folder``; None: their number in a file."""
    from ruda_ds.cli.convert import main

    killer = KillAt(folder, at)
    code = main([*words, "-q"])
    with open(count, "w") as file:
        file.write(str(killer.count))
    sys.exit(code)
