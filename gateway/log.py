"""Structured logs on standard error: JSON lines, or text for people."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

import msgspec

Format = Literal["json", "text"]


def configure(level: str, form: Format, always: Mapping[str, Any] | None = None) -> None:
    """Sends all logs to standard error, each with the fields `always`. Libraries are heard from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_Json if form == "json" else _Text)(always or {}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("headrace").setLevel(level.upper())
    # An aborted stream is told by our own access line; uvicorn's word for it is a traceback.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    # gRPC's core has its own way to standard error, and a line for whoever fails a handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class _Fields(logging.Formatter):
    def __init__(self, always: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__()
        self._always = always

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        return {**self._always, **getattr(record, "fields", {})}


class _Json(_Fields):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Text(_Fields):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        words = " ".join(f"{k}={_shown(v)}" for k, v in self.fields(record).items())
        line = f"{time} {record.levelname.lower():7} {record.getMessage()}" + (f" {words}" if words else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _shown(value: Any) -> str:
    """A value on one line: what a client sent cannot forge a line of its own."""
    text = str(value)
    plain = text.isprintable() and " " not in text and '"' not in text and text
    return text if plain else msgspec.json.encode(text).decode()
