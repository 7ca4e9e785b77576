"""Network addresses as a policy writes them: where a listener binds, and where a replica is."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import unquote

from policies.problem import Wrong, clip
from policies.spec import Address, Endpoint, Secret

_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/@]*)(?::([0-9]{1,5}))?")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")


def listener(text: str, host: str) -> Address | None:
    """`127.0.0.1:8000`, `[::1]:8000`, a bare port on `host`, or `off` (None). Raises Wrong."""
    if text == "off":
        return None
    if text.isascii() and text.isdigit():
        return Address(host, _port(text, 0))
    found, port = _split(text, f"{host}:8000")
    return Address(found, _port(port, 0))


def http_url(text: str) -> str:
    """`http://host:port` or `https://host:port`, without a trailing slash. Raises Wrong."""
    _no_credentials(text)
    scheme, mark, rest = text.partition("://")
    if not mark:
        raise Wrong(f"{clip(text)!r} has no scheme", f"write http://{clip(text)}" if _looks_fine(text) else _LIKE)
    if scheme not in ("http", "https"):
        raise Wrong(f"the scheme of {clip(text)!r} is not http or https", _LIKE)
    place, _, path = rest.partition("/")
    if path:
        raise Wrong(f"{clip(text)!r} has a path", f"write {scheme}://{clip(place)}; the caller's path is passed on")
    host, port = _split(place, f"{scheme}://triton:8000", text)
    return f"{scheme}://{_bracketed(host)}:{_port(port, 1)}"


def grpc_target(text: str) -> str:
    """`host:port`; `grpc://` in front is left out, `grpcs://`, which means TLS, is kept. Raises Wrong."""
    _no_credentials(text)
    tls = "grpcs://" if text.startswith("grpcs://") else ""
    place = text.removeprefix(tls or "grpc://")
    if "://" in place:
        raise Wrong(f"{clip(text)!r} is not a gRPC address", "write host:port, or grpcs://host:port for TLS")
    host, port = _split(place, "triton:8001", text)
    return f"{tls}{_bracketed(host)}:{_port(port, 1)}"


def host_name(text: str) -> str:
    """A host's name or IP address, without brackets. Raises Wrong."""
    if not _is_host(_bracketed(text)):
        raise Wrong
    return text


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The parts of `redis://` or, with `tls`, `rediss://`. It never shows the password."""

    host: str
    port: int
    database: int
    tls: bool
    user: str
    password: Secret | None

    def __str__(self) -> str:
        credentials = f"{self.user}{':***' if self.password else ''}@" if self.user or self.password else ""
        where = f"{_bracketed(self.host)}:{self.port}/{self.database}"
        return f"redis{'s' if self.tls else ''}://{credentials}{where}"


def redis_url(text: str) -> RedisUrl:
    """`redis://[[user]:password@]host[:port][/database]`, or `rediss://`. Raises Wrong, which shows no password."""
    scheme, mark, rest = text.partition("://")
    if not mark or scheme not in ("redis", "rediss"):
        raise Wrong("not a Redis URL", "write redis://host:port/database, or rediss:// for TLS")
    credentials, _, place = rest.rpartition("@")
    user, _, password = credentials.partition(":")
    place, _, database = place.partition("/")
    if database and not (database.isascii() and database.isdigit() and len(database) <= 5):
        raise Wrong("the part after the host is no database's number", "write redis://host:port/0")
    if ":" not in place.rpartition("]")[2]:
        place += ":6379"
    host, port = _split(place, "redis:6379")
    secret = Secret(unquote(password)) if password else None
    return RedisUrl(host, _port(port, 1), int(database or 0), scheme == "rediss", unquote(user), secret)


def endpoint(text: str) -> Endpoint:
    """A replica with one address, by `http://`, `https://`, `grpc://` or `grpcs://host:port`. Raises Wrong."""
    if text.startswith(("grpc://", "grpcs://")):
        return Endpoint(grpc=grpc_target(text))
    return Endpoint(http=http_url(text))


_LIKE = "write http://host:port or grpc://host:port"


def _split(place: str, example: str, text: str = "") -> tuple[str, str]:
    """Host without brackets, and port, of `host:port`, which is all or a part of `text`."""
    whole = repr(clip(text or place))
    if not (match := _HOST_PORT.fullmatch(place)):
        raise Wrong(f"{whole} is not an address", f"write host:port, such as {example}; an IPv6 host in brackets")
    host, port = match[1], match[2]
    if not host:
        raise Wrong(f"{whole} has no host", f"write host:port, such as {example}")
    if not _is_host(host):
        raise Wrong(f"{whole} has an impossible host", f"write host:port, such as {example}")
    if port is None:
        raise Wrong(f"{whole} has no port", f"write host:port, such as {example}")
    return host.strip("[]"), port


def _is_host(host: str) -> bool:
    if host.startswith("[") or re.fullmatch(r"[0-9.]+", host):
        try:
            return (ipaddress.ip_address(host.strip("[]")).version == 6) == host.startswith("[")
        except ValueError:
            return False
    return len(host) <= 253 and all(map(_LABEL.fullmatch, host.removesuffix(".").split(".")))


def _port(text: str, low: int) -> int:
    port = int(text) if len(text) <= 5 else -1
    if not low <= port <= 65535:
        raise Wrong(f"the port {clip(text)} is impossible", f"expected a port from {low} to 65535")
    return port


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _looks_fine(text: str) -> bool:
    match = _HOST_PORT.fullmatch(text)
    return bool(match and match[2] and _is_host(match[1]))


def _no_credentials(text: str) -> None:
    # The text stays out of the message: it holds a password.
    if "@" in text:
        raise Wrong("credentials do not belong in an address", "write them as headers, out of the environment: ${NAME}")
