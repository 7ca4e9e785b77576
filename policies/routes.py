"""The tables of routes: tiers, caches, and the arms of experiments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from policies.headers import unit
from policies.problem import Wrong, suggest
from policies.schema import (
    choice,
    duration,
    items,
    mapping,
    name,
    number,
    parsed,
    reference,
    section,
    size,
    text,
    whole,
)
from policies.source import Items, Keys, Leaf
from policies.spec import Accept, Arm, Cache, Experiment, Route, Tier, Unit

ACCEPT = section(
    Accept,
    {
        "output": text("the name of an output tensor", re.compile(r"[!-~]{1,256}")),
        "values": choice("logits", "probabilities"),
        "score": choice("max_probability", "margin", "entropy"),
        "threshold": number(0, 1),
    },
)

TIER = section(
    lambda backend, name=None, accept=None: Tier(name or backend, backend, accept),
    {
        "name": name().absent("the backend's"),
        "backend": reference("backends"),
        "accept": ACCEPT.absent("every row is answered here"),
    },
    rest=Tier,
)


def _judged(tiers: Items) -> Iterator[tuple[int, Wrong]]:
    """Every tier but the last says when its answer is final; names are unique."""
    last, seen = len(tiers.children) - 1, dict[str, int]()
    for index, tier in enumerate(tiers.children):
        if not isinstance(tier, Keys):
            continue
        if index < last and "accept" not in tier.entries:
            yield index, Wrong("the key 'accept' is missing", "without it no row goes on to the next tier")
        if index == last and "accept" in tier.entries:
            yield index, Wrong("the last tier has 'accept'", "delete it: there is no tier to go on to")
        named = tier.entries.get("name") or tier.entries.get("backend")
        if not named or not isinstance(named.node, Leaf):
            continue
        if (first := seen.setdefault(named.node.text, index)) < index:
            yield index, Wrong(f"has the name of tiers[{first}]", "give it a 'name' of its own")


def _cache(store: Any = "memory", **rest: Any) -> Cache:
    for key in ("entries", "bytes"):
        if store == "redis" and key in rest:
            raise Wrong("Redis bounds its own memory", f"delete '{key}', and see Redis' maxmemory", key)
    return Cache(store, **rest)


CACHE = section(
    _cache,
    {
        "store": choice("memory", "redis"),
        "entries": whole(1, 1_000_000_000),
        "bytes": size("1KiB", "1TiB"),
        "ttl": duration("1ms", "365d"),
    },
    rest=Cache,
)

TIERS = items("tier", TIER, _judged)


def _tiers(backend: Any, tiers: Any) -> tuple[Tier, ...]:
    if backend and tiers:
        raise Wrong("'backend' and 'tiers' exclude each other", "'backend: NAME' is short for one tier", "backend")
    if not backend and not tiers:
        raise Wrong("has no backend", "write 'backend: NAME', or 'tiers:' with a list")
    return tiers or (Tier(backend, backend),)


# A billionth of the largest: an arm of less would never be seen, and logarithms stay far from infinity.
_LEAST_WEIGHT = 1e-3


def _arm(name: str, weight: float, backend: Any = None, tiers: Any = None, cache: Any = None) -> Arm:
    if 0 < weight < _LEAST_WEIGHT:
        raise Wrong(f"a weight of {weight:g} is none", f"expected 0, or at least {_LEAST_WEIGHT:g}", "weight")
    return Arm(_tiers(backend, tiers), cache, name, weight)


ARM = section(
    _arm,
    {
        "weight": number(0, 1_000_000),
        "backend": reference("backends"),
        "tiers": TIERS,
        "cache": CACHE.absent("nothing is kept"),
    },
    rest=Arm,
    one_of=("backend", "tiers"),
)


class _Divided(NamedTuple):
    """Requests divided among arms by a keyed hash of their unit: the same unit always gets the same arm."""

    arms: dict[str, Arm]
    unit: Unit
    otherwise: str
    salt: str | None


def _divided(arms: Any, unit: Any, otherwise: Any = None, salt: Any = None) -> _Divided:
    if len(arms) < 2:
        raise Wrong("has fewer than two arms", "without an experiment, write 'backend' or 'tiers' in the route", "arms")
    if not any(arm.weight for arm in arms.values()):
        raise Wrong("every weight is 0", "give one of the arms a weight", "arms")
    if otherwise and otherwise not in arms:
        raise Wrong(f"there is no arm '{otherwise}'", suggest(otherwise, arms), "otherwise")
    return _Divided(arms, unit, otherwise or next(iter(arms)), salt)


EXPERIMENT = section(
    _divided,
    {
        "unit": parsed("header NAME, cookie NAME or tenant", unit),
        "arms": mapping("arm", ARM),
        "otherwise": name().absent("the first arm"),
        "salt": text("a text", re.compile(r"[ -~]{1,128}")).absent("the route's name"),
    },
    rest=_Divided,
)


def _route(
    name: str, backend: Any = None, tiers: Any = None, experiment: Any = None, cache: Any = None, **rest: Any
) -> Route:
    if experiment is None:
        return Route(name, (Arm(_tiers(backend, tiers), cache),), **rest)
    for key, given in (("backend", backend), ("tiers", tiers), ("cache", cache)):
        if given:
            raise Wrong(f"'{key}' and 'experiment' exclude each other", f"write '{key}' in the arms", key)
    divided = Experiment(experiment.unit, experiment.salt or name, experiment.otherwise)
    return Route(name, tuple(experiment.arms.values()), divided, **rest)


ROUTE = section(
    _route,
    {
        "backend": reference("backends"),
        "tiers": TIERS,
        "experiment": EXPERIMENT,
        "cache": CACHE.absent("nothing is kept"),
        "fallback": reference("backends").absent("an error is the answer"),
        "timeout": duration("1ms", "1d").absent("limits.timeout"),
    },
    rest=Route,
    one_of=("backend", "tiers", "experiment"),
    moot={"experiment": ("cache",)},
)
