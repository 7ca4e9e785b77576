"""The TLS that callers of the HTTP listener meet; gRPC makes its own of that certificate (gateway/grpc_server.py)."""

from __future__ import annotations

import ssl

from policies.spec import ListenTls
from policies.tls import authorities, own_certificate


def server_context(tls: ListenTls) -> ssl.SSLContext:
    """Shows the certificate of `tls`; asks for the caller's where there are authorities to check it by."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION  # which would cost a caller nothing, and us a handshake each
    own_certificate(context, tls.certificate, tls.key)
    if tls.client_ca:
        authorities(context, tls.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["http/1.1"])
    return context
