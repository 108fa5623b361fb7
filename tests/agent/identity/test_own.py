import os
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from msgspec.structs import replace

from agent.identity.certificate import certificate_pem
from agent.identity.own import FORMER_MESHES, MeshFile, OwnIdentity, load_identity, read_machine_id
from agent.identity.tls import OwnFiles, context
from agent.store.checked import pack, read_checked
from agent.store.folders import RefuseToStart
from agent.store.marks import MarkFiles
from router_core.ids import MeshId
from router_core.trust.mesh_choice import MeshClaim
from router_core.trust.statements import FULL_MEMBER
from tests.vectors.make import HERE

HOST = b"0123456789abcdef"
NAMES = ("key.pem", "cert.pem", "mesh", "host")


def load(state: Path, host: bytes | None = HOST, **options: Any) -> OwnIdentity:
    return load_identity(state, host, **options)


def refusal(state: Path, host: bytes | None = HOST, **options: Any) -> str:
    with pytest.raises(RefuseToStart) as caught:
        load(state, host, **options)
    assert str(state) in str(caught.value)
    return caught.value.reason


def test_the_first_start_mints_a_mesh_of_one(tmp_path: Path) -> None:
    own = load(tmp_path)
    assert (own.mesh.paired, own.mesh.admission, own.mesh.roles) == (False, 1, FULL_MEMBER)
    assert len(own.mesh.mesh_id) == 16
    folder = tmp_path / "identity"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"key.pem": 0o600, "cert.pem": 0o644, "mesh": 0o600, "host": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_every_later_start_finds_the_same_identity(tmp_path: Path) -> None:
    first = load(tmp_path)
    again = load(tmp_path)
    assert (again.node_id, again.der, again.mesh) == (first.node_id, first.der, first.mesh)


@pytest.mark.threat("T26")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_key_others_may_touch_refuses(tmp_path: Path, mode: int) -> None:
    load(tmp_path)
    (tmp_path / "identity/key.pem").chmod(mode)
    assert refusal(tmp_path) == "key_not_private"


@pytest.mark.threat("T26")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs another owner")
def test_a_key_of_another_owner_refuses(tmp_path: Path) -> None:
    load(tmp_path)
    os.chown(tmp_path / "identity/key.pem", 12_345, -1)
    assert refusal(tmp_path) == "key_not_private"


@pytest.mark.threat("T26")
def test_a_key_behind_a_link_refuses(tmp_path: Path) -> None:
    load(tmp_path)
    key = tmp_path / "identity/key.pem"
    key.rename(tmp_path / "elsewhere.pem")
    key.symlink_to(tmp_path / "elsewhere.pem")
    assert refusal(tmp_path) == "key_unreadable"


def test_a_key_of_another_kind_refuses(tmp_path: Path) -> None:
    load(tmp_path)
    private = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "identity/key.pem").write_bytes(pem)
    assert refusal(tmp_path) == "key_unreadable"


@pytest.mark.parametrize("trace", ["identity/cert.pem", "epoch", "roster"])
def test_a_lost_key_is_never_minted_again_silently(tmp_path: Path, trace: str) -> None:
    load(tmp_path)
    for name in ("key.pem", "cert.pem"):
        (tmp_path / "identity" / name).unlink()
    (tmp_path / trace).touch()
    assert refusal(tmp_path) == "key_missing"


@pytest.mark.threat("T48")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_cut_at_any_byte_refuses_or_heals_but_never_makes_a_new_identity(
    tmp_path: Path, name: str
) -> None:
    first = load(tmp_path)
    path = tmp_path / "identity" / name
    whole, mode = path.read_bytes(), path.stat().st_mode
    outcomes = set()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        path.chmod(mode)
        try:
            again = load(tmp_path)
            outcomes.add("healed")
            assert (again.node_id, again.mesh) == (first.node_id, first.mesh)
        except RefuseToStart as refused:
            outcomes.add(refused.reason)
        path.with_name(name + ".last").unlink(missing_ok=True)
    expected = {
        "key.pem": {"key_unreadable", "healed"},
        "cert.pem": {"healed"},
        "mesh": {"mesh_damaged"},
        "host": {"host_damaged"},
    }
    assert outcomes <= expected[name]
    assert outcomes & {"key_unreadable", "mesh_damaged", "host_damaged"} or name == "cert.pem"


@pytest.mark.threat("T48")
def test_a_damaged_mesh_file_is_replaced_by_the_one_before(tmp_path: Path) -> None:
    own = load(tmp_path)
    before = own.mesh
    own.save_mesh(before.moved(MeshClaim(MeshId(bytes(16)), False)))
    (tmp_path / "identity/mesh").write_bytes(b"PMF1")
    assert load(tmp_path).mesh == before


@pytest.mark.parametrize("name", ["mesh", "host"])
def test_an_identity_of_a_newer_version_refuses_and_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    first = load(tmp_path)
    path = tmp_path / "identity" / name
    before = path.read_bytes()
    newer = pack(b"\x93\x01\x02\x03", 2)
    path.write_bytes(newer)
    with pytest.raises(RefuseToStart, match="newer version") as refused:
        load(tmp_path)
    assert refused.value.reason == "state_newer"
    assert path.read_bytes() == newer
    path.write_bytes(before)
    assert load(tmp_path).node_id == first.node_id


def test_a_crash_half_way_through_the_first_start_mints_again(tmp_path: Path) -> None:
    load(tmp_path)
    for name in ("key.pem", "cert.pem"):
        (tmp_path / "identity" / name).unlink()
    assert load(tmp_path).mesh == read_checked(tmp_path / "identity/mesh", MeshFile)


@pytest.mark.threat("T25")
def test_a_certificate_with_another_validity_is_clearly_refused(tmp_path: Path) -> None:
    load(tmp_path)
    pem = certificate_pem((HERE / "bad/cert_validity.der").read_bytes())
    (tmp_path / "identity/cert.pem").write_bytes(pem)
    assert refusal(tmp_path) == "cert_changed"


@pytest.mark.threat("T26")
def test_a_folder_copied_to_another_host_refuses_until_someone_decides(tmp_path: Path) -> None:
    first = load(tmp_path)
    assert refusal(tmp_path, b"another host") == "identity_copied"
    kept = load(tmp_path, b"another host", keep=True)
    assert kept.node_id == first.node_id
    assert load(tmp_path, b"another host").node_id == first.node_id
    assert refusal(tmp_path) == "identity_copied"


def test_a_new_identity_puts_the_old_one_and_its_roster_aside(tmp_path: Path) -> None:
    first = load(tmp_path)
    (tmp_path / "roster").mkdir()
    MarkFiles(tmp_path).save_epoch(7)
    second = load(tmp_path, b"another host", new=True)
    assert second.node_id != first.node_id
    assert second.mesh.mesh_id != first.mesh.mesh_id
    assert load(tmp_path, b"another host").node_id == second.node_id
    names = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert names == ["epoch", "identity", "identity.former", "roster.former"]


def test_without_a_machine_id_the_host_is_not_checked(tmp_path: Path) -> None:
    first = load(tmp_path, None)
    assert not (tmp_path / "identity/host").exists()
    assert load(tmp_path).node_id == first.node_id
    assert load(tmp_path, None).node_id == first.node_id


def test_the_machine_id_is_read_without_its_newline(tmp_path: Path) -> None:
    assert read_machine_id(tmp_path / "none") is None
    (tmp_path / "machine-id").write_bytes(b"abc\n")
    assert read_machine_id(tmp_path / "machine-id") == b"abc"


def test_moving_remembers_the_last_admission_of_former_meshes() -> None:
    meshes = [MeshClaim(MeshId(bytes([i]) * 16), False) for i in range(12)]
    mesh = MeshFile(mesh_id=bytes([99]) * 16, admission=5)
    mesh = mesh.moved(meshes[0])
    assert mesh.former == {bytes([99]) * 16: 5}
    assert replace(mesh, admission=1).moved(MeshClaim(MeshId(bytes([99]) * 16), True)).admission == 5
    for claim in meshes[1:]:
        mesh = mesh.moved(claim)
    assert len(mesh.former) == FORMER_MESHES
    assert meshes[0].mesh_id not in mesh.former


def test_a_key_in_a_credential_is_used_and_never_stored(tmp_path: Path) -> None:
    kept = load(tmp_path / "elsewhere").key_path
    own = load(tmp_path / "state", credential=kept)
    assert not (tmp_path / "state/identity/key.pem").exists()
    assert own.key_path.read_bytes() == kept.read_bytes()
    context(ssl.PROTOCOL_TLS_SERVER, OwnFiles(own.cert_path, own.key_path), ())
    again = load(tmp_path / "state", credential=kept)
    assert (again.node_id, again.mesh) == (own.node_id, own.mesh)
    assert refusal(tmp_path / "state") == "key_missing"


def test_a_credential_without_a_key_refuses(tmp_path: Path) -> None:
    (tmp_path / "credential").write_bytes(b"no key")
    for path in (tmp_path / "credential", tmp_path / "none"):
        with pytest.raises(RefuseToStart) as caught:
            load(tmp_path / "state", credential=path)
        assert caught.value.reason == "key_unreadable"
