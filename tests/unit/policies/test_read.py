# ruff: noqa: E501 - messages stand on one line, as they are printed
"""Each thing that can be wrong with a policy, word for word: the words are what an operator has to go by."""

import os
from dataclasses import FrozenInstanceError
from hashlib import sha256
from pathlib import Path

import pytest

import policies
from policies import PolicyError, implicit, load, parse
from policies.spec import Accept, Address, Batch, Cache, Endpoint, Limits, Listen, Secret, Telemetry, Tier

EXAMPLES = Path(policies.__file__).parent / "examples"

# Line 1 to 3; what is appended begins on line 4.
BASE = """\
proxy: triton
backends:
  triton: {endpoints: [http://t:8000]}
"""


def problems(text: str, **environ: str) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        parse(text, "p.yaml", environ)
    return str(caught.value).split("\n")


def backend(keys: str) -> str:
    """A policy whose line 3 has these keys of a backend."""
    return "proxy: b\nbackends:\n" + f"  b: {{endpoints: [http://t:8000], {keys}}}\n"


def route(lines: str) -> str:
    """A policy whose route `r` begins on line 5; its keys are indented by four."""
    return BASE + "routes:\n  r:\n" + lines


def test_defaults_are_filled_in() -> None:
    policy = parse(BASE, "p.yaml", {})
    assert policy.listen == Listen(
        Address("0.0.0.0", 8000), Address("0.0.0.0", 8001), Address("0.0.0.0", 8002), Address("127.0.0.1", 8003)
    )
    assert (policy.limits, policy.telemetry, policy.routes) == (Limits(), Telemetry(), {})
    made = policy.backends[policy.proxy or ""]
    assert (made.name, made.kind, made.protocol, made.model, made.batch) == ("triton", "triton", "http", "", None)
    assert (made.timeout, made.connect_timeout, made.endpoints) == (30, 2, (Endpoint("http://t:8000"),))


def test_everything_can_be_written() -> None:
    policy = parse(
        """\
listen: {http: "[::1]:9000", grpc: 9001, metrics: off, admin: 9003, compat: triton}
backends:
  a:
    kind: triton
    endpoints: [{http: http://h:1/, grpc: h:2}, {http: "http://[::1]:1", grpc: "grpc://[::1]:2"}]
    model: m
    version: 3
    batch: {max_rows: 8, slots: 3, queue_rows: 64, queue_time: 250ms}
    timeout: 5s
    connect_timeout: 100ms
    headers: {Authorization: "Bearer ${TOKEN}", x-number: 12}
  b: {endpoints: [grpc://h:2], protocol: grpc, batch: {}}
routes:
  r:
    tiers:
      - {name: fast, backend: a, accept: {output: OUT, values: logits, score: entropy, threshold: 1}}
      - {backend: b}
    cache: {store: memory, entries: 10, bytes: 1MiB, ttl: 5m}
    timeout: 2s
  s: {backend: a}
limits: {in_flight: 10, body_bytes: 1MB, reply_bytes: 2MB, timeout: 10s, connections: 20}
telemetry: {response_headers: false, access_log: false, traces: {per_second: 0.5, keep: 0}}
x-free: [anything]
""",
        "p.yaml",
        {"TOKEN": "hunter2"},
    )
    assert policy.listen == Listen(
        Address("::1", 9000), Address("0.0.0.0", 9001), None, Address("127.0.0.1", 9003), compat="triton"
    )
    a, b = policy.backends.values()
    assert a.endpoints == (Endpoint("http://h:1", "h:2"), Endpoint("http://[::1]:1", "[::1]:2"))
    assert (a.protocol, a.model, a.version, a.timeout, a.connect_timeout) == ("grpc", "m", "3", 5, 0.1)
    assert (a.batch, b.batch) == (Batch(8, 3, 64, 0.25), Batch())
    assert a.headers == {"authorization": Secret("Bearer hunter2"), "x-number": Secret("12")}
    r = policy.routes["r"]
    assert r.arms[0].tiers == (Tier("fast", "a", Accept("OUT", "logits", "entropy", 1.0)), Tier("b", "b"))
    assert (r.arms[0].cache, r.timeout) == (Cache("memory", 10, 2**20, 300), 2)
    assert policy.routes["s"].arms[0].tiers == (Tier("a", "a"),)
    assert policy.limits == Limits(10, 10**6, 2 * 10**6, 10, connections=20)
    assert a.reply_bytes == b.reply_bytes == 2 * 10**6
    assert policy.telemetry == Telemetry(False, False, 0.5, 0)
    assert policy.proxy is None


def test_a_policy_cannot_be_changed() -> None:
    policy = parse(BASE, "p.yaml", {})
    with pytest.raises(FrozenInstanceError):
        policy.proxy = None  # type: ignore[misc]
    for held in (policy.backends, policy.routes, policy.backends["triton"].headers):
        with pytest.raises(TypeError):
            held["x"] = None  # type: ignore[index]


def test_equal_backends_are_found_again() -> None:
    text = backend("headers: {x: y}")
    one, two = (parse(text, "p.yaml", {}).backends["b"] for _ in range(2))
    assert one == two
    assert {one: 1}[two] == 1
    assert parse(backend("headers: {x: z}"), "p.yaml", {}).backends["b"] != one


def test_the_version_names_the_text_and_not_the_environment() -> None:
    text = backend("headers: {authorization: '${TOKEN}'}")
    versions = {parse(text, "p.yaml", {"TOKEN": token}).version for token in ("a", "b")}
    assert versions == {sha256(text.encode()).hexdigest()[:12]}


def test_the_examples_load() -> None:
    demo = load(EXAMPLES / "demo.yaml", {})
    assert set(demo.routes) == {"intent", "intent_ids", "intent_distilled", "intent_heavy", "embed"}
    assert [tier.name for tier in demo.routes["intent"].arms[0].tiers] == ["distilled", "heavy"]
    assert demo.routes["intent"].arms[0].tiers[0].accept == Accept("LOGITS", "logits", "margin", 0.5)
    assert demo.backends["heavy_ids"].model == "intent_heavy_ids"
    assert demo.backends["embedder"].batch == Batch(max_rows=8, slots=2, queue_time=5)
    assert demo.routes["embed"].arms[0].cache == Cache(ttl=86400)
    assert load(EXAMPLES / "proxy.yaml", {}).proxy == "triton"


def test_secrets_never_show() -> None:
    policy = parse(backend("headers: {authorization: '${TOKEN}'}"), "p.yaml", {"TOKEN": "hunter2"})
    secret = policy.backends["b"].headers["authorization"]
    assert secret.value == "hunter2"
    assert f"{secret} {secret!r}" == "*** ***"
    assert "hunter2" not in repr(policy) + str(policy)


SECRET_SPOTS = [
    BASE + "listen: {http: '${S}'}",
    BASE + "limits: {in_flight: '${S}', body_bytes: '${S}', timeout: '${S}'}",
    BASE + "telemetry: {access_log: '${S}', traces: {per_second: '${S}'}}",
    BASE + "routes: '${S}'",
    route("    backend: ${S}\n    timeout: ${S}"),
    route("    tiers:\n    - {backend: triton, accept: {values: '${S}', score: '${S}', threshold: '${S}'}}"),
    backend("kind: '${S}', protocol: '${S}', model: '${S}', batch: '${S}'"),
    backend("headers: {a: '${S}\\x01'}").replace("'", '"'),
    "proxy: ${S}\nbackends:\n  b: {endpoints: ['http://${S}', '${S}', {http: '${S}', grpc: '${S}'}]}",
]


@pytest.mark.parametrize("text", SECRET_SPOTS)
@pytest.mark.parametrize("value", ["hunter2 !", "12.5hunter", "https://hunter2@x"])
def test_no_problem_shows_what_the_environment_holds(text: str, value: str) -> None:
    told = "\n".join(problems(text, S=value))
    assert "hunter" not in told
    assert "12.5" not in told


EXACT = {
    # Keys.
    route("    tiers:\n    - backend: triton\n      accept:\n        treshold: 1\n    - {backend: triton, name: x}"): [
        "p.yaml:8: routes.r.tiers[0].accept: the key 'output' is missing",
        "p.yaml:8: routes.r.tiers[0].accept: the key 'values' is missing",
        "p.yaml:8: routes.r.tiers[0].accept: the key 'score' is missing",
        "p.yaml:9: routes.r.tiers[0].accept.treshold: unknown key; did you mean 'threshold'?",
    ],
    BASE + "limits: {qqq: 1}": [
        "p.yaml:4: limits.qqq: unknown key; expected one of body_bytes, connections, drain, drain_delay, in_flight,"
        " reply_bytes, timeout",
    ],
    BASE + "y-anchors: 1": [
        "p.yaml:4: y-anchors: unknown key; expected one of backends, include, limits, listen, proxy, redis, routes, "
        "telemetry, tenant_header",
    ],
    BASE + "limits:\n  timeout: 1s\n  timeout: 2s": [
        "p.yaml:6: limits.timeout: duplicate key, first on line 5; keep one of them",
    ],
    "routes: {r: {backend: b}}": ["p.yaml:1: the key 'backends' is missing"],
    "backends: {}\nproxy: b": ["p.yaml:2: proxy: backends has no 'b'; there are none"],
    "backends:\n  b: {}\nproxy: b": [
        "p.yaml:2: backends.b: has no endpoints; write 'endpoints:' with a list, or 'local: PATH' for a model in this process"
    ],
    "": [
        "p.yaml:1: expected a mapping with include, listen, proxy, backends, routes, redis, tenant_header, limits, "
        "telemetry, got nothing",
    ],
    "- 1": [
        "p.yaml:1: expected a mapping with include, listen, proxy, backends, routes, redis, tenant_header, limits, "
        "telemetry, got a list",
    ],
    BASE + "limits:": [
        "p.yaml:4: limits: expected a mapping with in_flight, body_bytes, reply_bytes, timeout, drain, drain_delay, connections,"
        " got nothing;"
        " delete the key, or write {} for the defaults",
    ],
    # Names and references.
    BASE + "  'a b': {endpoints: [http://t:8000]}": [
        "p.yaml:4: backends[\"a b\"]: expected a name of 1 to 128 letters, digits, '_', '.', ':', '/' or '-'",
    ],
    BASE + '  "a\\nb": {endpoints: [http://t:8000]}': [
        "p.yaml:4: backends[\"a\\nb\"]: expected a name of 1 to 128 letters, digits, '_', '.', ':', '/' or '-'",
    ],
    route("    backend: tritn"): ["p.yaml:6: routes.r.backend: backends has no 'tritn'; did you mean 'triton'?"],
    route("    backend: other"): ["p.yaml:6: routes.r.backend: backends has no 'other'; expected one of triton"],
    route("    backend:"): ["p.yaml:6: routes.r.backend: expected the name of one of the backends, got nothing"],
    BASE + "routes:\n  v1.2: {backend: x}": [
        "p.yaml:5: routes[\"v1.2\"].backend: backends has no 'x'; expected one of triton",
    ],
    "backends:\n  b: {endpoints: [http://t:8000]}": [
        "p.yaml:1: no model would be answered; add a route, or 'proxy: BACKEND' to answer every model",
    ],
    backend("model: m"): [
        "p.yaml:1: proxy: the proxy's backend has a 'model', which would answer in every model's name;"
        " name a backend without 'model'",
    ],
    # Routes and tiers.
    route("    {}"): ["p.yaml:5: routes.r: has no backend; write 'backend: NAME', or 'tiers:' with a list"],
    route("    tiers: []"): ["p.yaml:6: routes.r.tiers: expected a list of at least one tier, got an empty list"],
    route("    backend: triton\n    tiers: [{backend: triton}]"): [
        "p.yaml:6: routes.r.backend: 'backend' and 'tiers' exclude each other; 'backend: NAME' is short for one tier",
    ],
    route("    tiers:\n    - backend: triton\n    - backend: triton\n      accept: {}"): [
        "p.yaml:7: routes.r.tiers[0]: the key 'accept' is missing; without it no row goes on to the next tier",
        "p.yaml:8: routes.r.tiers[1]: the last tier has 'accept'; delete it: there is no tier to go on to",
        "p.yaml:8: routes.r.tiers[1]: has the name of tiers[0]; give it a 'name' of its own",
        "p.yaml:9: routes.r.tiers[1].accept: the key 'output' is missing",
        "p.yaml:9: routes.r.tiers[1].accept: the key 'values' is missing",
        "p.yaml:9: routes.r.tiers[1].accept: the key 'score' is missing",
        "p.yaml:9: routes.r.tiers[1].accept: the key 'threshold' is missing",
    ],
    route(
        "    tiers:\n    - {backend: triton, accept: {output: O, values: logit, score: x, threshold: 1.5}}\n    - {}"
    ): [
        "p.yaml:7: routes.r.tiers[0].accept.values: expected logits or probabilities, got 'logit';"
        " did you mean 'logits'?",
        "p.yaml:7: routes.r.tiers[0].accept.score: expected max_probability, margin or entropy, got 'x'",
        "p.yaml:7: routes.r.tiers[0].accept.threshold: expected a number from 0 to 1, got 1.5",
        "p.yaml:8: routes.r.tiers[1]: the key 'backend' is missing",
    ],
    route("    tiers: [triton]"): [
        "p.yaml:6: routes.r.tiers[0]: expected a mapping with name, backend, accept, got 'triton'",
    ],
    route("    backend: triton\n    cache: {store: radis, entries: 0, bytes: 0, ttl: 0s}"): [
        "p.yaml:7: routes.r.cache.store: expected memory or redis, got 'radis'; did you mean 'redis'?",
        "p.yaml:7: routes.r.cache.entries: expected a whole number from 1 to 1000000000, got 0",
        "p.yaml:7: routes.r.cache.bytes: expected a size from 1KiB to 1TiB, such as 64MiB, got 0",
        "p.yaml:7: routes.r.cache.ttl: expected a duration from 1ms to 365d, such as 2s, got '0s'",
    ],
    # Kinds of values.
    BASE + "limits: {in_flight: true, timeout: 10, body_bytes: 64M}": [
        "p.yaml:4: limits.in_flight: expected a whole number from 1 to 1000000, got true",
        "p.yaml:4: limits.timeout: '10' has no unit; write 10s or 10ms",
        "p.yaml:4: limits.body_bytes: '64M' has the unknown unit 'M'; write 64MiB or 64MB",
    ],
    BASE + "limits: {in_flight: 1.5, timeout: [1s], body_bytes: no}": [
        "p.yaml:4: limits.in_flight: expected a whole number from 1 to 1000000, got 1.5",
        "p.yaml:4: limits.timeout: expected a duration from 1ms to 1d, such as 2s, got a list",
        "p.yaml:4: limits.body_bytes: 'no' is not a size; write a number and one of KB, MB, GB, KiB, MiB, GiB,"
        " such as 64MiB",
    ],
    BASE + "telemetry: {access_log: yes, response_headers: 1, traces: {per_second: .nan, keep: -1}}": [
        "p.yaml:4: telemetry.access_log: expected true or false, got 'yes'",
        "p.yaml:4: telemetry.response_headers: expected true or false, got 1",
        "p.yaml:4: telemetry.traces.per_second: expected a number from 0 to 100000, got '.nan'",
        "p.yaml:4: telemetry.traces.keep: expected a whole number from 0 to 100000, got -1",
    ],
    BASE + "telemetry: {traces: {per_second: true}}": [
        "p.yaml:4: telemetry.traces.per_second: expected a number from 0 to 100000, got true",
    ],
    # Backends.
    backend("batch: {max_rows: 100, queue_rows: 64}"): [
        "p.yaml:3: backends.b.batch.queue_rows: queue_rows is less than max_rows; a queue must hold one full batch",
    ],
    backend("batch: {max_rows: 2000}"): [
        "p.yaml:3: backends.b.batch: queue_rows is less than max_rows; a queue must hold one full batch",
    ],
    backend("protocol: grpc"): [
        "p.yaml:3: backends.b.endpoints: endpoints[0] has no grpc address, and the protocol is grpc;"
        " write grpc: host:port, or choose another protocol",
    ],
    "proxy: b\nbackends:\n  b: {endpoints: [http://t:1, grpc://t:2, http://t:1/]}": [
        "p.yaml:3: backends.b.endpoints: endpoints[1] has no http address, and the protocol is http;"
        " write http: http://host:port, or choose another protocol",
        "p.yaml:3: backends.b.endpoints: endpoints[2] is endpoints[0] again; write each replica once",
    ],
    "proxy: b\nbackends:\n  b:\n    endpoints:\n    - {}\n    - {http: t:1}\n    - http://t\n    - []": [
        "p.yaml:5: backends.b.endpoints[0]: has no address; write http: or grpc:, or both",
        "p.yaml:6: backends.b.endpoints[1].http: 't:1' has no scheme; write http://t:1",
        "p.yaml:7: backends.b.endpoints[2]: 'http://t' has no port; write host:port, such as http://triton:8000",
        "p.yaml:8: backends.b.endpoints[3]: expected http://host:port, grpc://host:port or a mapping with http, grpc,"
        " got an empty list",
    ],
    backend("headers: {Host: x, 'a b': c, empty: , X: 1, x: 2, list: [1]}"): [
        "p.yaml:3: backends.b.headers.Host: 'host' is set by the connection itself; delete it",
        "p.yaml:3: backends.b.headers[\"a b\"]: not a header's name; expected letters, digits, '-', '_' and '.'",
        "p.yaml:3: backends.b.headers.empty: a header's value without a value; write a text in quotes, ${NAME} or "
        "${file:NAME}",
        "p.yaml:3: backends.b.headers.x: 'x' is here already; names differ by more than upper and lower case",
        "p.yaml:3: backends.b.headers.list: expected a header's value, got a list",
    ],
    # Listeners.
    BASE + "listen:\n  http: 127.0.0.1:9000\n  grpc: 9000\n  admin: 8002": [
        "p.yaml:6: listen.grpc: http and grpc cannot listen on one address; give each a port of its own, or off",
        "p.yaml:7: listen.admin: metrics and admin cannot listen on one address; give each a port of its own, or off",
    ],
    BASE + "listen:\n  http: off\n  grpc: off": [
        "p.yaml:5: listen.http: neither http nor grpc listens; switch one of them on"
    ],
    BASE + "listen: {http: false, grpc: ':8000', metrics: 70000, admin: '::1'}": [
        "p.yaml:4: listen.http: expected host:port, a port on 0.0.0.0, or off, got false",
        "p.yaml:4: listen.grpc: ':8000' has no host; write host:port, such as 0.0.0.0:8000",
        "p.yaml:4: listen.metrics: the port 70000 is impossible; expected a port from 0 to 65535",
        "p.yaml:4: listen.admin: '::1' is not an address; write host:port, such as 127.0.0.1:8000;"
        " an IPv6 host in brackets",
    ],
}


@pytest.mark.parametrize("text", EXACT, ids=range(len(EXACT)))
def test_every_problem_says_what_is_wrong_and_what_is_right(text: str) -> None:
    assert problems(text) == EXACT[text]


def test_problems_of_all_sections_come_at_once_in_the_order_of_lines() -> None:
    told = problems(
        "limits: {in_flight: 0}\nproxy: x\nbackends:\n  b: {endpoints: ['http://${HOST}:1'], x: 1}\nroutes: {r: 1}"
    )
    assert told == [
        "p.yaml:1: limits.in_flight: expected a whole number from 1 to 1000000, got 0",
        "p.yaml:2: proxy: backends has no 'x'; expected one of b",
        "p.yaml:4: backends.b.endpoints[0]: the environment has no HOST; set it, or write ${HOST:-default}",
        "p.yaml:4: backends.b.x: unknown key; expected one of batch, connect_timeout, control, endpoints,"
        " first_byte_timeout, headers, idle_timeout, kind, local, model, protocol, ready_replicas, ...",
        "p.yaml:5: routes.r: expected a mapping with backend, tiers, experiment, cache, fallback, timeout, got 1",
    ]


def test_a_port_of_the_systems_choice_is_never_taken() -> None:
    listen = parse(BASE + "listen: {http: 0, grpc: 0}", "p.yaml", {}).listen
    assert listen.http == listen.grpc == Address("0.0.0.0", 0)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    def message(path: Path) -> str:
        with pytest.raises(PolicyError) as caught:
            load(path, {})
        return str(caught.value)

    assert message(tmp_path / "none") == f"{tmp_path / 'none'}: cannot be read: No such file or directory"
    assert message(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("# one\n# é".encode("latin-1"))
    assert message(latin) == f"{latin}:2: not UTF-8 text; save the file as UTF-8"
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (4 * 2**20 + 1))
    assert message(large) == f"{large}: larger than 4 MiB; is this the right file?"
    (good := tmp_path / "good.yaml").write_text(BASE)
    assert load(os.fspath(good), {}) == parse(BASE, "p.yaml", {})


def test_the_policy_of_a_command_line() -> None:
    policy = implicit("http://t:8000", "t:8001", listen={"http": "9000", "metrics": "off"})
    assert policy.proxy == "backend"
    assert policy.backends["backend"].endpoints == (Endpoint("http://t:8000", "t:8001"),)
    assert policy.backends["backend"].protocol == "grpc"
    assert policy.listen == Listen(http=Address("0.0.0.0", 9000), metrics=None)
    assert implicit("http://t:8000").backends["backend"].protocol == "http"
    assert implicit("grpc://t:8001").backends["backend"].endpoints == (Endpoint(None, "t:8001"),)
    assert implicit("http://t:8000").version != implicit("http://u:8000").version


@pytest.mark.parametrize(
    ("http", "grpc", "message"),
    [
        ("t:8000", None, "--backend: 't:8000' has no scheme; write http://t:8000"),
        ("ftp://t:1", None, "--backend: the scheme of 'ftp://t:1' is not http or https;"
         " write http://host:port or grpc://host:port"),
        ("http://t:1/v2", None, "--backend: 'http://t:1/v2' has a path;"
         " write http://t:1; the caller's path is passed on"),
        ("http://u:pw@t:1", None, "--backend: credentials do not belong in an address; write them as headers,"
         " out of the environment: ${NAME}"),
        ("http://999.0.0.1:1", None, "--backend: 'http://999.0.0.1:1' has an impossible host; write host:port,"
         " such as http://triton:8000"),
        ("http://t:0", None, "--backend: the port 0 is impossible; expected a port from 1 to 65535"),
        ("http://t:1", "t", "--backend.grpc: 't' has no port; write host:port, such as triton:8001"),
        (None, "http://t:1", "--backend.grpc: 'http://t:1' is not a gRPC address;"
         " write host:port, or grpcs://host:port for TLS"),
        (None, None, "--backend: '' has no scheme; write http://host:port or grpc://host:port"),
    ],
)  # fmt: skip
def test_a_command_line_that_is_wrong(http: str | None, grpc: str | None, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        implicit(http, grpc)
    assert str(caught.value) == f"command line: {message}"
    with pytest.raises(PolicyError, match=r"^command line: --listen\.http: 'x' has no port"):
        implicit("http://t:1", listen={"http": "x"})
