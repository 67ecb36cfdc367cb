"""Hostfiles: ``host slots=4`` a line, as DeepSpeed and Open MPI read them; checked, and turned into MPICH's form.

DeepSpeed runs on one host, with a warning only, where the file is missing. Here a missing file and a line that is not
understood are errors that name the file and the line.
"""

from __future__ import annotations

import re
from pathlib import Path

from ruda_ds.errors import LaunchError

_LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>\d+)")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:-]*[A-Za-z0-9])?")


def read_hostfile(path: str | Path) -> dict[str, int]:
    """Slots by host, in the file's order. A ``#`` begins a comment.

    Raises:
        LaunchError: the file is missing, or holds no host; or a line is not ``host slots=N``, names a host again, or
            has no slot. The message names file and line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"hostfile {path}: cannot be read ({error})") from None
    hosts: dict[str, int] = {}
    seen: dict[str, int] = {}
    for place, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if match is None or _HOST.fullmatch(match["host"]) is None:
            raise LaunchError(f"hostfile {path}, line {place}: {text!r}, expected a host and its slots: host slots=4")
        host, slots = match["host"], int(match["slots"])
        if host in hosts:
            raise LaunchError(f"hostfile {path}, line {place}: {host} again, it stands in line {seen[host]}")
        if slots < 1:
            raise LaunchError(f"hostfile {path}, line {place}: {host} has {slots} slots, expected at least 1")
        hosts[host], seen[host] = slots, place
    if not hosts:
        raise LaunchError(f"hostfile {path}: no host in {len(lines)} lines, expected lines such as: host slots=4")
    return hosts


def for_mpich(hosts: dict[str, int]) -> str:
    """The value of Hydra's ``-hosts``: ``host:4,other:2``.

    Raises:
        LaunchError: an IPv6 address, which Hydra would read as a host and its slots.
    """
    for host in hosts:
        if ":" in host:
            raise LaunchError(f"{host}: Hydra takes no IPv6 address in a list of hosts, give the host's name")
    return ",".join(f"{host}:{slots}" for host, slots in hosts.items())


def require_slots(path: str | Path, hosts: dict[str, int], ranks: int) -> None:
    """Refuse more ranks than slots.

    Raises:
        LaunchError: there are more.
    """
    total = sum(hosts.values())
    if ranks > total:
        raise LaunchError(f"hostfile {path}: {total} slots on {len(hosts)} hosts, but {ranks} ranks are asked for")
