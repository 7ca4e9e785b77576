"""Headers by name, and what never shows itself: values of headers that are added to calls, and passwords."""

from __future__ import annotations

import re

from policies.problem import Place, Wrong
from policies.reader import Scalar
from policies.schema import mismatch
from policies.source import Leaf, Node
from policies.spec import Secret, Unit

_NAME = re.compile(r"[a-z0-9._-]{1,128}")  # what both HTTP and gRPC metadata can carry, in lower case
_VALUE = re.compile(r"[ -~]{0,8192}")  # what both HTTP and gRPC metadata can carry
_COOKIE = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")  # RFC 6265's token
# Said by the connection, not by the policy (RFC 9110, 7.6.1; gRPC reserves its prefix).
_OWN = frozenset((
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "host",
    "inference-header-content-length", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
    "te", "trailer", "transfer-encoding", "upgrade", "user-agent",
))  # fmt: skip


def header_name(name: str) -> str:
    """`name` in lower case. Raises Wrong."""
    name = name.lower()
    if not _NAME.fullmatch(name):
        raise Wrong("not a header's name", "expected letters, digits, '-', '_' and '.'")
    if name in _OWN or name.startswith("grpc-") or name.endswith("-bin"):
        raise Wrong(f"'{name}' is set by the connection itself", "delete it")
    return name


def heard(name: str) -> str:
    """The name of a header that callers send and routes may look at, in lower case. Raises Wrong."""
    name = header_name(name)
    if name.startswith("headrace-"):
        raise Wrong(f"'{name}' is for the gateway itself, and goes no further", "give it another name")
    return name


def unit(text: str) -> Unit:
    """What an experiment randomises by: `header NAME`, `cookie NAME` or `tenant`. Raises Wrong."""
    kind, _, name = text.partition(" ")
    match kind, name.strip():
        case "tenant", "":
            return Unit("tenant")
        case "header", found if _NAME.fullmatch(found.lower()):
            return Unit("header", heard(found))
        case "cookie", found if _COOKIE.fullmatch(found):
            return Unit("cookie", found)
    raise Wrong


def _secret(what: str, pattern: re.Pattern[str], right: str) -> Scalar[Secret]:
    """Text that no message shows any of: it may be a secret wherever it comes from."""

    def read(node: Node, at: Place) -> Secret:
        if not isinstance(node, Leaf):
            raise mismatch(what, node)
        if node.value is None:
            raise Wrong(f"{what} without a value", "write a text in quotes, ${NAME} or ${file:NAME}")
        value = node.text.strip(" \t\r\n")
        if not pattern.fullmatch(value):
            raise Wrong(f"{what} cannot be sent", right)
        return Secret(value)

    return Scalar(read=read, expected=what, form={"type": ["string", "number", "boolean"]})


HEADER_VALUE = _secret("a header's value", _VALUE, "expected at most 8192 printable ASCII characters on one line")
PASSWORD = _secret("a password", re.compile(r"[^\0\r\n]{1,8192}"), "expected one line of at most 8192 characters")
