"""TLS between a transport and a protocol that know nothing of it: an ssl.SSLObject with its two memories.

The loops' own TLS hides the transport below: how much is still unsent, and that one way of a connection can end before
the other. Both matter here: a slow reader is told from one that has gone, and an early answer must not be lost to a
reset. So `Secured` is a protocol to the transport and a transport to the protocol, and hides nothing:

- What is written is encrypted and handed down at once; there is no buffer but the transport's own. Pausing and resuming
  either way is the transport's.
- `write_eof` says so to the peer (close_notify), then ends the transport's way out. What comes afterwards is passed up
  as it is, unread: who ended can only count it.
- `eof_received` is the peer's close_notify. A connection that ends without one is lost, not ended, for anybody could
  have cut it: the protocol hears of `connection_lost` alone.

`connection_made` comes after the handshake. That it began is told to `shaking`, and how it went to `shaken`, once;
nobody else hears of one that failed. It is not bounded in time here: owners have clocks.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from backends.tensor import Bytes

# What one read takes; a record has at most 16 KiB.
_READ_BYTES = 64 * 1024


class Secured(asyncio.Transport, asyncio.Protocol):
    """The TLS of one connection, whose protocol is `inner`. `server_name` is whom the peer must be; None: a client."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        context: ssl.SSLContext,
        *,
        server_name: str | None,
        shaken: Callable[[Secured, Exception | None], None],
        shaking: Callable[[Secured], None] = lambda begun: None,
    ) -> None:
        self.inner = inner
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_name is None, server_name)
        self._shaking = shaking
        self._shaken: Callable[[Secured, Exception | None], None] | None = shaken
        self._ended = False  # we have said that no more comes from us
        self._broken: ssl.SSLError | None = None

    # To the transport: a protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)
        self._shaking(self)
        self._shake()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            self.inner.data_received(data)
            return
        self._came.write(data)
        if self._shaken is not None and not self._shake():
            return
        read, ended = self._read()
        if read:
            self.inner.data_received(read)
        if self._goes.pending:  # an answer of TLS itself, such as to a change of keys
            self._flush()
        if ended and not self._below.is_closing():
            self.inner.eof_received()
            self.close()

    def eof_received(self) -> None:
        if not self._ended:  # else what we said is still on its way, and the transport closes itself afterwards
            self._below.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._shaken is not None:
            self._done(exc or ConnectionResetError("the connection was closed within the handshake"))
        inner, self.inner = self.inner, asyncio.Protocol()  # they hold each other
        inner.connection_lost(exc or self._broken)

    def pause_writing(self) -> None:
        if self._shaken is None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self._shaken is None:
            self.inner.resume_writing()

    # To the protocol: a transport.

    def write(self, data: Bytes) -> None:
        self._encrypt(data)
        self._flush()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for data in list_of_data:
            self._encrypt(data)
        self._flush()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._ended:
            self._farewell()
            self._below.write_eof()

    def close(self) -> None:
        if not self._ended and not self._below.is_closing():
            self._farewell()
        self._below.close()

    def abort(self) -> None:
        self._below.abort()

    def is_closing(self) -> bool:
        return self._below.is_closing()

    def pause_reading(self) -> None:
        self._below.pause_reading()

    def resume_reading(self) -> None:
        self._below.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._below.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._below.get_extra_info(name, default)

    # TLS.

    def _shake(self) -> bool:
        """Goes on with the handshake; whether it is over, and well."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except (ssl.SSLError, ValueError) as error:  # a name that can be nobody's is a ValueError
            self._flush()  # the alert, by which the peer learns why
            self._below.close()
            self._done(error)
            return False
        self._flush()
        self._done(None)
        self.inner.connection_made(self)
        return True

    def _done(self, error: Exception | None) -> None:
        shaken, self._shaken = self._shaken, None
        if error is not None:
            self.inner = asyncio.Protocol()  # the other one never was connected
        assert shaken is not None
        shaken(self, error)

    def _read(self) -> tuple[bytes, bool]:
        """All that has come, and whether that was the end."""
        parts: list[bytes] = []
        try:
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            return parts[0] if len(parts) == 1 else b"".join(parts), False
        except ssl.SSLZeroReturnError:
            pass
        except ssl.SSLError as error:
            self._break(error)
            return b"", False
        return b"".join(parts), True

    def _encrypt(self, data: Bytes) -> None:
        """A record at a time is all that one call takes."""
        if self._ended or self._below.is_closing() or not len(data):
            return
        try:
            written, size = self._tls.write(data), len(data)
            if written < size:
                with memoryview(data).cast("B") as rest:
                    while written < size:
                        written += self._tls.write(rest[written:])
        except ssl.SSLError as error:
            self._break(error)

    def _flush(self) -> None:
        if self._goes.pending and not self._below.is_closing():
            self._below.write(self._goes.read())

    def _farewell(self) -> None:
        """Says that no more comes from us."""
        self._ended = True
        with suppress(ssl.SSLError):
            self._tls.unwrap()  # says it, and then would wait for the same from the peer
        self._flush()

    def _break(self, error: ssl.SSLError) -> None:
        """The peer does not keep to TLS, or says that we do not; nothing can be said or heard any more."""
        self._broken = error
        self._flush()
        self._below.abort()
