# ruff: noqa: E501 - messages stand on one line, as they are printed
"""Policies of everyday operation: Redis, models in this process, experiments, fallbacks, tenants."""

from os.path import abspath

import pytest

from policies import PolicyError, Secret, parse
from policies.spec import Arm, Cache, Experiment, Local, Redis, Tier, Unit

BASE = "backends: {a: {endpoints: [http://h:1]}, b: {endpoints: [http://h:2]}}\n"
ARMS = "arms: {one: {weight: 9, backend: a}, two: {weight: 1, backend: b}}"


def wrong(text: str, **environ: str) -> list[str]:
    try:
        parse(text, "p.yaml", environ)
    except PolicyError as error:
        return [str(problem).removeprefix("p.yaml:") for problem in error.problems]
    return []


def redis(text: str, **environ: str) -> Redis | None:
    return parse(f"{BASE}proxy: a\nredis: {{{text}}}", "p.yaml", environ).redis


def test_redis_urls() -> None:
    assert redis("url: redis://cache") == Redis("cache", 6379)
    assert redis("url: 'redis://[::1]:7000/3', timeout: 5ms") == Redis("::1", 7000, 3, timeout=0.005)
    secure = redis("url: 'rediss://${U}:${P}@cache:7000', ca_file: ca.pem", U="me", P="p%40ss")
    assert secure == Redis("cache", 7000, 0, True, "me", Secret("p@ss"), abspath("ca.pem"))
    assert redis("url: redis://cache, user: me, password: '${P}'", P="p@ss") == Redis(
        "cache", 6379, user="me", password=Secret("p@ss")
    )
    assert str(secure) == "rediss://cache:7000/0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url: cache:6379", "not a Redis URL; write redis://host:port/database, or rediss:// for TLS"),
        ("url: 'redis://me:hunter2@:1'", "':1' has no host; write host:port, such as redis:6379"),
        ("url: 'redis://me:hunter2@h:99999'", "the port 99999 is impossible; expected a port from 1 to 65535"),
        ("url: 'redis://h/x'", "the part after the host is no database's number; write redis://host:port/0"),
    ],
)
def test_redis_urls_that_are_none(text: str, message: str) -> None:
    assert wrong(f"{BASE}proxy: a\nredis: {{{text}}}") == [f"3: redis.url: {message}"]


def test_redis_says_nothing_twice() -> None:
    both = f"{BASE}proxy: a\nredis: {{url: 'redis://me:hunter2@h', password: other}}"
    assert wrong(both) == ["3: redis.password: 'password' stands in the url, too; write it once"]
    plain = f"{BASE}proxy: a\nredis: {{url: 'redis://h', ca_file: ca.pem}}"
    assert wrong(plain) == [
        "3: redis.ca_file: 'ca_file' is for rediss://, and the url is redis://; write rediss://, or delete it"
    ]


def test_a_cache_in_redis_needs_one() -> None:
    text = f"{BASE}routes: {{r: {{backend: a, cache: {{store: redis, ttl: 1h}}}}}}"
    assert wrong(text) == ["2: routes: 'r' keeps its rows in redis, and there is none; add 'redis:' with a url"]
    policy = parse(f"{text}\nredis: {{url: redis://h}}", "p.yaml", {})
    assert policy.routes["r"].arms == (Arm((Tier("a", "a"),), Cache("redis", ttl=3600)),)
    bounded = f"{BASE}routes: {{r: {{backend: a, cache: {{store: redis, entries: 5}}}}}}\nredis: {{url: redis://h}}"
    assert wrong(bounded) == [
        "2: routes.r.cache.entries: Redis bounds its own memory; delete 'entries', and see Redis' maxmemory"
    ]


def test_models_in_this_process() -> None:
    text = "backends: {a: {local: models/a.onnx}, b: {local: {path: /m, threads: 2}, batch: {}}}\nroutes: {r: {backend: a}}"
    backends = parse(text, "etc/p.yaml", {}).backends
    assert (backends["a"].local, backends["b"].local) == (Local(abspath("etc/models/a.onnx")), Local("/m", 2))
    assert (backends["a"].protocol, backends["a"].endpoints) == ("local", ())


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("{local: m, endpoints: [http://h:1]}", "a.local: 'endpoints' and 'local' exclude each other; a model is on servers, or in this process"),
        ("{local: m, protocol: grpc}", "a.protocol: a model in this process has no server; delete 'protocol'"),
        ("{local: m, headers: {x: y}}", "a.headers: a model in this process has no server; delete 'headers'"),
        ("{local: {path: m, threads: 0}}", "a.local.threads: expected a whole number from 1 to 256, got 0"),
        ("{local: ''}", "a.local: expected the name of a file or a folder, got ''"),
    ],
)  # fmt: skip
def test_models_in_this_process_that_cannot_be(backend: str, message: str) -> None:
    assert wrong(f"backends: {{a: {backend}}}\nroutes: {{r: {{backend: a}}}}") == [f"1: backends.{message}"]


def test_a_proxy_is_a_server() -> None:
    assert wrong("backends: {a: {local: m}}\nproxy: a") == [
        "2: proxy: the proxy's backend is one model in this process; name a backend with endpoints"
    ]


def test_experiments() -> None:
    text = f"{BASE}routes:\n  r: {{experiment: {{unit: header X-User, {ARMS}}}, fallback: b}}\n"
    route = parse(text, "p.yaml", {}).routes["r"]
    one, two = Arm((Tier("a", "a"),), name="one", weight=9), Arm((Tier("b", "b"),), name="two", weight=1)
    assert route.arms == (one, two)
    assert route.experiment == Experiment(Unit("header", "x-user"), "r", "one")
    assert route.fallback == "b"
    other = f"{BASE}tenant_header: X-Tenant\nroutes:\n  r: {{experiment: {{unit: tenant, salt: s, otherwise: two, {ARMS}}}}}\n"
    policy = parse(other, "p.yaml", {})
    assert policy.tenant_header == "x-tenant"
    assert policy.routes["r"].experiment == Experiment(Unit("tenant"), "s", "two")


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (f"experiment: {{{ARMS}}}", ".experiment: the key 'unit' is missing"),
        (f"experiment: {{unit: body x, {ARMS}}}", ".experiment.unit: expected header NAME, cookie NAME or tenant, got 'body x'"),
        (f"experiment: {{unit: cookie a, otherwise: three, {ARMS}}}", ".experiment.otherwise: there is no arm 'three'; expected one of one, two"),
        ("experiment: {unit: cookie a, arms: {one: {weight: 1, backend: a}}}", ".experiment.arms: has fewer than two arms; without an experiment, write 'backend' or 'tiers' in the route"),
        ("experiment: {unit: cookie a, arms: {one: {weight: 0, backend: a}, two: {weight: 0, backend: b}}}", ".experiment.arms: every weight is 0; give one of the arms a weight"),
        ("experiment: {unit: cookie a, arms: {one: {weight: -1, backend: a}, two: {weight: 1}}}", ".experiment.arms.one.weight: expected a number from 0 to 1000000, got -1"),
        (f"backend: a, experiment: {{unit: cookie a, {ARMS}}}", ".backend: 'backend' and 'experiment' exclude each other; write 'backend' in the arms"),
        (f"cache: {{}}, experiment: {{unit: cookie a, {ARMS}}}", ".cache: 'cache' and 'experiment' exclude each other; write 'cache' in the arms"),
        (f"experiment: {{unit: tenant, {ARMS}}}", "s: 'r' divides by tenant, and nothing names one; add 'tenant_header: NAME'"),
        (f"experiment: {{unit: header headrace-user, {ARMS}}}", ".experiment.unit: 'headrace-user' is for the gateway itself, and goes no further; give it another name"),
        (f"experiment: {{unit: header Host, {ARMS}}}", ".experiment.unit: 'host' is set by the connection itself; delete it"),
        ("experiment: {unit: cookie a, arms: {one: {weight: 1, backend: a}, two: {weight: 1e-9, backend: b}}}", ".experiment.arms.two.weight: a weight of 1e-09 is none; expected 0, or at least 0.001"),
        ("backend: a, fallback: c", ".fallback: backends has no 'c'; expected one of a, b"),
    ],
)  # fmt: skip
def test_experiments_that_cannot_be(route: str, message: str) -> None:
    told = wrong(f"{BASE}routes: {{r: {{{route}}}}}")
    assert told[0] == (f"2: route{message}" if message.startswith("s:") else f"2: routes.r{message}")
