"""The server that the gRPC edge is served by: its options, its ports, and the certificate that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from policies.spec import ListenTls

# The shortest keep-alive that clients are told to use is 10 s; half of it, so that no jitter makes an abuse of it.
_PING_MS = 5_000
# A connection that does not begin to speak HTTP/2 is not held for longer.
_PREFACE_MS = 10_000
# Calls that wait for the event loop. gRPC cancels some beyond 1,000 and all beyond 3,000 without a word; who is too
# many is for `limits.in_flight` to say.
_PENDING = 1 << 16
_MAX_METADATA_BYTES = 64 * 1024


class Server:
    """Serves one generic handler. `shared` ports are those of other processes of the same user as well.

    `max_message_bytes` bounds each message, decompressed. With `tls` connections begin by a handshake.
    """

    def __init__(self, *, max_message_bytes: int, shared: bool, tls: ListenTls | None) -> None:
        self._tls = tls
        self._renewed: Any = None  # what the next handshake is to bring into use
        self._server: Any = None
        self._options = (
            ("grpc.max_receive_message_length", max_message_bytes),  # of decompressed ones, too
            ("grpc.max_send_message_length", -1),  # an answer was bounded when it came from the backend
            # As over HTTP; gRPC's own is 8 KiB, beyond which it refuses some calls and takes others.
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.so_reuseport", int(shared)),  # else off: a port in use must not be shared by accident
            # Clients may ask whether we live, idle ones too; one that does not answer us is gone.
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.server_handshake_timeout_ms", _PREFACE_MS),
            ("grpc.server.max_pending_requests", _PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _PENDING),
        )

    async def start(self, addresses: Sequence[str], handler: Any) -> int:
        """Listens on `host:port` addresses in the running loop; the first one's port (0 asks for a free one).

        Raises OSError, naming the address, where one cannot be had; then none is listened on.
        """
        server = grpc.aio.server(options=self._options)
        server.add_generic_rpc_handlers((handler,))
        ports: list[int] = []
        for address in addresses:
            try:
                if self._tls is None:
                    port = server.add_insecure_port(address)
                else:
                    port = server.add_secure_port(address, self._credentials(self._tls))
            except RuntimeError:
                port = 0
            if not port:
                await server.stop(None)
                raise OSError(f"cannot listen on {address} (gRPC): in use, or not an address of this machine")
            ports.append(port)
        await server.start()
        self._server = server
        return ports[0]

    def renew(self, tls: ListenTls) -> None:
        """Connections that come from now on are shown this certificate, and checked by these authorities."""
        self._renewed = _shown(tls)

    async def stop(self, grace: float) -> None:
        """Takes no more calls, and cancels those that still run after `grace` seconds. Nothing before a start."""
        if self._server is not None:
            await self._server.stop(grace)

    def _credentials(self, tls: ListenTls) -> Any:
        def renewed() -> Any:
            """Asked at each handshake; None: what there is goes on."""
            found, self._renewed = self._renewed, None
            return found

        return grpc.dynamic_ssl_server_credentials(
            _shown(tls), renewed, require_client_authentication=tls.client_ca is not None
        )


def _shown(tls: ListenTls) -> Any:
    """A certificate as gRPC takes it."""
    pair = tls.key.text.value.encode(), tls.certificate.text.value.encode()
    authorities = tls.client_ca.text.value.encode() if tls.client_ca else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)
