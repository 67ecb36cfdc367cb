"""SLURM's compressed lists of hosts and of tasks a node. Pure."""

from __future__ import annotations

import re

from ruda_ds.errors import LaunchError

_PART = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """The hosts of a list such as ``gpu[01-03,7],login`` in order; several brackets in a name are a product.

    Raises:
        LaunchError: the list is malformed.
    """
    hosts: list[str] = []
    for name in _split(text):
        hosts += _expand(name, text)
    if not hosts:
        raise LaunchError(f"the SLURM node list {text!r} names no host")
    return hosts


def _split(text: str) -> list[str]:
    """Pieces between the commas that are outside of brackets."""
    pieces, depth = [""], 0
    for letter in text.strip():
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise LaunchError(f"the SLURM node list {text!r} has brackets that do not close")
        if letter == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth or (any(pieces) and not all(pieces)):
        raise LaunchError(f"the SLURM node list {text!r} has brackets that do not close, or an empty name")
    return [piece for piece in pieces if piece]


def _expand(name: str, text: str) -> list[str]:
    bracket = _PART.search(name)
    if bracket is None:
        return [name]
    before, after = name[: bracket.start()], _expand(name[bracket.end() :], text)
    numbers: list[str] = []
    for part in bracket[1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(f"the SLURM node list {text!r}: {part!r} in brackets, expected a number or a range")
        width = len(match[1])
        numbers += [f"{value:0{width}d}" for value in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return [before + value + rest for value in numbers for rest in after]


def tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Tasks of each node out of ``2(x3),1``, which is [2, 2, 2, 1].

    Raises:
        LaunchError: malformed.
    """
    tasks: list[int] = []
    for part in text.strip().split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise LaunchError(f"{name} is {text!r}, expected a list such as 2(x3),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
