"""What the roster needs to know of a certificate, without parsing X.509: its faults, and the key inside it.

The parsing is the shell's, behind ``CertificateCheck``.
"""

from collections.abc import Callable
from enum import Enum

from router_core.ids import Id32


class CertFault(Enum):
    """Why a certificate is not the one of a node."""

    TOO_BIG = "too_big"
    NOT_X509 = "not_x509"
    NOT_ED25519 = "not_ed25519"
    ID_MISMATCH = "id_mismatch"
    NAMES = "names"
    IS_CA = "is_ca"
    EXTENSIONS = "extensions"
    VALIDITY = "validity"
    BAD_SIGNATURE = "bad_signature"


CertificateCheck = Callable[[bytes], Id32 | CertFault]
"""The id a DER certificate proves, or the first fault found in it."""
