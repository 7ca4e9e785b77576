"""HTTP by the byte: what goes over a socket and what comes back, for requests that no client library would send."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import NamedTuple


class Response(NamedTuple):
    """A response as it came; `headers` have lower-case names, `rest` is what followed it in the same time."""

    status: int
    headers: dict[str, str]
    body: bytes
    rest: bytes
    closed: bool


def asked(
    address: str, *parts: bytes, head_only: bool = False, rest: bool = False, wait: float = 10.0
) -> Response | None:
    """The response to `parts`, which leave apart; None where the connection ends without one.

    `rest` waits for what else comes until the server closes, or for 0.2 s of silence. A 100 Continue before it is
    dropped.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=wait) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _send(client, parts)
        data, ended = b"", False
        while (found := _whole(data, head_only)) is None and not ended:
            more = _receive(client)
            data, ended = data + more, not more
        if found is None:
            return None
        client.settimeout(0.2)
        while rest and not ended:
            try:
                more = _receive(client)
            except TimeoutError:
                break
            data, ended = data + more, not more
        status, headers, at, end = found
        return Response(status, headers, data[at:end], data[end:], ended)


def _send(client: socket.socket, parts: Sequence[bytes]) -> None:
    try:
        for i, part in enumerate(parts):
            if i:
                time.sleep(0.05)  # nothing tells when the other side has read the part before
            client.sendall(part)
    except ConnectionError:
        pass  # it answers early, and what comes back says why


def _receive(client: socket.socket) -> bytes:
    try:
        return client.recv(1 << 20)
    except ConnectionError:
        return b""


def _whole(data: bytes, head_only: bool) -> tuple[int, dict[str, str], int, int] | None:
    """Status, headers, and where the body begins and ends; None where it is not all there."""
    start = 0
    while True:
        end = data.find(b"\r\n\r\n", start)
        if end < 0:
            return None
        first, *lines = data[start:end].decode("latin-1").split("\r\n")
        status = int(first.split(" ")[1])
        start = end + 4
        if status >= 200:
            break
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    size = 0 if head_only else int(headers.get("content-length", 0))
    return (status, headers, start, start + size) if len(data) >= start + size else None
