"""A client of one KServe v2 server (Triton, mostly) over gRPC: bytes out and bytes in, one channel per endpoint.

How "never sent" is told from "lost". Only the first may be repeated elsewhere, so that a doubt counts as lost:

- A channel that is idle or connecting is waited for before a call is made. If it does not settle in time, no call was
  ever made: `Unreachable`.
- A call on a channel that fails to connect ends with UNAVAILABLE and a text of gRPC's own (`_NEVER_SENT`), without a
  stream of its own. A backend that relays for others may send that very text as its answer, but then our channel is
  connected: text and channel state must agree to mean `Unreachable`.
- A connection that breaks under a call ends with UNAVAILABLE too, and grpc.aio does not say whether the status came
  from the peer or from the transport (`debug_error_string` did in older versions). The transport's texts (`_LOST`)
  become `ConnectionLost`, all others `BackendFailed`; neither claims that nothing was executed.
- What gRPC repeats by itself ("transparent retries") is only what the peer never processed: streams that were refused
  or lie beyond a GOAWAY, or never left. Other retries need a service config, whose look-up is switched off.

Verified with grpcio 1.85: connection refused, unknown host, a silent peer, one that is not HTTP/2, one that is killed
during a call, and one killed so shortly before that the channel still counts as connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import Context
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from backends.addresses import Resolve
from backends.configuration import read_message
from backends.errors import (
    FIRST_BYTE,
    BackendFailed,
    BadReply,
    ConnectionLost,
    Expired,
    Failure,
    Rejected,
    Unreachable,
    Unsupported,
)
from backends.grpc_channels import GROWN, Channels, Line, Options
from backends.grpc_metadata import answered, metadata
from backends.grpc_replies import Replies, cancelled
from backends.kserve_grpc import read_reply, write_request
from backends.proto import kserve_pb2 as pb
from backends.proto import wire
from backends.request import HttpCall, Relay, Reply, Request, RpcCall, Trait, replace
from backends.tls import ClientTls, explained_by_grpc

_SERVICE = "/inference.GRPCInferenceService"
_INFER = f"{_SERVICE}/ModelInfer"
_STREAM = f"{_SERVICE}/ModelStreamInfer"

_NEVER_SENT = (
    "failed to connect to all addresses", "connections to all backends failing", "errors resolving",
    "DNS resolution failed", "empty address list",
)  # fmt: skip
_LOST = re.compile(
    r"socket closed|stream removed|connection (reset|timed out|aborted)|broken pipe|goaway|(watchdog|ping) timeout"
    r"|transport (is )?clos|endpoint clos|max connection age",
    re.IGNORECASE,
)
# Triton refuses with UNAVAILABLE what its queue policy does not let in, and what it let wait for too long.
_BUSY = re.compile(r"exceeds maximum queue size|request timeout expired", re.IGNORECASE)
# Our own side's words for a reply beyond `max_message_bytes`; the backend did what it was asked.
_OVERSIZE = re.compile(r"CLIENT: received message larger than max", re.IGNORECASE)
# And those for an error that is itself too long, a stack trace or what it quotes: it says anything but busy.
_LONG_ERROR = re.compile(r"received metadata size exceeds", re.IGNORECASE)
# Our own side's, too, for a deadline that passed while the call ran.
_EXPIRED = "Deadline Exceeded"
# Longer messages than this are a model's stack trace: no matter for one line.
_MAX_MESSAGE = 1000
# What a backend says beside its answer, that stack trace included; gRPC's own bound is 8 KiB, and fails the call.
_MAX_METADATA_BYTES = 64 * 1024


class TritonGrpc:
    """Answers inference calls (`Infer`) and relays all others (`RpcCall`).

    `address` is `host:port`. The channel is made by the first call, in its event loop: gRPC must not exist before a
    fork. `connect_timeout` is in seconds, as is `first_byte_timeout`, from when a call is made;
    `max_message_bytes` bounds what is received. Safe for any number of calls at once. A caller's cancellation cancels
    its call, at the backend too: at once, or when it is `GROWN`. Without `resolve` gRPC looks names up itself. With
    `tls` the server must show a certificate for the host of `address`.
    """

    def __init__(
        self,
        address: str,
        *,
        now: Callable[[], float],
        connect_timeout: float,
        max_message_bytes: int,
        first_byte_timeout: float = math.inf,
        resolve: Resolve | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        self._address = address
        self._tls = tls
        self._credentials: Any = None
        self._now = now
        self._connect_timeout = connect_timeout
        self._first_byte_timeout = first_byte_timeout
        self._max_message_bytes = max_message_bytes
        self._channels = Channels(address, self._connect, now, resolve)

    async def __call__(self, request: Request, /) -> Reply:
        content = request.content
        if isinstance(content, HttpCall):
            raise Unsupported(f"backend {self._address}: an HTTP call cannot be relayed over gRPC")
        line = self._channels.line or await self._opened(request.deadline)
        line.calls += 1
        try:
            await self._connected(line, request.deadline)
            if isinstance(content, RpcCall):
                relay = self._relay_inference if content.method == _INFER else self._relay
                return Reply(await relay(line, content, request))
            message = write_request(request.model, request.version, content)
            headers = request.headers.items()
            data, call = await self._unary(line, line.infer, message, request.deadline, headers)
            answer = read_reply(data)
            initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
            if initial or trailing:
                answer = replace(answer, headers=answered(initial), trailers=answered(trailing))
            return Reply(answer)
        finally:
            line.leave()

    async def unready(self, model: str, deadline: float, headers: Mapping[str, str]) -> str:
        """Why the server, or `model` on it, is not ready, by `deadline`; empty where it is."""
        method, field = ("ModelReady", wire.text(1, model)) if model else ("ServerReady", b"")
        try:
            reply = await self._asked(method, field, deadline, headers)
            # ModelReady's reply has the same field.
            return "" if pb.ServerReadyResponse.FromString(reply).ready else f"{method} answered no"
        except Failure as failure:
            return failure.message
        except DecodeError:
            return f"{method} answered nonsense"

    async def trait(self, model: str, version: str, deadline: float, headers: Mapping[str, Any]) -> Trait:
        """What `model` is like. Raises Failure where the server does not tell."""
        asked = wire.text(1, model) + (wire.text(2, version) if version else b"")
        return read_message(await self._asked("ModelConfig", asked, deadline, headers))

    async def _asked(self, method: str, message: bytes, deadline: float, headers: Mapping[str, str]) -> bytes:
        """The reply to one of the service's unary calls."""
        line = self._channels.line or await self._opened(deadline)
        line.calls += 1
        try:
            await self._connected(line, deadline)
            call = line.channel.unary_unary(f"{_SERVICE}/{method}")
            reply, _ = await self._unary(line, call, message, deadline, headers.items())
            return reply
        finally:
            line.leave()

    def refresh(self) -> None:
        """Asks anew, in the background, what the host's name stands for, where the last answer is old."""
        self._channels.refresh()

    async def close(self) -> None:
        """Ends all calls, which fail as lost. Later ones are refused as unreachable."""
        await self._channels.close()

    def _connect(self, target: str, options: Options) -> Any:
        options = self._options() + options
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        assert self._tls is not None
        if name := self._tls.server_name:
            options = [option for option in options if option[0] != "grpc.default_authority"]
            options += [("grpc.ssl_target_name_override", name), ("grpc.default_authority", name)]
        return grpc.aio.secure_channel(target, self._credentials, options=options)

    async def _opened(self, deadline: float) -> Line:
        """A channel where there is none."""
        try:
            async with asyncio.timeout(self._patience(deadline)):
                if self._tls is not None and self._credentials is None:
                    self._credentials = grpc.ssl_channel_credentials(*await self._tls.pems())
                return await self._channels.open()
        except TimeoutError:
            self._left(deadline)
            raise Unreachable(f"backend {self._address}: no address within {self._connect_timeout:g} s") from None
        except (OSError, UnicodeError) as error:
            raise Unreachable(f"backend {self._address}: {getattr(error, 'strerror', None) or error}") from None

    async def _connected(self, line: Line, deadline: float) -> None:
        """Returns when a call would be sent, or fail, at once."""
        self._left(deadline)
        if self._channels.closed:
            raise Unreachable(f"backend {self._address}: the client is closed")
        if line.channel.get_state(try_to_connect=True) in _SETTLED:
            return
        # One watcher for all: a watch on a channel cannot be taken back.
        if line.settling is None or line.settling.done():
            line.settling = asyncio.create_task(_settled(line.channel), context=Context())
        done, _ = await asyncio.wait({line.settling}, timeout=self._patience(deadline))
        if self._channels.closed:
            raise Unreachable(f"backend {self._address}: the client is closed")
        if not done:
            self._left(deadline)
            raise Unreachable(f"backend {self._address}: no connection within {self._connect_timeout:g} s")

    def _patience(self, deadline: float) -> float:
        return min(self._connect_timeout, deadline - self._now())

    def _left(self, deadline: float) -> float | None:
        """Seconds until `deadline`, None where there is none."""
        if deadline == math.inf:
            return None
        left = deadline - self._now()
        if left <= 0:
            raise Expired("backend")
        return left

    async def _unary(
        self, line: Line, method: Any, message: bytes, deadline: float, headers: Iterable[tuple[str, Any]]
    ) -> tuple[bytes, Any]:
        """A call's reply, and the call itself, which is over."""
        left = self._left(deadline)
        # A unary call's first byte is as good as its last: the backend is told the time that it really has.
        hurried = self._first_byte_timeout < (math.inf if left is None else left)
        timeout = self._first_byte_timeout if hurried else left
        young = timeout is not None and timeout < GROWN
        call = method(message, timeout=GROWN if young else timeout, metadata=metadata(headers), wait_for_ready=False)
        loop = asyncio.get_running_loop()
        began, over = loop.time(), loop.create_future()
        call.add_done_callback(partial(_wake, over))
        try:
            # Not the call itself, which would be cancelled with whoever waits for it.
            if young:
                async with asyncio.timeout(timeout):
                    await over
            else:
                await over
            return await call, call
        except TimeoutError:
            _give_up(line, call, began)
            raise Expired(FIRST_BYTE if hurried else "backend") from None
        except grpc.aio.AioRpcError as error:
            if hurried and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise Expired(FIRST_BYTE) from None
            raise self._failure(line, deadline, error) from None
        except asyncio.CancelledError:
            if cancelled():
                _give_up(line, call, began)
                raise
            raise ConnectionLost(f"backend {self._address}: the client was closed during the call") from None

    async def _relay_inference(self, line: Line, content: RpcCall, request: Request) -> Relay:
        """Relays a ModelInfer, which is cancelled with the same care as our own."""
        message = await anext(content.messages)
        reply, call = await self._unary(line, line.infer, message, request.deadline, _sent(content, request))
        initial, trailing = await call.initial_metadata(), answered(await call.trailing_metadata() or ())
        return Relay(200, _told(initial), reply, lambda: trailing)

    async def _relay(self, line: Line, content: RpcCall, request: Request) -> Relay:
        """Relays as a stream both ways, which is what a unary call is too as soon as it is on the wire.

        Returns with the first message, or at the end where there is none, so that a call which fails at once fails
        here.
        """
        method = line.stream if content.method == _STREAM else line.channel.stream_stream(content.method)
        call = method(
            timeout=self._left(request.deadline), metadata=metadata(_sent(content, request)), wait_for_ready=False
        )
        line.calls += 1
        call.add_done_callback(lambda _: line.leave())
        replies = Replies(call, content.messages, partial(self._failure, line, request.deadline), self._address)
        try:
            async with asyncio.timeout(self._first_byte_timeout if self._first_byte_timeout < math.inf else None):
                await replies.begin()
                initial = await call.initial_metadata()
        except TimeoutError:
            await replies.aclose()
            raise Expired(FIRST_BYTE) from None
        except BaseException:
            await replies.aclose()
            raise
        return Relay(200, _told(initial), replies, replies.trailers)

    def _failure(self, line: Line, deadline: float, error: grpc.aio.AioRpcError) -> Failure:
        """What a failed call means."""
        code, details = error.code(), error.details() or ""
        text = " ".join(details.split())[:_MAX_MESSAGE]
        where = f"backend {self._address}: {text}"
        # Without a deadline of ours, or before it, the backend speaks of one of its own.
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and (details == _EXPIRED or deadline <= self._now()):
            return Expired("backend")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _OVERSIZE.search(text):
            return BadReply(
                f"backend {self._address}: expected a reply of at most {self._max_message_bytes} bytes, got more"
            )
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _LONG_ERROR.search(text):
            return BackendFailed("the backend failed, with an error too long for gRPC", 2, grpc=True)
        if code is grpc.StatusCode.UNAVAILABLE:
            if _BUSY.search(text):
                return Rejected(where)
            connected = line.channel.get_state() is grpc.ChannelConnectivity.READY
            if text.startswith(_NEVER_SENT) and not connected:
                return Unreachable(f"backend {self._address}: {self._why(text)}")
            if _LOST.search(text):
                return ConnectionLost(where)
        return BackendFailed(
            text or f"the backend answered {code.name} without a message",
            code.value[0],
            grpc=True,
            details=details,
            headers=answered((*(error.initial_metadata() or ()), *(error.trailing_metadata() or ()))),
        )

    def _why(self, text: str) -> str:
        """Why there is no connection."""
        if self._tls is None:
            return text
        return explained_by_grpc(text, self._tls.server_name or self._address.rpartition(":")[0].strip("[]"))

    def _options(self) -> Options:
        return [
            ("grpc.max_receive_message_length", self._max_message_bytes),
            # What we send was bounded when it came in, and how much it may be merged to is the batch's business.
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a datacenter's wire is faster than gzip
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.service_config_disable_resolution", 1),
            # Servers take more than one ping in 5 minutes without data for abuse. That keep-alive is on at all bounds
            # how long sent bytes may stay unacknowledged by a peer that is gone (the timeout is TCP's, too).
            ("grpc.keepalive_time_ms", 330_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 0),
            # The minimum is how long one attempt to connect may take; a server that is back is found within a second.
            ("grpc.min_reconnect_backoff_ms", max(int(self._connect_timeout * 1000), 100)),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.primary_user_agent", "headrace"),
        ]


_SETTLED = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)


async def _settled(channel: Any) -> None:
    """Returns when the channel is connected, has failed to connect, or is closed."""
    with contextlib.suppress(grpc.aio.BaseError):
        while (state := channel.get_state(try_to_connect=True)) not in _SETTLED:
            await channel.wait_for_state_change(state)


def _give_up(line: Line, call: Any, began: float) -> None:
    """Cancels a unary call, which began at that time of the loop, as soon as that is safe; it stays on its line."""
    loop = asyncio.get_running_loop()
    if loop.time() >= began + GROWN:
        call.cancel()
        return
    line.calls += 1
    call.add_done_callback(lambda _: line.leave())
    loop.call_at(began + GROWN, call.cancel)


def _wake(waiter: asyncio.Future[None], _: Any) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _sent(content: RpcCall, request: Request) -> Iterable[tuple[str, Any]]:
    """A relayed call's metadata: its caller's, but for what a hop has changed."""
    return (*((k, v) for k, v in content.metadata if k not in request.headers), *request.headers.items())


def _told(initial: Any) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((k.encode(), _bytes(v)) for k, v in answered(initial or ()))


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
