"""Mutual TLS 1.3 in which the members' certificates are the trust anchors.

``ssl`` has no verify callback, and a server that does not demand a certificate never sees one; so every change of
the roster builds both contexts anew, off the loop, and only the newest build is installed. No session tickets
(a removed node would resume), no key log, no names of authorities. What a certificate proves is compared again
with the roster by whoever uses the connection.
"""

import asyncio
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from agent.identity.certificate import server_name


class OwnFiles(Struct, frozen=True):
    """PEM files of the own certificate and key."""

    cert_path: Path
    key_path: Path


class RosterContext(ssl.SSLContext):
    """The one context a server is given; every handshake uses what ``current`` is by then. Loads nothing itself."""

    current: ssl.SSLContext

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self.current.wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        raise NotImplementedError("a roster context serves asyncio alone")


def context(side: int, own: OwnFiles, anchors: Iterable[bytes]) -> ssl.SSLContext:
    """A context of ``side`` (``ssl.PROTOCOL_TLS_SERVER`` or ``_CLIENT``) that trusts exactly ``anchors`` (DER).

    Milliseconds of work: run it in a thread. Without anchors nobody passes.
    """
    built = ssl.SSLContext(side)
    built.minimum_version = built.maximum_version = ssl.TLSVersion.TLSv1_3
    built.verify_mode = ssl.CERT_REQUIRED
    built.verify_flags |= ssl.VERIFY_X509_STRICT
    if side == ssl.PROTOCOL_TLS_SERVER:
        built.num_tickets = 0
    else:
        built.check_hostname = True
    built.load_cert_chain(own.cert_path, own.key_path)
    if cadata := b"".join(anchors):
        built.load_verify_locations(cadata=cadata)
    return built


class TlsContexts:
    """The current pair of contexts. ``build`` counts installations: a pool keyed by it retires with the roster."""

    def __init__(self, own: OwnFiles) -> None:
        """Contexts that nobody passes, until the first ``rebuild``. Takes a few milliseconds."""
        self._own = own
        self._asked = 0
        self.build = 0
        self.server = RosterContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.current = context(ssl.PROTOCOL_TLS_SERVER, own, ())
        self._client = context(ssl.PROTOCOL_TLS_CLIENT, own, ())

    @property
    def client(self) -> ssl.SSLContext:
        """For dialling now, with ``server_hostname=server_name(node_id)``; do not keep it."""
        return self._client

    async def rebuild(self, anchors: Iterable[bytes]) -> bool:
        """Build both contexts in a thread and install them, unless a newer build was asked for meanwhile."""
        self._asked += 1
        asked, ders = self._asked, tuple(anchors)
        server, client = await asyncio.to_thread(self._pair, ders)
        if asked != self._asked:
            return False
        self.server.current, self._client = server, client
        self.build += 1
        return True

    def _pair(self, ders: tuple[bytes, ...]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return (
            context(ssl.PROTOCOL_TLS_SERVER, self._own, ders),
            context(ssl.PROTOCOL_TLS_CLIENT, self._own, ders),
        )


def peer_der(transport: asyncio.BaseTransport | None) -> bytes | None:
    """The certificate the other end of a TLS transport presented, or None."""
    connection = transport.get_extra_info("ssl_object") if transport is not None else None
    return connection.getpeercert(binary_form=True) if connection is not None else None


def is_pinned(transport: asyncio.BaseTransport | None, der: bytes) -> bool:
    """After dialling: True if the other end presented exactly the certificate pinned for the id dialled."""
    return peer_der(transport) == der


__all__ = ["OwnFiles", "RosterContext", "TlsContexts", "context", "is_pinned", "peer_der", "server_name"]
