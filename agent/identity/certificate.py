"""The certificate of a node: a pure function of its key, so there is exactly one that anybody accepts.

``check_cert`` rebuilds what the certificate must say from the key inside it and compares bytes; the faults only
name the first difference. No expiry, no authority, no founder: validity spans all dates X.509 can write.
"""

from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, SignatureAlgorithmOID

from router_core import limits
from router_core.ids import SPKI_PREFIX, Id32, NodeId, id32_of_key, node_id_of
from router_core.record.crypto import SIGNATURE_BYTES
from router_core.trust.certificate import CertFault

NOT_BEFORE: Final = datetime(1970, 1, 1, tzinfo=UTC)
NOT_AFTER: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_SERIAL_DOMAIN = b"pairmesh/serial/v1\0"
_ANY_SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(32))


def server_name(node_id: NodeId) -> str:
    """The one DNS name in a node's certificate, and the name to dial it by."""
    return f"{node_id}.mesh.internal"


def build_certificate(private: Ed25519PrivateKey) -> bytes:
    """The DER certificate of the node that owns ``private``."""
    return _builder(private.public_key()).sign(private, None).public_bytes(Encoding.DER)


def certificate_pem(der: bytes) -> bytes:
    """A DER certificate as PEM."""
    return x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)


def check_cert(der: bytes) -> Id32 | CertFault:
    """The id that ``der`` proves, or the first fault found in it."""
    if len(der) > limits.CERTIFICATE:
        return CertFault.TOO_BIG
    try:
        found = x509.load_der_x509_certificate(der)
        public = found.public_key()
        if not isinstance(public, Ed25519PublicKey):
            return CertFault.NOT_ED25519
        return _fault(der, found, public) or id32_of_key(public.public_bytes_raw())
    except Exception:  # a stranger's bytes; the parser documents no closed set of errors
        return CertFault.NOT_X509


def _fault(der: bytes, found: x509.Certificate, public: Ed25519PublicKey) -> CertFault | None:
    if found.signature_algorithm_oid != SignatureAlgorithmOID.ED25519:
        return CertFault.NOT_ED25519
    wanted = _builder(public).sign(_ANY_SIGNER, None)
    if found.tbs_certificate_bytes != wanted.tbs_certificate_bytes:
        return _first_difference(found, wanted)
    if der[:-SIGNATURE_BYTES] != wanted.public_bytes(Encoding.DER)[:-SIGNATURE_BYTES]:
        return CertFault.NOT_X509
    try:
        public.verify(der[-SIGNATURE_BYTES:], found.tbs_certificate_bytes)
    except InvalidSignature:
        return CertFault.BAD_SIGNATURE
    return None


def _first_difference(found: x509.Certificate, wanted: x509.Certificate) -> CertFault:
    """Name what differs; anything without a name of its own is an extension or its order."""
    common = [cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME) for cert in (found, wanted)]
    if len(common[0]) == 1 and common[0] != common[1]:
        return CertFault.ID_MISMATCH
    if found.subject != wanted.subject or found.issuer != wanted.issuer:
        return CertFault.NAMES
    if found.serial_number != wanted.serial_number:
        return CertFault.ID_MISMATCH
    if _says_ca(found):
        return CertFault.IS_CA
    if _names(found) != _names(wanted):
        return CertFault.NAMES
    if (found.not_valid_before_utc, found.not_valid_after_utc) != (NOT_BEFORE, NOT_AFTER):
        return CertFault.VALIDITY
    return CertFault.EXTENSIONS


def _says_ca(found: x509.Certificate) -> bool:
    """True for CA:TRUE and for no BasicConstraints at all: either could vouch for another member's name."""
    try:
        return found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return True


def _names(found: x509.Certificate) -> list[x509.GeneralName]:
    try:
        return list(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def _builder(public: Ed25519PublicKey) -> x509.CertificateBuilder:
    key32 = public.public_bytes_raw()
    node_id = node_id_of(id32_of_key(key32))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node_id)])
    digest = sha256(_SERIAL_DOMAIN + SPKI_PREFIX + key32).digest()
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        x509.CertificateBuilder()
        .serial_number(int.from_bytes(digest[:16], "big") & (2**127 - 1))
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name(node_id))]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )
