"""Writes the vectors. Run as ``python -m tests.vectors.make``; ``vectors()`` is what the folder must hold."""

import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgpack
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from agent.identity.certificate import build_certificate
from agent.identity.keys import NodeKey
from router_core.ids import id16_of, id32_of_key
from router_core.record import state
from router_core.record.codec import encode
from router_core.record.envelope import Header, seal, sref_of
from router_core.record.state import Kind

HERE = Path(__file__).parent
SEED = bytes(range(32))
MESH8 = bytes.fromhex("0011223344556677")

VOLATILE = state.Volatile(
    flags=state.Flag.SENSOR_STALE,
    level=state.Level.ELEVATED,
    host=state.HostLoad(ram_available_mib=20_480, cpu_external_pct=12, age_ds=3),
    gpus=(
        state.GpuLoad(
            util_pct=41,
            external_util_pct=0,
            vram_free_mib=9_120,
            score_c=38,
            level=state.Level.NONE,
            age_ds=2,
            state=state.GpuState.OK,
            source=1,
        ),
    ),
    resources=(state.ResourceLevel(code=state.ResourceCode.CPU, level=0, score_c=10, age_ds=3),),
    engines=(
        state.EngineLoad(
            state=state.EngineState.READY,
            running=1,
            queued=0,
            slots=4,
            ours=1,
            work_ds=118,
            kv_c=31,
            age_ds=4,
        ),
    ),
    residents=(
        state.ResidentModel(
            model=0, engine=0, state=state.ModelState.RESIDENT, running=1, idle_s=0, mem_mib=5_500, ctx=8_192
        ),
    ),
    seen=(state.SeenRouter(router=b"router-8", inst=77, seq=1_204, accepted=1_199),),
    disp=state.Dispatch(total=88, rps_c=140, work_c=930),
    lost=(state.LostLink(id16=b"lost-node-id-16b", epoch=3, seq=99),),
)

STATIC = state.Static(
    addrs=(state.Address(ip=bytes([192, 168, 1, 20]), mesh_port=7_433, ingress_port=7_434),),
    software=state.Software(version="0.1.0"),
    platform=state.Platform(os=1, arch=1, profile=1, router=1),
    host=state.HostFacts(cpus=16, ram_total_mib=64_000),
    gpus=(state.GpuFacts(uuid8=b"uuid-of8", name="A Card", vram_total_mib=24_564, vendor=1, cc10=89),),
    engines=(
        state.EngineFacts(name="ollama", kind="ollama", version="0.9", dialects=127, slots=4, gpus=(0,)),
    ),
    models=(
        state.ModelFacts(
            name="qwen3:8b", engine=0, digest=bytes(range(32)), family="qwen3", params_m=8_190, quant="Q4_K_M"
        ),
    ),
    models_total=1,
    profiles=(state.ProfileFacts(model=0, engine=0, ctx=8_192, parallel=4, n=31, gen_dtps=912),),
)


def vectors() -> dict[str, bytes]:
    """Every file by its path below this folder."""
    return {**_good(), **_bad(), **_certificates()}


def _good() -> dict[str, bytes]:
    key = NodeKey.from_seed(SEED)
    header = Header(
        kind=Kind.V,
        mesh8=MESH8,
        id16=id16_of(id32_of_key(key.key32)),
        epoch=5,
        inst=0xDEADBEEF,
        seq=42,
        mono_ms=123_456,
        due_ms=2_000,
        sref=sref_of(1, b"the signed bytes of an S"),
        body=encode(VOLATILE),
    )
    appended = [*msgpack.unpackb(encode(VOLATILE)), 7, [[1], None], b"sixteen bytes ok"]
    later = msgpack.unpackb(encode(VOLATILE))
    later[3][0][6] = 200  # a GPU state of tomorrow
    later[4].append([250, 1, 1, 1])  # a resource of tomorrow
    return {
        "good/plain.v.msgpack": encode(VOLATILE),
        "good/empty.v.msgpack": b"\x90",
        "good/appended.v.msgpack": msgpack.packb(appended),
        "good/unknown_codes.v.msgpack": msgpack.packb(later),
        "good/long_integers.v.msgpack": b"\x92\xcf" + bytes(7) + b"\x10\xc0",
        "good/plain.s.msgpack": encode(STATIC),
        "good/shutdown.l.msgpack": encode(state.Leave()),
        "good/record.sealed.msgpack": encode(seal(header, key)),
        "good/certificate.der": build_certificate(key.private),
    }


def _bad() -> dict[str, bytes]:
    return {
        "bad/empty.msgpack": b"",
        "bad/cut.msgpack": encode(VOLATILE)[:-1],
        "bad/trailing.msgpack": encode(VOLATILE) + b"\x00",
        "bad/nested_10000.msgpack": b"\x91" * 10_000 + b"\x90",
        "bad/nested_900.msgpack": b"\x91" * 900 + b"\x90",
        "bad/map.msgpack": b"\x92\x00\x81\x01\x02",
        "bad/map_huge.msgpack": b"\xdf\xff\xff\xff\xff",
        "bad/empty_map_as_list.msgpack": b"\x94\x00\xc0\x90\x80",
        "bad/ext.msgpack": b"\x91\xd4\x01\x00",
        "bad/empty_ext.msgpack": b"\x91\xc7\x00\x05",
        "bad/timestamp.msgpack": b"\x91\xd6\xff\x00\x00\x00\x00",
        "bad/float.msgpack": b"\x91\xcb" + struct.pack(">d", 1.0),
        "bad/nan.msgpack": b"\x91\xcb" + struct.pack(">d", float("nan")),
        "bad/infinity.msgpack": b"\x91\xca" + struct.pack(">f", float("inf")),
        "bad/negative.msgpack": b"\x91\xff",
        "bad/bool.msgpack": b"\x91\xc3",
        "bad/text_for_number.msgpack": b"\x91\xa15",
        "bad/over_u64.msgpack": b"\x91\xcf" + b"\xff" * 8,
        "bad/not_utf8.msgpack": b"\x91\xa2\xc3\x28",
        "bad/surrogate.msgpack": b"\x91\xa3\xed\xa0\x80",
        "bad/array_huge.msgpack": b"\xdd\xff\xff\xff\xff",
        "bad/bin_huge.msgpack": b"\x91\xc6\xff\xff\xff\xff",
        "bad/str_huge.msgpack": b"\x91\xdb\xff\xff\xff\xff",
        "bad/text_129.msgpack": b"\x91\xd9\x81" + b"a" * 129,
        "bad/never_used.msgpack": b"\xc1",
    }


def _certificates() -> dict[str, bytes]:
    made: dict[str, Callable[[], bytes]] = {
        "not_x509": lambda: build_certificate(_key())[:-5],
        "not_ed25519": lambda: _built(_plain(ec.derive_private_key(7, ec.SECP256R1()).public_key())),
        "id_mismatch": lambda: _built(_copied(subject="a" * 52, issuer="a" * 52)),
        "names": lambda: _built(_copied(san="other.mesh.internal")),
        "is_ca": lambda: _built(_copied(ca=True)),
        "extensions": lambda: _built(_copied(more=True)),
        "validity": lambda: _built(_copied(days=30)),
        "bad_signature": _resigned,
        "too_big": lambda: _built(_copied(padding=700)),
    }
    return {f"bad/cert_{fault}.der": make() for fault, make in made.items()}


def _key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(SEED)


def _built(builder: x509.CertificateBuilder) -> bytes:
    return builder.sign(_key(), None).public_bytes(Encoding.DER)


def _resigned() -> bytes:
    der = build_certificate(_key())
    return der[:-1] + bytes([der[-1] ^ 1])


def _plain(public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a")])
    start = datetime(1970, 1, 1, tzinfo=UTC)
    return (
        x509.CertificateBuilder()
        .serial_number(1)
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=1))
    )


def _copied(
    *,
    subject: str | None = None,
    issuer: str | None = None,
    san: str | None = None,
    ca: bool = False,
    more: bool = False,
    days: int | None = None,
    padding: int = 0,
) -> x509.CertificateBuilder:
    """A builder of the good certificate with one thing different."""
    good = x509.load_der_x509_certificate(build_certificate(_key()))

    def named(common_name: str | None) -> x509.Name:
        return (
            good.subject
            if common_name is None
            else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        )

    end = good.not_valid_after_utc if days is None else good.not_valid_before_utc + timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .serial_number(good.serial_number)
        .subject_name(named(subject))
        .issuer_name(named(issuer))
        .public_key(good.public_key())
        .not_valid_before(good.not_valid_before_utc)
        .not_valid_after(end)
    )
    for extension in good.extensions:
        value: x509.ExtensionType = extension.value
        if ca and isinstance(value, x509.BasicConstraints):
            value = x509.BasicConstraints(ca=True, path_length=None)
        if san is not None and isinstance(value, x509.SubjectAlternativeName):
            value = x509.SubjectAlternativeName([x509.DNSName(san)])
        builder = builder.add_extension(value, critical=extension.critical)
    if more or padding:
        oid = x509.ObjectIdentifier("1.3.6.1.4.1.99999.1")
        builder = builder.add_extension(
            x509.UnrecognizedExtension(oid, b"\x04\x00" + bytes(padding)), critical=False
        )
    return builder


def main() -> None:
    for name, content in vectors().items():
        path = HERE / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    main()
