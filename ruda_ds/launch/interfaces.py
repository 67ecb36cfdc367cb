"""The addresses of this host, and which network interface carries one. Asks the kernel: no program, no name service."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import struct
from pathlib import Path

from ruda_ds.errors import LaunchError

LOOPBACK = "127.0.0.1"
# Below the range from which the kernel takes ports for clients: what is free is still free when a rank listens on it,
# seconds later.
FIRST_PORT, LAST_PORT = 20000, 30000
_LIST_ADDRESSES, _FLAGS = 0x8912, 0x8913  # SIOCGIFCONF, SIOCGIFFLAGS of Linux
_UP, _IS_LOOPBACK = 0x1, 0x8
_ENTRY = 40  # bytes of a struct ifreq on 64 bits
_MOST = 256  # addresses that are read


def own_addresses() -> list[tuple[str, str]]:
    """(interface, address) of every interface that is up, loopback left out; the fastest first, IPv4 before IPv6.

    Empty where the kernel is not Linux.
    """
    found = [*_ipv4(), *_ipv6()]
    return sorted(found, key=lambda entry: (":" in entry[1], -link_speed(entry[0])))


def _ipv4() -> list[tuple[str, str]]:
    try:
        import array
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            table = array.array("B", bytes(_ENTRY * _MOST))
            answer = fcntl.ioctl(probe, _LIST_ADDRESSES, struct.pack("iP", len(table), table.buffer_info()[0]))
            entries = table.tobytes()[: struct.unpack("iP", answer)[0]]
            found = []
            for begin in range(0, len(entries), _ENTRY):
                name = entries[begin : begin + 16].split(b"\0")[0].decode()
                flags = struct.unpack("16sh", fcntl.ioctl(probe, _FLAGS, struct.pack("16sh", name.encode(), 0))[:18])[1]
                if flags & _UP and not flags & _IS_LOOPBACK:
                    address = socket.inet_ntoa(entries[begin + 20 : begin + 24])
                    found.append((name.split(":")[0], address))
            return found
    except (ImportError, OSError):
        return []


def _ipv6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    # Scope 00 is global; 20, the link's own, needs the interface beside the address.
    return [(f[5], str(ipaddress.IPv6Address(int(f[0], 16)))) for f in fields if len(f) == 6 and f[3] == "00"]


def link_speed(interface: str) -> int:
    """Megabits a second that the driver reports; 0 where it does not know."""
    try:
        return max(0, int(Path(f"/sys/class/net/{interface}/speed").read_text()))
    except (OSError, ValueError):
        return 0


def interface_of(address: str) -> str | None:
    """The interface that carries an address of this host; None if none does."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    return next((name for name, own in own_addresses() if own == address), None)


def resolve(host: str) -> str | None:
    """The first address of a name, IPv4 preferred; None if it has none here."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def source_towards(address: str) -> str | None:
    """This host's address on the route to another. Sends nothing: a datagram socket is only told its peer."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The interface over which a host, by name or address, is reached; None if that cannot be told."""
    address = resolve(host)
    source = source_towards(address) if address is not None else None
    return interface_of(source) if source is not None else None


def default_interface() -> str | None:
    """The interface of the default route, or the only one there is; None if there are several and no such route."""
    try:
        routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        routes = []
    by_default = [route[0] for route in routes if len(route) > 2 and route[1] == "00000000"]
    others = list(dict.fromkeys(name for name, _ in own_addresses()))
    return by_default[0] if by_default else others[0] if len(others) == 1 else None


def free_port() -> int:
    """A TCP port that was free on this host a moment ago; by chance, so that jobs that start together differ.

    Raises:
        LaunchError: none of a hundred was.
    """
    for _ in range(100):
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise LaunchError(f"none of 100 ports between {FIRST_PORT} and {LAST_PORT} is free on {socket.gethostname()}")
