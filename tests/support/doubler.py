"""A small model server of its own process: `python doubler.py PORT LOG`; Y = 2 X, after five milliseconds.

It writes every value of X that it has executed into LOG, a line each, so that a test can tell what was executed twice.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    log = -1

    def do_GET(self) -> None:
        self._answer(b"", "text/plain")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        end = int(self.headers.get("Inference-Header-Content-Length", len(body)))
        (given,) = json.loads(body[:end])["inputs"]
        count = given["shape"][0]
        values = given.get("data") or struct.unpack(f"<{count}f", body[end:])
        time.sleep(0.005)
        os.write(self.log, "".join(f"{value:g}\n" for value in values).encode())
        output = {"name": "Y", "datatype": "FP32", "shape": [count, 1], "data": [2 * value for value in values]}
        self._answer(json.dumps({"model_name": "m", "outputs": [output]}).encode(), "application/json")

    def _answer(self, body: bytes, kind: str) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    Model.log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    Server(("127.0.0.1", int(sys.argv[1])), Model).serve_forever()
