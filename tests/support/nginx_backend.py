"""A real nginx on 127.0.0.1, in a folder of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.serve import free_port

_CONFIG = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log warn;
{user}
events {{ worker_connections 4096; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; {server} }}
}}
"""


@contextmanager
def nginx(folder: Path, server: str) -> Iterator[int]:
    """Its port, with `server` for what stands in its server block; ended with the block."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/sbin")
    assert found, "these tests need nginx: apt-get install nginx-light"
    port = free_port()
    user = f"user {os.environ.get('USER') or 'root'};" if os.getuid() == 0 else ""
    config = folder / "nginx.conf"
    config.write_text(_CONFIG.format(folder=folder, port=port, server=server, user=user))
    process = subprocess.Popen([found, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")])
    try:
        until = time.monotonic() + 10
        while True:
            assert process.poll() is None, (folder / "error.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < until, "nginx does not listen"
                time.sleep(0.02)
        yield port
    finally:
        process.terminate()
        process.wait(10)
