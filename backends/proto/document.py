"""A message as the JSON that Triton has for it: its fields in the order of the .proto, and 64-bit integers as numbers.

Fields are there even where they say nothing, except for messages and members of a `oneof` that are not set. Protobuf's
own `json_format` differs in all three, on the way out only: it reads what is written here.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def document(message: Message) -> dict[str, Any]:
    """`message` as dictionaries and lists for a JSON encoder."""
    made: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            made[field.name] = _several(field, getattr(message, field.name))
        elif not field.has_presence or message.HasField(field.name):
            made[field.name] = _value(field, getattr(message, field.name))
    return made


def _several(field: Any, values: Any) -> Any:
    kind = field.message_type
    if kind is None or not kind.GetOptions().map_entry:
        return [_value(field, value) for value in values]
    held = kind.fields_by_name["value"]
    return {str(key): _value(held, values[key]) for key in sorted(values)}


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return document(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value
