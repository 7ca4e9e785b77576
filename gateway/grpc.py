"""The gRPC edge: KServe v2's inference service and gRPC's health service, over bytes.

ModelInfer becomes a `Request` with an `Infer`, ModelStreamInfer one for each model and sequence in it (`grpc_stream`),
whatever else the inference service has is relayed as an `RpcCall`, and health is answered here. One generic handler
serves all of it, without generated stubs: a message is parsed where somebody needs to know what it says. What happened
on the way goes back as trailing metadata, of failures too, because that is the one place that both have and because a
trail is complete only at the end.

A caller's metadata go to the backend with its call, and the backend's initial and trailing metadata come back: of calls
that are one caller's alone. A merged batch has no caller's, and what is kept or put together answers without any.

grpc.aio leaves a caller waiting for ever where a handler ends by an exception that it takes for a cancellation, or
where a status cannot be written; hence `_guarded`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc

from backends.errors import BadRequest, Failure, SlowCaller, TooLarge
from backends.grpc_metadata import end_to_end, metadata
from backends.kserve_grpc import read_request, write_reply
from backends.kserve_grpc_relayed import named, names_model
from backends.request import Infer, Metadata, Parameters, Relay, Reply, Request, RpcCall, Service, replace
from backends.stream import once
from gateway import grpc_stream
from gateway.deadline import seconds
from gateway.grpc_health import Health
from gateway.grpc_server import Server
from gateway.grpc_stream import InferStream
from gateway.respond import Headers
from policies.spec import ListenTls

_INFERENCE = "inference.GRPCInferenceService"
_INFER = f"/{_INFERENCE}/ModelInfer"
# A call that says nothing belongs to nobody, and is held for nothing.
_FIRST_MESSAGE_S = 30.0
# Status and trailing metadata share a header block that clients take up to 8 KiB of: the last of them is ours.
_MAX_STATUS_BYTES = 7 * 1024
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode if code.value[0]}

_T = TypeVar("_T")


class GrpcEdge:
    """Serves `service` to gRPC clients.

    `ready` is asked for health and ServerReady. `grpc_status` turns a failure into code, line and trailing metadata;
    `decision_headers` says what happened on the way to a reply. `refused` is told of failures that `service` never saw.
    `max_message_bytes` bounds what is received, and is asked for each message: it may become less than it was when the
    port was opened, and more than that only for another server. `report` gets every exception that is not a `Failure`:
    its caller sees INTERNAL and nothing of it. `shared` ports are those of other processes of the same user as well.
    With `tls` connections begin by a handshake; `renew` gives those that come later another certificate.
    """

    def __init__(
        self,
        service: Service,
        *,
        now: Callable[[], float],
        max_message_bytes: Callable[[], int],
        ready: Callable[[], bool],
        grpc_status: Callable[[Failure], tuple[int, str, Metadata]],
        decision_headers: Callable[[Reply], Headers],
        refused: Callable[[Failure], None],
        report: Callable[[BaseException], None],
        shared: bool = False,
        tls: ListenTls | None = None,
    ) -> None:
        self._service = service
        self._now = now
        self._max_message_bytes = max_message_bytes
        self._grpc_status = grpc_status
        self._decision_headers = decision_headers
        self._refused = refused
        self._report = report
        self._streams: set[InferStream] = set()
        self._server = Server(max_message_bytes=max_message_bytes(), shared=shared, tls=tls)
        self._health = Health(ready, _INFERENCE)
        self._handlers = {
            _INFER: grpc.unary_unary_rpc_method_handler(self._infer),
            grpc_stream.METHOD: grpc.stream_stream_rpc_method_handler(self._stream),
            f"/{_INFERENCE}/ServerLive": grpc.unary_unary_rpc_method_handler(self._server_live),
            f"/{_INFERENCE}/ServerReady": grpc.unary_unary_rpc_method_handler(self._server_ready),
            "/grpc.health.v1.Health/Check": grpc.unary_unary_rpc_method_handler(self._check),
            "/grpc.health.v1.Health/Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }

    async def start(self, addresses: Sequence[str]) -> int:
        """Listens on `host:port` addresses in the running loop; the first one's port (0 asks for a free one).

        Raises OSError, naming the address, where one cannot be had; then none is listened on.
        """
        return await self._server.start(addresses, self)

    def renew(self, tls: ListenTls) -> None:
        """Connections that come from now on are shown this certificate, and checked by these authorities."""
        self._server.renew(tls)

    def cut(self, failure: Failure) -> None:
        """Ends every stream of inferences with `failure`, as the last of its messages and as its status."""
        for stream in list(self._streams):
            stream.cut(failure)

    async def stop(self, grace: float) -> None:
        """Takes no more calls, and cancels those that still run after `grace` seconds."""
        self._health.stopping.set()
        await self._server.stop(grace)

    def service(self, details: Any) -> Any:
        """gRPC's look-up of a method: its handler, or None for UNIMPLEMENTED."""
        method: str = details.method
        handler = self._handlers.get(method)
        if handler is None and method.startswith("/inference."):
            # Made for each call: the names are the callers' and must not pile up. A unary call is a stream of one.
            return grpc.stream_stream_rpc_method_handler(partial(self._relay, method))
        return handler

    # Handlers

    async def _infer(self, data: bytes, context: Any) -> bytes:
        return await self._guarded(context, self._answer(data, context))

    async def _answer(self, data: bytes, context: Any) -> bytes:
        with self._arriving():
            self._check_size(data)
            model, version, infer = read_request(data)
            content = RpcCall(_INFER, once(data), _sent(context)) if infer.regions else infer
            request = self._request(context, model, version, content, infer.parameters)
        if infer.regions:
            return await self._whole(replace(request, regions=True), context)
        reply = await self._service(request)
        answer = reply.answer
        if answer.headers:
            await _out(context.send_initial_metadata(metadata(answer.headers)))
        context.set_trailing_metadata(metadata((*answer.trailers, *self._decision_headers(reply))))
        return write_reply(answer, model, infer.id)

    async def _whole(self, request: Request, context: Any) -> bytes:
        """The one message that a relayed call is answered with."""
        reply = await self._service(request)
        relay = reply.body
        assert isinstance(relay, Relay)
        context.set_trailing_metadata(metadata(self._decision_headers(reply)))
        await self._begin(context, relay)
        message = relay.body if isinstance(relay.body, bytes) else b""
        if not isinstance(relay.body, bytes):
            async with aclosing(relay.body) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:  # to the end, for the status comes after the message
                    message = chunk
        return message

    async def _stream(self, messages: AsyncIterator[bytes], context: Any) -> None:
        await self._guarded(context, self._streamed(messages, context))

    async def _streamed(self, messages: AsyncIterator[bytes], context: Any) -> None:
        begun = False

        async def began(reply: Reply, relay: Relay) -> None:
            nonlocal begun
            context.set_trailing_metadata(metadata(self._decision_headers(reply)))
            if not begun:
                begun = True
                await self._begin(context, relay)

        async def write(message: bytes) -> None:
            nonlocal begun
            begun = True
            await _out(context.write(message))

        def ended(reply: Reply, relay: Relay) -> None:
            if trailers := relay.trailers():
                context.set_trailing_metadata(metadata((*trailers, *self._decision_headers(reply))))

        stream = InferStream(
            self._service,
            check=self._check_size,
            request=lambda model, version, call: self._request(context, model, version, call, {}),
            metadata=_sent(context),
            write=write,
            began=began,
            ended=ended,
            refused=self._refused,
            now=self._now,
        )
        self._streams.add(stream)
        try:
            await stream.run(messages)
        finally:
            self._streams.discard(stream)

    async def _relay(self, method: str, messages: AsyncIterator[bytes], context: Any) -> None:
        await self._guarded(context, self._relayed(method, messages, context))

    async def _relayed(self, method: str, messages: AsyncIterator[bytes], context: Any) -> None:
        model = version = ""
        messages = self._bounded(messages)
        with self._arriving():
            if names_model(method):
                try:
                    async with asyncio.timeout(_FIRST_MESSAGE_S):
                        first = await anext(messages, None)
                except TimeoutError:
                    raise SlowCaller(f"{method}: no message came within {_FIRST_MESSAGE_S:g} s") from None
                if first is None:
                    raise BadRequest(f"{method}: expected a message, got none")
                model, version = named(method, first)
                messages = _one_model(method, model, version, first, messages)
            request = self._request(context, model, version, RpcCall(method, messages, _sent(context)), {})
        reply = await self._service(request)
        relay = reply.body
        assert isinstance(relay, Relay)
        decision = self._decision_headers(reply)
        context.set_trailing_metadata(metadata(decision))
        if isinstance(relay.body, bytes):
            await self._begin(context, relay)
            await _out(context.write(relay.body))
            return
        try:
            await self._begin(context, relay)
            async for chunk in relay.body:
                await _out(context.write(chunk))
            if trailers := relay.trailers():
                context.set_trailing_metadata(metadata((*trailers, *decision)))
        finally:
            if close := getattr(relay.body, "aclose", None):
                await close()

    def _check_size(self, message: bytes) -> None:
        most = self._max_message_bytes()
        if len(message) > most:
            raise TooLarge(f"request message: expected at most {most} bytes, got {len(message)}")

    async def _bounded(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for message in messages:
            self._check_size(message)
            yield message

    async def _begin(self, context: Any, relay: Relay) -> None:
        if initial := metadata(_text(relay.headers)):
            await _out(context.send_initial_metadata(initial))

    async def _server_live(self, data: bytes, context: Any) -> bytes:
        return self._health.server_live()

    async def _server_ready(self, data: bytes, context: Any) -> bytes:
        return self._health.server_ready()

    async def _check(self, data: bytes, context: Any) -> bytes:
        return await self._guarded(context, self._checked_health(data))

    async def _checked_health(self, data: bytes) -> bytes:
        return self._health.check(data)

    async def _watch(self, data: bytes, context: Any) -> None:
        await self._guarded(context, self._watched(data, context))

    async def _watched(self, data: bytes, context: Any) -> None:
        async with aclosing(self._health.watch(data)) as statuses:
            async for status in statuses:
                await _out(context.write(status))

    # From the wire, and back to it

    def _request(
        self, context: Any, model: str, version: str, content: Infer | RpcCall, parameters: Parameters
    ) -> Request:
        given: dict[str, Any] = {}
        for name, value in context.invocation_metadata() or ():
            if name in given:
                before = given[name]
                value = (*before, value) if isinstance(before, tuple) else (before, value)
            given[name] = value
        return Request(
            model=model,
            version=version,
            content=content,
            deadline=self._deadline(context, given, parameters),
            headers=self._headers(given, content),
            stream=isinstance(content, RpcCall) and content.method == grpc_stream.METHOD,
            arrival=context,
        )

    @staticmethod
    def _headers(given: Mapping[str, Any], content: Infer | RpcCall) -> dict[str, Any]:
        """What the backend is meant to see; a relayed call carries its own, and here only what a hop may change."""
        if isinstance(content, RpcCall):
            return {"traceparent": given["traceparent"]} if "traceparent" in given else {}
        return {k: v for k, v in given.items() if end_to_end(k) and not k.startswith("headrace-")}

    @contextmanager
    def _arriving(self) -> Iterator[None]:
        """A failure in here is one that `service` never saw."""
        try:
            yield
        except Failure as failure:
            self._refused(failure)
            raise

    def _deadline(self, context: Any, given: Mapping[str, Any], parameters: Parameters) -> float:
        """The soonest of what the call, its metadata and its parameters ask for."""
        left = context.time_remaining()
        wanted = given.get("headrace-timeout-ms")
        asked = seconds(", ".join(wanted) if isinstance(wanted, tuple) else wanted, parameters.get("timeout"))
        return self._now() + min(asked, math.inf if left is None else left)

    async def _guarded(self, context: Any, work: Coroutine[Any, Any, _T]) -> _T:
        """The work's result; or else the call ends with a status, whatever was raised."""
        trailing: Metadata = ()
        try:
            return await work
        except Failure as failure:
            number, line, trailing = self._grpc_status(failure)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if isinstance(error, _CallerLeft) or task is None or task.cancelling():
                raise
            self._report(error)  # somebody's task was cancelled, but not this call
            number, line = grpc.StatusCode.INTERNAL.value[0], "internal error"
        except Exception as error:
            self._report(error)
            number, line = grpc.StatusCode.INTERNAL.value[0], "internal error"
        # A lone surrogate in a status would keep it from being written.
        line = _fitting(line.encode(errors="replace").decode())
        await context.abort(_CODES.get(number, grpc.StatusCode.UNKNOWN), line, metadata(trailing))
        raise AssertionError("abort raises")


class _CallerLeft(asyncio.CancelledError):
    """Something could not be written: the call has ended."""


async def _out(writing: Awaitable[None]) -> None:
    try:
        await writing
    except grpc.aio.BaseError as error:
        raise _CallerLeft from error


def _fitting(text: str) -> str:
    """As much of a status' text as fits: what is not printable ASCII takes three bytes for each of its own."""
    size = 0
    for at, char in enumerate(text):
        size += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())
        if size > _MAX_STATUS_BYTES:
            return text[:at]
    return text


def _sent(context: Any) -> Metadata:
    return tuple((k, v) for k, v in metadata(context.invocation_metadata() or ()) if not k.startswith("headrace-"))


def _text(headers: tuple[tuple[bytes, bytes], ...]) -> list[tuple[str, str | bytes]]:
    return [(k.decode("latin-1"), v if k.endswith(b"-bin") else v.decode("latin-1")) for k, v in headers]


async def _one_model(
    method: str, model: str, version: str, first: bytes, rest: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """A call's messages, all for the model whose route the first one opened; BadRequest at one that is not."""
    yield first
    async for message in rest:
        other = named(method, message)
        if other != (model, version):
            raise BadRequest(
                f"{method}: expected all messages of a stream to be for model '{model[:64]}' version '{version[:16]}', "
                f"got '{other[0][:64]}' version '{other[1][:16]}'"
            )
        yield message
