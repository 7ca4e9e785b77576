"""Experiment: which arm answers a request, by a keyed hash of its unit.

Theory of operation. Each arm draws a number u in (0, 1), once and for all: a keyed hash of salt, arm and unit. The arm
with the smallest -ln(u) / weight wins (weighted rendezvous hashing; the smallest of exponential variables with rates
w_i is the i-th with probability w_i / sum w). So shares are the weights' whatever the arms; a unit keeps its arm on
every replica, over restarts and over both protocols; and when weights change, or arms come and go, no unit moves
between two arms whose ratio did not ask for it. Experiments with different salts are independent of each other.
Source: Schindelhauer and Schomaker, Weighted Distributed Hash Tables, SPAA 2005.

A request without a unit gets a named arm, and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

from backends.errors import Failure
from backends.request import HttpCall, Reply, Request, RpcCall, Service, computes, joint, replace
from policies.spec import Arm, Experiment, Unit

_BITS = 64


def assign(salt: str, unit: str, weights: Mapping[str, float]) -> str:
    """The arm of `unit`, of those in `weights` (relative, not negative, not all 0). A pure function."""
    key = blake2b(salt.encode(), digest_size=32).digest()
    value = unit.encode(errors="surrogatepass")
    best, least = "", math.inf
    for arm, weight in weights.items():
        if weight > 0:
            # Length-prefixed, so that no two pairs of arm and unit are the same bytes.
            name = arm.encode()
            drawn = blake2b(b"%d:%b%b" % (len(name), name, value), key=key, digest_size=_BITS // 8).digest()
            u = (int.from_bytes(drawn, "big") + 0.5) / 2.0**_BITS
            distance = -math.log(u) / weight
            if distance < least or (distance == least and arm < best):
                best, least = arm, distance
    return best


class Split:
    """Answers through the arm that a request is assigned to, and says in the reply which it was.

    `services` has one for each of the `arms`; `tenant_header` names the header that names a tenant; `without_unit` is
    called for each request without a unit that makes a model work.
    """

    def __init__(
        self,
        experiment: Experiment,
        arms: Sequence[Arm],
        services: Mapping[str, Service],
        tenant_header: str,
        without_unit: Callable[[], None],
    ) -> None:
        self._experiment = experiment
        self._weights = {arm.name: arm.weight for arm in arms}
        self._services = dict(services)
        self._tenant_header = tenant_header
        self._without_unit = without_unit

    async def __call__(self, request: Request, /) -> Reply:
        unit = unit_of(request, self._experiment.unit, self._tenant_header)
        if unit:
            arm = assign(self._experiment.salt, unit, self._weights)
        else:
            arm = self._experiment.otherwise
            if computes(request):
                self._without_unit()
        try:
            return replace(await self._services[arm](request), arm=arm)
        except Failure as failure:
            failure.arm = arm
            raise


def unit_of(request: Request, unit: Unit, tenant_header: str) -> str:
    """The request's unit; empty where it has none."""
    match unit.kind:
        case "tenant":
            return header(request, tenant_header)
        case "header":
            return header(request, unit.name)
    return cookie(header(request, "cookie"), unit.name)


def header(request: Request, name: str) -> str:
    """A header's (or metadata's) value, empty where the caller sent none. Repeated ones are joined."""
    call = request.content
    if isinstance(call, HttpCall):
        return joint(name).join(v.decode("latin-1") for k, v in call.headers if k == name.encode())
    if isinstance(call, RpcCall):
        return joint(name).join(v for k, v in call.metadata if k == name and isinstance(v, str))
    value = request.headers.get(name, "")
    if isinstance(value, tuple):
        return joint(name).join(v for v in value if isinstance(v, str))
    return value if isinstance(value, str) else ""


def cookie(header: str, name: str) -> str:
    """The value of a cookie in a Cookie header (RFC 6265, 4.2.1), the first of that name; empty where there is none."""
    for pair in header.split(";"):
        key, mark, value = pair.strip().partition("=")
        if mark and key == name:
            return value.strip('"')
    return ""
