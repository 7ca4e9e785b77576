"""Protobuf's wire format, as far as forwarding messages needs it: walking the top-level fields, and appending some.

Of a field that occurs twice every parser takes the last value, and merges the two where it is a message; which is why
a message can be changed by appending to it.
"""

from __future__ import annotations

LENGTH_DELIMITED = 2

# Every field becomes a Python object, so that 64 MiB of two-byte fields would be hostile. No model comes near this.
MAX_FIELDS = 1 << 14

Field = tuple[int, int, int, int]


def walk(data: bytes) -> list[Field]:
    """The top-level fields: key (number and wire type), where the field and where its value begins, where it ends.

    Raises ValueError where this is no protobuf message.
    """
    fields: list[Field] = []
    at, end = 0, len(data)
    try:
        while at < end:
            begin = at
            key, at = _varint(data, at)
            kind, start = key & 7, at
            if kind == LENGTH_DELIMITED:
                size, start = _varint(data, at)
                at = start + size
            elif kind == 0:
                at = _varint(data, at)[1]
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:  # groups, which proto3 does not have
                raise ValueError(f"unknown wire type {kind} at byte {begin}")
            if key < 8 or at > end:
                raise ValueError(f"field at byte {begin} has number 0 or ends beyond the message")
            fields.append((key, begin, start, at))
            if len(fields) > MAX_FIELDS:
                raise ValueError(f"more than {MAX_FIELDS} fields")
    except IndexError:
        raise ValueError("truncated") from None
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while shift < 70:  # ten bytes, of 7 bits each, hold 64 bits
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise ValueError("number longer than ten bytes")


def text(number: int, value: str) -> bytes:
    """A string field; an empty one too, which is how a field is cleared."""
    return field(number, value.encode())


def field(number: int, value: bytes) -> bytes:
    """A bytes, string or message field."""
    return opening(number, len(value)) + value


def opening(number: int, size: int) -> bytes:
    """The key of a length-delimited field whose number is below 16, and its length."""
    return bytes((number << 3 | LENGTH_DELIMITED,)) + varint(size)


def varint(value: int) -> bytes:
    """A number of at most 64 bits; a negative one is written as its value modulo 2^64."""
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
