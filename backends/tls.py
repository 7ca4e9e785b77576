"""How a backend's servers are called by TLS: one context for HTTP, one set of credentials for gRPC.

Both are made when they are first needed, in a thread: reading the system's authorities takes longer than the event loop
may stand still. There is no way to leave a certificate unchecked.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from pathlib import Path
from typing import TypeGuard

from backends.secured import Secured
from backends.tcp import reason
from policies.spec import BackendTls, Pem
from policies.tls import authorities, own_certificate


class ClientTls:
    """The TLS of one backend, for the clients of all its endpoints. `server_name` is empty for the address' host."""

    def __init__(self, spec: BackendTls) -> None:
        self.server_name = spec.server_name
        self._spec = spec
        self._context: ssl.SSLContext | None = None
        self._roots = b""

    async def connect(self, protocol: asyncio.Protocol, address: str, port: int, host: str) -> None:
        """Connects `protocol` to an address of `host`, for HTTP/1.1. Raises OSError (ssl.SSLError included)."""
        if self._context is None:
            self._context = await asyncio.to_thread(client_context, self._spec, "http/1.1")
        context, name = self._context, self.server_name or host.removesuffix(".")
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Exception | None] = loop.create_future()

        def shaken(_: Secured, error: Exception | None) -> None:
            if not over.done():
                over.set_result(error)

        _, secured = await loop.create_connection(
            lambda: Secured(protocol, context, server_name=name, shaken=shaken), address, port
        )
        try:
            error = await over
        except BaseException:
            secured.abort()
            raise
        if error is not None:
            raise error

    async def pems(self) -> tuple[bytes, bytes | None, bytes | None]:
        """Authorities, our key and our certificate, as gRPC takes them. Raises OSError without authorities."""
        if not self._roots:
            ca_file = self._spec.ca_file
            self._roots = ca_file.text.value.encode() if ca_file else await asyncio.to_thread(_of_the_system)
        return self._roots, _said(self._spec.key), _said(self._spec.certificate)


def client_context(spec: BackendTls, application: str) -> ssl.SSLContext:
    """For calls of a protocol, named as TLS names it (`http/1.1`, `h2`). Checks certificates and whom they name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if spec.ca_file:
        authorities(context, spec.ca_file)
    else:
        context.load_default_certs()
    if spec.certificate and spec.key:
        own_certificate(context, spec.certificate, spec.key)
    context.set_alpn_protocols([application])
    return context


def explained(error: Exception) -> str:
    """Why there is no connection, or no more, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"TLS failed: {error.reason.replace('_', ' ').lower()}"
    return reason(error)


def explained_by_grpc(text: str, name: str) -> str:
    """The same of what gRPC says of a connection to `name`."""
    if found := re.search(r"CERTIFICATE_VERIFY_FAILED: (.+?)(?:: OK)?$", text):
        return f"certificate verify failed: {found[1]}"
    if "Hostname Verification" in text:
        return f"certificate verify failed: certificate is not valid for '{name}'"
    if text.endswith("Socket closed"):
        return f"{text}; so ends a server that refuses a client's certificate, or wants one"
    return text


def refused(error: Exception | None) -> TypeGuard[ssl.SSLError]:
    """Whether it is a peer's alert that it does not take us in; TLS 1.3 has it after the client's own handshake."""
    why = getattr(error, "reason", None) or ""
    return isinstance(error, ssl.SSLError) and "ALERT" in why and ("CERTIFICATE" in why or "UNKNOWN_CA" in why)


def _said(pem: Pem | None) -> bytes | None:
    return pem.text.value.encode() if pem else None


def _of_the_system() -> bytes:
    """What OpenSSL trusts by default (SSL_CERT_FILE and SSL_CERT_DIR included), which gRPC would not."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile:
        return Path(paths.cafile).read_bytes()
    found = sorted(Path(paths.capath).glob("*.[0-9]")) if paths.capath else []
    if not found:
        raise OSError("the system names no authorities to trust: write `tls: {ca_file: FILE}`")
    return b"\n".join(path.read_bytes() for path in found)
