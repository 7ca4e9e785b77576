"""A real nginx on free ports of 127.0.0.1, in a folder of its own: before several gateways, or as a backend.

`make test` installs it (deploy/environment.sh nginx).
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.serve import free_port, within

_CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{ worker_connections 4096; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  {servers}
}}
"""

# What the README recommends. That a request may go to the next gateway although it is a POST is safe here: a gateway
# that ends refuses with 503 what it has not begun, and cuts nothing that it has.
_BEFORE_GATEWAYS = """
  upstream gateways_http {{ {http_servers} keepalive 16; }}
  upstream gateways_grpc {{ {grpc_servers} keepalive 16; }}
  server {{
    listen {http};
    location / {{
      proxy_pass http://gateways_http;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_next_upstream error timeout http_503 non_idempotent;
    }}
  }}
  server {{
    listen {grpc} http2;
    location / {{
      grpc_pass grpc://gateways_grpc;
      grpc_next_upstream error timeout http_503 non_idempotent;
    }}
  }}
"""


@dataclass(frozen=True)
class Nginx:
    http: str
    grpc: str


@contextmanager
def before_gateways(folder: Path, http: Sequence[str], grpc: Sequence[str]) -> Iterator[Nginx]:
    """Before the gateways at these addresses; one that fails is left alone for a second."""
    port = free_port(2)
    made = Nginx(f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}")
    servers = _BEFORE_GATEWAYS.format(
        http=made.http,
        grpc=made.grpc,
        http_servers=" ".join(f"server {address} fail_timeout=1s;" for address in http),
        grpc_servers=" ".join(f"server {address} fail_timeout=1s;" for address in grpc),
    )
    with _running(folder, servers, port + 1):
        yield made


@contextmanager
def backend(folder: Path, server: str) -> Iterator[int]:
    """Its port, with `server` for what stands in its server block. It tells its requests in `folder`/access.log."""
    port = free_port()
    with _running(folder, f"server {{ listen 127.0.0.1:{port}; {server} }}", port):
        yield port


@contextmanager
def _running(folder: Path, servers: str, port: int) -> Iterator[None]:
    """nginx with these server blocks, once it listens on `port`."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/sbin")
    assert program, "there is no nginx: sh deploy/environment.sh nginx"
    configuration, log = folder / "nginx.conf", folder / "error.log"
    configuration.write_text(_CONFIGURATION.format(folder=folder, servers=servers))
    arguments = [program, "-p", str(folder), "-c", str(configuration), "-e", str(log)]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    try:
        assert within(10, lambda: _listens(port) or process.poll() is not None), "nginx does not listen"
        assert process.poll() is None, log.read_text()[-2000:]
        yield
    finally:
        process.terminate()
        process.wait(10)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
