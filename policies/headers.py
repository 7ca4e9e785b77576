"""Headers that are added to every call to a backend: their names, and their values, which never show themselves."""

from __future__ import annotations

import re

from policies.problem import Place, Wrong
from policies.reader import Scalar
from policies.schema import mismatch
from policies.source import Leaf, Node
from policies.spec import Secret

_NAME = re.compile(r"[a-z0-9._-]{1,128}")  # what both HTTP and gRPC metadata can carry, in lower case
_VALUE = re.compile(r"[ -~]{0,8192}")  # what both HTTP and gRPC metadata can carry
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


def _value(node: Node, at: Place) -> Secret:
    """A header's value. No message shows any of it: it may be a secret wherever it comes from."""
    if not isinstance(node, Leaf):
        raise mismatch("a header's value", node)
    if node.value is None:
        raise Wrong("a header without a value", "write a text in quotes, or ${NAME}")
    value = node.text.strip(" \t\r\n")
    if not _VALUE.fullmatch(value):
        raise Wrong("the value cannot be sent", "expected at most 8192 printable ASCII characters on one line")
    return Secret(value)


HEADER_VALUE = Scalar(read=_value, expected="a header's value", form={"type": ["string", "number", "boolean"]})
