import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from agent.identity.certificate import build_certificate, certificate_pem, check_cert, server_name
from agent.identity.keys import NodeKey
from router_core.ids import id32_of_key, node_id_of
from router_core.trust.certificate import CertFault
from tests.vectors.make import HERE, SEED

KEY = NodeKey.from_seed(SEED)
GOLDEN = (HERE / "good/certificate.der").read_bytes()


def test_the_certificate_is_a_pure_function_of_the_key() -> None:
    assert build_certificate(KEY.private) == GOLDEN
    assert len(GOLDEN) == 497


def test_the_golden_certificate_proves_its_id() -> None:
    assert check_cert(GOLDEN) == id32_of_key(KEY.key32)
    assert certificate_pem(GOLDEN).startswith(b"-----BEGIN CERTIFICATE-----")


@pytest.mark.threat("T25")
@pytest.mark.parametrize("fault", CertFault)
def test_every_fault_has_a_certificate_that_shows_it(fault: CertFault) -> None:
    assert check_cert((HERE / f"bad/cert_{fault.value}.der").read_bytes()) is fault


def test_a_certificate_that_does_not_say_it_is_no_authority_counts_as_one() -> None:
    good = x509.load_der_x509_certificate(GOLDEN)
    builder = (
        x509.CertificateBuilder()
        .serial_number(good.serial_number)
        .subject_name(good.subject)
        .issuer_name(good.issuer)
        .public_key(good.public_key())
        .not_valid_before(good.not_valid_before_utc)
        .not_valid_after(good.not_valid_after_utc)
    )
    for extension in list(good.extensions)[1:]:
        builder = builder.add_extension(extension.value, extension.critical)
    der = builder.sign(KEY.private, None).public_bytes(Encoding.DER)
    assert check_cert(der) is CertFault.IS_CA


@pytest.mark.threat("T17")
def test_no_flipped_byte_of_a_certificate_goes_unseen() -> None:
    for at in range(len(GOLDEN)):
        altered = bytearray(GOLDEN)
        altered[at] ^= 0x01
        assert isinstance(check_cert(bytes(altered)), CertFault)
    for bad in (b"", GOLDEN[:-1], GOLDEN + b"\x00", b"\x30\x80" * 500, b"\x30" * 1_024):
        assert isinstance(check_cert(bad), CertFault)


def test_the_server_name_is_the_id_in_its_own_domain() -> None:
    node_id = node_id_of(id32_of_key(KEY.key32))
    assert server_name(node_id) == f"{node_id}.mesh.internal"
