"""A collector on 127.0.0.1 that keeps the spans it is sent, ours (protobuf) and Triton's (JSON)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class _Json:
    """What the tests look at in a span that came as JSON."""

    def __init__(self, span: dict[str, Any]) -> None:
        self.trace_id = bytes.fromhex(span["traceId"])
        self.parent_span_id = bytes.fromhex(span.get("parentSpanId", ""))


class Sink:
    """A collector that keeps the spans it is sent: `(service, span)`."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.resource: dict[str, str] = {}  # of the last export in protobuf
        self.schemas: set[str] = set()

    def take(self, body: bytes, kind: str) -> None:
        if kind.startswith("application/json"):  # Triton's form, whose ids are hexadecimal
            for resource in json.loads(body)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    self.spans += [("triton", _Json(span)) for span in scope["spans"]]
            return
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = attributes(resource.resource)
            self.schemas |= {scope.schema_url for scope in resource.scope_spans}
            service = self.resource.get("service.name", "")
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]

    def of(self, trace_id: str) -> list[tuple[str, Any]]:
        return [(service, span) for service, span in self.spans if span.trace_id.hex() == trace_id]


@contextmanager
def collector() -> Iterator[tuple[Sink, str]]:
    sink = Sink()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            sink.take(body, self.headers["content-type"])
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield sink, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(of: Any) -> dict[str, Any]:
    """What a span or a resource says of itself."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in of.attributes}
