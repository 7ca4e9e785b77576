"""A small model server that speaks KServe v2 over HTTP: every model answers `Y`, FP32 [1, 1], after `seconds`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = b'{"model_name":"m","model_version":"1","outputs":[{"name":"Y","datatype":"FP32","shape":[1,1],"data":[2.0]}]}'


class KServe(ThreadingHTTPServer):
    """Everything that is no inference is answered with 200; `inferences` counts those that began."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seconds = 0.0
        self.inferences = 0
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """A gateway that is killed leaves its connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes; the second must not wait for a delayed acknowledgement.
    disable_nagle_algorithm = True
    server: KServe

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        with self.server.lock:
            self.server.inferences += 1
        time.sleep(self.server.seconds)
        self._answer(ANSWER)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def kserve() -> Iterator[KServe]:
    with KServe() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
