"""Certificates of the tests' own: authorities, and files as an operator would have them."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trustme

from backends.tls import ClientTls
from policies.spec import BackendTls, ListenTls, Pem, Secret

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path

    def pems(self) -> tuple[Pem, Pem]:
        return pem(self.certificate), pem(self.key)

    def become(self, other: Pair) -> None:
        """What is in these files becomes what is in the others': each in one step, as tools replace a file."""
        for ours, theirs in ((self.certificate, other.certificate), (self.key, other.key)):
            fresh = ours.with_suffix(".new")
            fresh.write_bytes(theirs.read_bytes())
            fresh.replace(ours)


def pem(path: Path) -> Pem:
    """A file as a policy has read it."""
    return Pem(str(path), Secret(path.read_text()))


class Authority:
    """An authority whose certificates, and its own in `ca`, are files in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._made = trustme.CA(organization_name=name)
        self._folder = folder
        self.ca = folder / f"{name}.pem"
        self._made.cert_pem.write_to_path(str(self.ca))

    def pair(self, name: str, *hosts: str, expired: bool = False) -> Pair:
        """A certificate for these hosts, or clients."""
        issued = self._made.issue_cert(*hosts or (name,), not_after=LONG_AGO if expired else None)
        made = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        made.certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        made.key.write_bytes(issued.private_key_pem.bytes())
        return made

    def trusting(self, pair: Pair | None = None) -> ssl.SSLContext:
        """A client that trusts this authority, and shows a certificate of its own."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if pair:
            context.load_cert_chain(pair.certificate, pair.key)
        return context


class Place:
    """An authority, servers that it vouches for, and one of whom it knows nothing."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.stranger = Authority(folder, "stranger")
        self.server = self.authority.pair("server", "127.0.0.1", "backend.test")
        self.elsewhere = self.authority.pair("elsewhere", "elsewhere.test")
        self.expired = self.authority.pair("expired", "127.0.0.1", expired=True)
        self.unknown = self.stranger.pair("unknown", "127.0.0.1")
        self.client = self.authority.pair("client")

    def listen(self, pair: Pair, *, mutual: bool = False) -> ListenTls:
        return ListenTls(*pair.pems(), pem(self.authority.ca) if mutual else None)

    def tls(self, pair: Pair | None = None, name: str = "") -> ClientTls:
        ours = pair.pems() if pair else (None, None)
        return ClientTls(BackendTls(pem(self.authority.ca), *ours, server_name=name))
