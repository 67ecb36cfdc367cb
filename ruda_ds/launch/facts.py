"""What the ranks of a job tell each other before they train, and whether it adds up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """What a rank tells the others.

    Attributes:
        host: its host's name.
        node: equal for the ranks of one host, and only for them.
        settings: MASTER_ADDR and MASTER_PORT, where the environment has them.
        problem: what is wrong here; every rank then ends with it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    node: int
    settings: dict[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Agreement:
    """What all ranks agreed on, as this one sees it.

    Attributes:
        facts: of this rank.
        address, port: where rank 0 will listen.
        interface: that leads there from this host; None if it is not known.
    """

    facts: Facts
    address: str
    port: int
    interface: str | None


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT, where they are set."""
    return {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}


def check_facts(everyone: list[Facts]) -> str | None:
    """What does not add up among the facts of all ranks, with what was found where; None if all is well."""
    for facts in everyone:
        if facts.problem is not None:
            return f"rank {facts.rank} on {facts.host}: {facts.problem}"
    by_rank: dict[int, Facts] = {}
    for facts in everyone:
        other = by_rank.setdefault(facts.rank, facts)
        if other is not facts:
            return f"two processes are rank {facts.rank}: one on {other.host}, one on {facts.host}"
        if facts.world_size != len(everyone):
            return f"rank {facts.rank} on {facts.host} has a world of {facts.world_size}, but {len(everyone)} came"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        values = [facts.settings.get(name) for facts in everyone]
        for facts, value in zip(everyone, values, strict=True):
            if value != values[0]:
                return (
                    f"{name} is {values[0] or 'not set'} on {everyone[0].host} (rank {everyone[0].rank}) and "
                    f"{value or 'not set'} on {facts.host} (rank {facts.rank}), expected the same or none everywhere"
                )
    return _check_hosts(everyone)


def _check_hosts(everyone: list[Facts]) -> str | None:
    nodes: dict[int, list[Facts]] = {}
    for facts in everyone:
        nodes.setdefault(facts.node, []).append(facts)
    for group in nodes.values():
        host, local = group[0].host, sorted(facts.local_rank for facts in group)
        if local != list(range(len(group))):
            return f"local ranks {local} on {host} (ranks {[f.rank for f in group]}), expected 0..{len(group) - 1}"
        for facts in group:
            if facts.local_world_size != len(group):
                return (
                    f"rank {facts.rank} on {host} has a local world of {facts.local_world_size}, "
                    f"but {len(group)} ranks are there"
                )
    return None
