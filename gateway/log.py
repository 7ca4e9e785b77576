"""Structured logs on standard error: JSON lines, or text for people."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

Format = Literal["json", "text"]


def configure(level: str, form: Format) -> None:
    """Sends all logs to standard error. Libraries are heard from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("headrace").setLevel(level.upper())
    # An aborted stream is told by our own access line; uvicorn's word for it is a traceback.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        time = datetime.fromtimestamp(record.created, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        words = " ".join(f"{k}={_shown(v)}" for k, v in fields.items())
        line = f"{time} {record.levelname.lower():7} {record.getMessage()}" + (f" {words}" if words else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _shown(value: Any) -> str:
    """A value on one line: what a client sent cannot forge a line of its own."""
    text = str(value)
    plain = text.isprintable() and " " not in text and '"' not in text and text
    return text if plain else msgspec.json.encode(text).decode()
