"""A desk on rank 0's host, at which the other ranks of the job show that they reach it.

One line of JSON goes each way. A "probe" is answered at once; a "join" hands over facts and is answered when all ranks
have joined, with what rank 0 makes of them. Who does not know the job's token gets no answer and disturbs nobody.
The token tells jobs apart; it is no protection against someone who wants to be mistaken for a rank.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

MOST_BYTES = 1 << 16
LINE_S = 5.0  # within which a caller must have said its line


class Desk:
    """Listens on every address of this host, in a thread, until it is closed.

    Args:
        port: to listen on; 0 for a free one.
        token: of this job.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, token: str) -> None:
        self._server = _listen(port)
        self.port: int = self._server.getsockname()[1]
        self._token = token
        self._joined: dict[int, tuple[dict[str, Any], str]] = {}
        self._news = threading.Condition()
        self._verdict: dict[str, Any] | None = None
        self._callers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._serve, name="ruda_desk", daemon=True)
        self._thread.start()

    def gather(self, ranks: set[int], limit_s: float) -> dict[int, tuple[dict[str, Any], str]]:
        """Wait until ``ranks`` have joined or time is up.

        Returns:
            by rank that came: (its facts, this host's address that it reached).
        """
        deadline = time.monotonic() + limit_s
        with self._news:
            while not ranks <= self._joined.keys() and time.monotonic() < deadline:
                self._news.wait(min(1.0, max(0.0, deadline - time.monotonic())))
            return dict(self._joined)

    def close(self, verdict: dict[str, Any] | None = None) -> None:
        """Answer those who joined with ``verdict``, and listen no longer."""
        with self._news:
            self._verdict = verdict if verdict is not None else {}
            self._news.notify_all()
        # A shutdown, since closing alone would leave the thread in accept.
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(LINE_S)
        for caller in self._callers:
            caller.join(LINE_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            caller = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            self._callers.append(caller)
            caller.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                said = _read(connection, LINE_S)
                if said.get("token") != self._token or said.get("kind") not in ("probe", "join"):
                    return
                reply: dict[str, Any] = {}
                if said["kind"] == "join":
                    reply = self._join(int(said["rank"]), dict(said["facts"]), connection)
                _write(connection, {"token": self._token, **reply})
                # The caller closes first, so that the port does not linger here.
                connection.settimeout(LINE_S)
                connection.recv(1)
            except (OSError, ValueError, KeyError, TypeError):
                return

    def _join(self, rank: int, facts: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        with self._news:
            self._joined[rank] = (facts, _plain(connection.getsockname()[0]))
            self._news.notify_all()
            while self._verdict is None:
                self._news.wait(1.0)
            return self._verdict


def probe(host: str, port: int, token: str, limit_s: float) -> str | None:
    """Reach a desk: this host's address on that connection; None if it is not reached or it is another job's."""
    try:
        with socket.create_connection((host, port), timeout=limit_s) as connection:
            _write(connection, {"token": token, "kind": "probe"})
            return _plain(connection.getsockname()[0]) if _read(connection, limit_s).get("token") == token else None
    except (OSError, ValueError):
        return None


def join(
    host: str, ports: list[int], token: str, rank: int, facts: dict[str, Any], limit_s: float
) -> tuple[dict[str, Any], int] | None:
    """Hand facts to the desk of this job, which is at one of ``ports`` or soon will be.

    Returns:
        (its verdict, its port); None if no desk of this job was there within ``limit_s`` seconds.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for port in ports:
            if probe(host, port, token, min(3.0, limit_s)) is None:
                continue
            try:
                with socket.create_connection((host, port), timeout=3.0) as connection:
                    _write(connection, {"token": token, "kind": "join", "rank": rank, "facts": facts})
                    return _read(connection, max(1.0, deadline - time.monotonic()) + 2 * LINE_S), port
            except (OSError, ValueError):
                continue
        time.sleep(0.2)
    return None


def open_desk(ports: list[int], token: str) -> Desk | None:
    """A desk at the first of ``ports`` that is free; None if all are taken."""
    for port in ports:
        try:
            return Desk(port, token)
        except OSError:
            continue
    return None


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError:
            pass  # taken, or IPv6 is off; the next line tells which
    return socket.create_server(("", port), backlog=1024)


def _plain(address: str) -> str:
    """An IPv4 address that a dual socket shows as IPv6, as itself."""
    return address.removeprefix("::ffff:")


def _read(connection: socket.socket, limit_s: float) -> dict[str, Any]:
    """One line of JSON within ``limit_s`` seconds in all; ValueError if it is something else."""
    deadline, text = time.monotonic() + limit_s, b""
    while not text.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        piece = connection.recv(4096)
        text += piece
        if not piece or len(text) > MOST_BYTES:
            raise ValueError("not a line of this protocol")
    said = json.loads(text)
    if not isinstance(said, dict):
        raise ValueError("not an object")
    return said


def _write(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")
