"""The key inside a certificate, and the values of a policy."""

from datetime import UTC, datetime, timedelta
from hashlib import sha256

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from router_core.errors import LocalMisuse
from router_core.ids import Id32, NodeName
from router_core.mesh.records.keys import key_of
from router_core.mesh.records.origin import Origin
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Member


def member(der: bytes, id32: bytes) -> Member:
    return Member(id32=Id32(id32), der=der, roles=3, admission=1, name=NodeName("n"))


def certificate() -> tuple[bytes, bytes, bytes]:
    """DER, SubjectPublicKeyInfo and raw key of a fresh certificate."""
    private = Ed25519PrivateKey.generate()
    public = private.public_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "n")])
    start = datetime(2024, 1, 1, tzinfo=UTC)
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(public)
    built = built.serial_number(1).not_valid_before(start).not_valid_after(start + timedelta(days=1))
    der = built.sign(private, None).public_bytes(Encoding.DER)
    spki = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return der, spki, public.public_bytes(Encoding.Raw, PublicFormat.Raw)


def test_the_key_of_a_real_certificate_is_found_by_the_hash_that_names_its_node() -> None:
    der, spki, raw = certificate()
    assert key_of(member(der, sha256(spki).digest())) == raw


def test_a_decoy_key_in_the_certificate_is_passed_over() -> None:
    der, spki, raw = certificate()
    _, decoy, _ = certificate()
    assert key_of(member(decoy + der, sha256(spki).digest())) == raw


def test_a_certificate_without_its_members_key_is_our_own_misuse() -> None:
    der, _, _ = certificate()
    stranger = member(der, bytes(32))
    assert key_of(stranger) is None
    with pytest.raises(LocalMisuse, match="does not hold its key"):
        Origin(stranger, MeshPolicy(), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"backoff_max_s": 0},
        {"gone_min_s": 9},
        {"gone_redial_s": 3_601},
        {"gone_redial_s": -1},
        {"backoff_max_s": 1.5},
    ],
)
def test_an_impossible_policy_is_refused_with_its_value_and_limits(wrong: dict[str, int]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(LocalMisuse, match=rf"{name} is {value!r}, allowed"):
        MeshPolicy(**wrong)


def test_seconds_of_the_settings_become_milliseconds() -> None:
    policy = MeshPolicy(backoff_max_s=3, gone_min_s=20, gone_redial_s=5)
    assert (policy.backoff_max_ms, policy.gone_min_ms, policy.gone_redial_ms) == (3_000, 20_000, 5_000)
