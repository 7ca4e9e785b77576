"""Certificates, keys and authorities: PEM files that are read with the policy, and tried as soon as they are read.

What they say is part of the policy. So a file that changes is another policy, one that does not fit is refused like any
other mistake, and nothing is ever loaded that was not tried. A message tells a file's name and never what it says.
"""

from __future__ import annotations

import os
import re
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from policies.address import host_name
from policies.files import Files
from policies.problem import Place, PolicyError, Wrong, clip
from policies.reader import Scalar
from policies.schema import parsed, path, section
from policies.source import Leaf, Node
from policies.spec import BackendTls, ListenTls, Pem, Secret

_ENCRYPTED = re.compile(r"ENCRYPTED PRIVATE KEY-----|^Proc-Type: 4,ENCRYPTED", re.MULTILINE)


def own_certificate(context: ssl.SSLContext, certificate: Pem, key: Pem) -> None:
    """Has `context` show this certificate. Raises Wrong."""
    if _ENCRYPTED.search(key.text.value):
        raise Wrong("the key is encrypted, and nobody is there to be asked for a passphrase", "decrypt it", "key")
    with _file(certificate.text.value) as chain, _file(key.text.value) as secret:
        try:
            context.load_cert_chain(chain, secret, password=_nobody)
        except (ssl.SSLError, ValueError) as error:
            raise _misfit(certificate, key, error) from None


def authorities(context: ssl.SSLContext, trusted: Pem) -> None:
    """Has `context` trust these authorities. Raises Wrong."""
    try:
        context.load_verify_locations(cadata=trusted.text.value)
    except (ssl.SSLError, ValueError):
        raise Wrong("no certificate is in the file", "expected PEM: -----BEGIN CERTIFICATE-----") from None


def _misfit(certificate: Pem, key: Pem, error: Exception) -> Wrong:
    """Which of the two it is that cannot be used."""
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return Wrong("the key is not that of the certificate", "write both files of one pair", "key")
    try:
        authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate)
    except Wrong as wrong:
        return Wrong(wrong.wrong, wrong.right, "certificate")
    if isinstance(error, ssl.SSLError) and error.reason and error.reason.endswith(("TOO_SMALL", "TOO_WEAK")):
        return Wrong("the certificate is too weak to be used", "write one with a longer key", "certificate")
    return Wrong("no private key is in the file", "expected PEM: -----BEGIN PRIVATE KEY-----", "key")


def _nobody() -> str:
    raise ValueError("no passphrase")


@contextmanager
def _file(said: str) -> Iterator[str]:
    """The name of a file that says this, for a library that reads files alone; on Linux it is in memory only."""
    if sys.platform == "linux":
        with os.fdopen(os.memfd_create("headrace"), "w") as file:
            file.write(said)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(said)
            file.flush()
            yield file.name


def _pem(what: str) -> Scalar[Pem]:
    """A file's name, which becomes what the file says."""
    named = path()

    def read(node: Node, at: Place) -> Pem:
        name = named(node, at)
        assert isinstance(node, Leaf)
        try:
            # As it is written, by which a posted policy's names are judged; kept is where that is, from everywhere.
            return Pem(name, Secret((at.files or Files()).text(Path(at.file).parent / node.text)))
        except PolicyError as error:
            problem = error.problems[0]
            # The name as it is written: what a variable stands for is not for messages.
            raise Wrong(f"'{clip(node.raw)}' {problem.wrong}", problem.right) from None

    return Scalar(read=read, expected=f"the name of {what}", form=named.form)


_CERTIFICATE = _pem("a PEM file with a certificate, and those between it and its authority")
_KEY = _pem("a PEM file with the certificate's private key, not encrypted")
_CA = _pem("a PEM file with the certificates of authorities")


def _of_listeners(made: ListenTls) -> Iterator[Wrong]:
    yield from _tried(made.certificate, made.key, "client_ca", made.client_ca)


def _of_a_backend(made: BackendTls) -> Iterator[Wrong]:
    if (made.certificate is None) != (made.key is None):
        there, missing = ("certificate", "key") if made.key is None else ("key", "certificate")
        yield Wrong(f"'{there}' without '{missing}'", "write both, or neither", there)
        return
    yield from _tried(made.certificate, made.key, "ca_file", made.ca_file)


def _tried(certificate: Pem | None, key: Pem | None, name: str, trusted: Pem | None) -> Iterator[Wrong]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if certificate and key:
            own_certificate(context, certificate, key)
    except Wrong as wrong:
        yield wrong
    try:
        if trusted:
            authorities(context, trusted)
    except Wrong as wrong:
        yield Wrong(wrong.wrong, wrong.right, name)


LISTEN_TLS = section(
    ListenTls,
    {
        "certificate": _CERTIFICATE,
        "key": _KEY,
        "client_ca": _CA.absent("callers need no certificate"),
    },
    _of_listeners,
)

BACKEND_TLS = section(
    BackendTls,
    {
        "ca_file": _CA.absent("the authorities that the system trusts"),
        "certificate": _CERTIFICATE.absent("servers are shown none"),
        "key": _KEY.absent("servers are shown none"),
        "server_name": parsed("a host's name", host_name).absent("the host of the address"),
    },
    _of_a_backend,
)
