"""The proxies that are compared, each with one worker and as its operators would set it up for this work.

All of them keep connections open on both sides and log no requests. Headrace has every hop of an inference wired
(admission, route, cascade of one tier, dispatcher, endpoint; metrics and decision headers). Its batches are of one row
and its slots more than the callers, so that each request is forwarded at once, by itself and as the bytes that it came
as: the stub answers every call with one row, and merged calls would need one for each.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.tools.bench.exchanges import MODEL
from gateway.tools.bench.processes import Process, free_port, running

# What is measured beside us comes from the system; where it is from.
PACKAGES = {"nginx": "nginx-light", "haproxy": "haproxy"}

_HEADRACE = """\
listen: {{http: 127.0.0.1:{http}, grpc: 127.0.0.1:{grpc}, metrics: off, admin: off}}
telemetry: {{access_log: false, traces: {{per_second: 0}}}}
backends:
  http_stub:
    endpoints: [{{http: http://127.0.0.1:{http_stub}}}]
    protocol: http
    model: {http_model}
    batch: {{max_rows: 1, slots: 64}}
  grpc_stub:
    endpoints: [{{grpc: 127.0.0.1:{grpc_stub}}}]
    protocol: grpc
    model: {grpc_model}
    batch: {{max_rows: 1, slots: 64}}
routes:
  {http_model}: {{backend: http_stub}}
  {grpc_model}: {{backend: grpc_stub}}
"""

_NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    keepalive_requests 1000000;
    upstream http_stub {{ server 127.0.0.1:{http_stub}; keepalive 64; keepalive_requests 1000000; }}
    upstream grpc_stub {{ server 127.0.0.1:{grpc_stub}; keepalive 64; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{http};
        location / {{ proxy_pass http://http_stub; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
    server {{
        listen 127.0.0.1:{grpc} http2;
        location / {{ grpc_pass grpc://grpc_stub; }}
    }}
}}
"""

_HAPROXY = """\
global
    nbthread 1
    maxconn 1024
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    http-reuse always
frontend http
    bind 127.0.0.1:{http}
    default_backend http_stub
backend http_stub
    server stub 127.0.0.1:{http_stub}
frontend grpc
    bind 127.0.0.1:{grpc} proto h2
    default_backend grpc_stub
backend grpc_stub
    server stub 127.0.0.1:{grpc_stub} proto h2
"""


@dataclass(frozen=True, slots=True)
class Stack:
    """A running proxy. `ports` are those that it serves, by protocol; `share` is of the requests that it is sent."""

    process: Process
    ports: Mapping[str, int]
    share: float = 1.0

    @property
    def name(self) -> str:
        return self.process.name


def found(command: str) -> str | None:
    """Where a proxy is. Debian puts them where only root's PATH leads."""
    return shutil.which(command, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin")


def missing() -> str | None:
    """What has to be installed first, in one line; None where everything is there."""
    absent = [package for command, package in PACKAGES.items() if found(command) is None]
    return f"expected {' and '.join(PACKAGES)}; install: sudo apt-get install {' '.join(absent)}" if absent else None


@contextmanager
def all_running(folder: Path) -> Iterator[list[Stack]]:
    """The stub backends and every stack before them; ended with the block."""
    with ExitStack() as open_ones:

        def begin(name: str, command: list[str], *ports: int) -> Process:
            return open_ones.enter_context(running(name, command, ports, folder))

        stubs = {"http_stub": free_port(), "grpc_stub": free_port()}
        for name, port in stubs.items():
            begin(name, [*_python(f"stub_{name.removesuffix('_stub')}"), str(port)], port)

        def configured(name: str, template: str, suffix: str) -> tuple[Path, dict[str, int]]:
            ports = {"http": free_port(), "grpc": free_port()}
            file = folder / f"{name}.{suffix}"
            models = {f"{protocol}_model": model for protocol, model in MODEL.items()}
            file.write_text(template.format(folder=folder, **ports, **stubs, **models))
            return file, ports

        file, ports = configured("headrace", _HEADRACE, "yaml")
        command = [sys.executable, "-c", "from gateway.cli import main; main()", "serve", str(file)]
        headrace = Stack(begin("headrace", command, *ports.values()), ports)
        file, ports = configured("nginx", _NGINX, "conf")
        command = [found("nginx") or "nginx", "-e", str(folder / "nginx.log"), "-c", str(file)]
        nginx = Stack(begin("nginx", command, *ports.values()), ports)
        file, ports = configured("haproxy", _HAPROXY, "cfg")
        command = [found("haproxy") or "haproxy", "-db", "-f", str(file)]
        haproxy = Stack(begin("haproxy", command, *ports.values()), ports)
        port = free_port()
        command = [*_python("starlette_httpx"), str(port), f"http://127.0.0.1:{stubs['http_stub']}"]
        # So slow that a tenth of the requests takes it the longest still.
        scale = Stack(begin("starlette", command, port), {"http": port}, share=0.1)
        yield [headrace, nginx, haproxy, scale]


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", f"gateway.tools.bench.{module}"]
