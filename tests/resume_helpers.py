"""What the tests of interrupted conversions share: small sources, commands, and runs that end in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from convert_helpers import convert, save_hf

from ruda_ds.checkpoint.from_hf import plan_from_hf
from ruda_ds.checkpoint.journal import JOURNAL
from ruda_ds.checkpoint.to_hf import open_origin, plan_to_hf
from ruda_ds.checkpoint.unfinished import RESULT

SMALL = ("--max-shard-size", "2KB")  # a file for nearly every tensor
OWNERSHIP = ("--ownership", "0,2,2,6")


def make_sources(root):
    """Source of each command, under its name, and what an uninterrupted run makes of it, as "NAME whole"."""
    save_hf("qwen3_moe", root / "from-hf")
    assert convert("from-hf", root / "from-hf", root / "to-hf", *OWNERSHIP) == 0
    assert convert("from-hf", root / "from-hf", root / "from-hf whole", *OWNERSHIP, *SMALL) == 0
    assert convert("to-hf", root / "to-hf", root / "to-hf whole", *SMALL) == 0
    return root


def words_of(command, root, out):
    """The command line."""
    return [command, root / command, out, *SMALL, *(OWNERSHIP if command == "from-hf" else ())]


def contents(folder):
    """Name -> bytes of the files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def partial_of(out):
    """Where a conversion to ``out`` grows."""
    return out.parent / f".{out.name}.partial"


def complete(out):
    """Name -> (inode, time stamp) of the files that the journal names."""
    names = json.loads((partial_of(out) / JOURNAL).read_text())["complete"]
    stats = {name: (partial_of(out) / RESULT / name).stat() for name in names}
    return {name: (found.st_ino, found.st_mtime_ns) for name, found in stats.items()}


def stamps(folder):
    """Name -> (inode, time stamp) of the files of a folder."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def interrupt(plan, out, files, error):
    """Run a plan until so many files are complete, and let it end by this error."""

    def advance(nbytes):
        if len(list((partial_of(out) / RESULT).glob("*.safetensors"))) > files:
            raise error

    with pytest.raises(Exception if isinstance(error, Exception) else KeyboardInterrupt) as caught:
        plan.run(out, advance)
    return caught.value


def plan_of(command, root):
    """The plan of `words_of`."""
    if command == "from-hf":
        return plan_from_hf(root / command, [0, 2, 2, 6], shard_limit=2000)
    return plan_to_hf(open_origin(root / command), shard_limit=2000)


def start(words, out, files):
    """A real process of the command, once it has begun on its file number ``files``."""
    command = [sys.executable, "-W", "ignore", "-m", "ruda_ds.cli.convert", *map(str, words), "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list((partial_of(out) / RESULT).glob("*.safetensors"))) < files:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    return process
