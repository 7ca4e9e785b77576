"""Bound sockets: a TCP address, alone or shared by SO_REUSEPORT, or a Unix socket; and how many files there may be."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from policies.spec import Address


def bound(address: Address | Path, *, shared: bool = False) -> socket.socket:
    """A socket that is bound and does not listen yet. Raises OSError, naming the address.

    Nobody may listen there already, except who shares the port as well, under the same user. What a dead process left
    of a Unix socket is replaced.
    """
    if isinstance(address, Path):
        family: socket.AddressFamily = socket.AF_UNIX
    else:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(address, Path):
            address.unlink(missing_ok=True)
            made.bind(str(address))
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made.bind((address.host, address.port))
    except OSError as error:
        made.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror or error}") from None
    return made


def most_files() -> int:
    """How many file descriptors this process may have; each connection is one."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def take_all_files() -> None:
    """As many as the system allows: the thousand that many give, for fear of `select`, are soon taken."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
