"""Logs: one line each, whatever a client sent."""

from __future__ import annotations

import logging

import msgspec

from gateway.log import _Json, _Text


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("headrace.access", logging.INFO, "", 0, message, (), None)
    made.fields = fields
    return made


def test_json_lines_carry_their_fields() -> None:
    line = _Json().format(record("request", model="m\nfake line", ms=1.5))
    assert "\n" not in line
    document = msgspec.json.decode(line)
    assert (document["message"], document["model"], document["ms"]) == ("request", "m\nfake line", 1.5)
    assert document["level"] == "info"


def test_text_cannot_be_forged_by_what_a_client_sent() -> None:
    line = _Text().format(record("request", model='m\n12:00:00 info "x"', other="two words", plain="a=b"))
    assert "\n" not in line
    assert '"two words"' in line
    assert "plain=a=b" in line


def test_a_worker_says_on_every_line_which_one_it_is() -> None:
    said = record("request", model="m")
    assert msgspec.json.decode(_Json({"worker": 1}).format(said))["worker"] == 1
    assert _Text({"worker": 1}).format(said).endswith("request worker=1 model=m")
