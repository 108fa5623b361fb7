"""A sealed record opened in one step, as ``receive`` does it in several."""

from router_core.errors import RemoteFault
from router_core.record.crypto import Verifier
from router_core.record.envelope import Header, Sealed, read_header, verify


def unseal(sealed: Sealed, mesh8: bytes, key32: bytes, verifier: Verifier) -> Header:
    """The header of a record that ``key32`` signed; raises ``RemoteFault`` for any other."""
    header = read_header(sealed.signed, mesh8)
    if not verify(sealed, key32, verifier):
        raise RemoteFault("bad_signature")
    return header
