"""Content encodings: gzip and deflate, undone in what callers send and made of what they are answered.

What a caller accepts is read as Triton reads it: of `gzip`, `deflate` and `identity` the one with the highest quality,
of equals the first; others, and `*`, count for nothing. Compressing never changes what
Inference-Header-Content-Length counts: bytes before compression. The level is the fastest: a caller who asks by habit
must not cost the machine what level 6 does, and tensors hardly shrink further.

Large bodies are worked on in a thread (zlib lets go of the interpreter's lock), so that nobody else waits for them.
"""

from __future__ import annotations

import asyncio
import zlib
from functools import lru_cache

from backends.errors import BadRequest, TooLarge

# Bytes that are compressed or decompressed at once; a millisecond's work or two.
_INLINE_BYTES = 32 * 1024
# Longer headers name no more encodings than there are: they are not read.
_HEADER_BYTES = 256
# Of a gzip body; bgzip makes one of every 64 KiB. Without a bound each byte of a body could cost a microsecond.
_MAX_MEMBERS = 4096
_PIECE_BYTES = 64 * 1024
# What zlib calls the frame of each encoding, around a window of 2 ** n bytes.
_FRAME = {b"gzip": 16, b"deflate": 0}


@lru_cache(256)
def accepted(header: bytes) -> bytes:
    """The encoding that an Accept-Encoding header asks for: `gzip`, `deflate`, or nothing for as it is."""
    best, found = 0.0, b""
    for given in header[:_HEADER_BYTES].split(b","):
        name, *parameters = (part.strip() for part in given.split(b";"))
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition(b"=")
            if key.lower() == b"q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
        if quality > best and name in (b"gzip", b"deflate", b"identity"):
            best, found = quality, name
    return b"" if found == b"identity" else found


async def deflated(body: bytes, encoding: bytes) -> bytes:
    """`body`, compressed as `accepted` has said."""
    if len(body) <= _INLINE_BYTES:
        return _deflated(body, encoding)
    return await asyncio.to_thread(_deflated, body, encoding)


def _deflated(body: bytes, encoding: bytes) -> bytes:
    # A window no larger than the body: the full one is a quarter of a megabyte to clear, forty times a small answer's
    # own cost.
    window = min(15, max(9, len(body).bit_length()))
    deflater = zlib.compressobj(1, zlib.DEFLATED, _FRAME[encoding] + window, window - 7)
    return deflater.compress(body) + deflater.flush()


async def inflated(body: bytes, encoding: bytes, limit: int) -> bytes:
    """`body` without its encoding. Raises TooLarge where that has more than `limit` bytes, BadRequest where it lies."""
    if len(body) <= _INLINE_BYTES:
        try:
            return inflated_now(body, encoding, min(limit, _INLINE_BYTES))
        except TooLarge:
            if limit <= _INLINE_BYTES:
                raise
    return await asyncio.to_thread(inflated_now, body, encoding, limit)


def inflated_now(body: bytes, encoding: bytes, limit: int) -> bytes:
    """All members of a gzip body, or a deflate one: zlib's frame (RFC 9110), though some clients send it bare.

    One frame under the other's name is told by its first bytes, as Triton does.
    """
    framed = body[:2] == b"\x1f\x8b" or (len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0)
    bare = encoding == b"deflate" and not framed
    name = encoding.decode()
    whole = bytearray()
    at = members = 0
    while at < len(body):
        members += 1
        if members > _MAX_MEMBERS:
            raise BadRequest(f"content-encoding {name}: expected at most {_MAX_MEMBERS} members, got more")
        inflater = zlib.decompressobj(-15 if bare else 47)
        while not inflater.eof:
            # In pieces: what is left after a member is copied each time, and must not be all of the body.
            piece = body[at : at + _PIECE_BYTES]
            if not piece:
                raise BadRequest(f"content-encoding {name}: the compressed body is cut short")
            try:
                whole += inflater.decompress(piece, limit + 1 - len(whole))
            except zlib.error as error:
                raise BadRequest(f"content-encoding {name}: {error}") from None
            if len(whole) > limit:
                raise TooLarge(f"request body: expected at most {limit} bytes after decompression, got more")
            at += len(piece) - len(inflater.unused_data)
    return bytes(whole)
