"""What this node is: key, certificate, mesh id, own admission, as read from ``$STATE/identity`` at start.

First start mints all of it, the key last but one, so that a crash half-way mints again. After that nothing is
ever minted silently: a missing, damaged, exposed or copied identity refuses to start and says what to do.
"""

from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Meta, Struct

from agent.effects.entropy import random_bytes
from agent.identity.certificate import build_certificate, certificate_pem
from agent.identity.keys import NodeKey, mint_key, read_credential, read_key
from agent.store.atomic import read_plain, write_atomic
from agent.store.checked import Damaged, Newer, read_checked_or_last, write_checked
from agent.store.folders import RefuseToStart, too_new
from router_core.ids import Id16, Id32, MeshId, NodeId, id16_of, id32_of_key, node_id_of
from router_core.record.state import U16, U32, Bytes16
from router_core.trust.mesh_choice import MeshClaim
from router_core.trust.statements import FULL_MEMBER

FORMER_MESHES: Final = 8
_HOST_DOMAIN = b"pairmesh/host/v1\0"
_CERT_FILE_MOST = 8_192
_TRACES = ("identity/cert.pem", "epoch", "roster")
"""Any of these says that this is not the first start."""


class MeshFile(Struct, frozen=True, kw_only=True):
    """``identity/mesh``: the mesh, this node's standing in it, and its last admission in former meshes."""

    mesh_id: Bytes16
    paired: bool = False
    admission: U32 = 1
    roles: U16 = int(FULL_MEMBER)
    former: Annotated[dict[bytes, U32], Meta(max_length=FORMER_MESHES)] = {}

    @property
    def claim(self) -> MeshClaim:
        return MeshClaim(MeshId(self.mesh_id), self.paired)

    def moved(self, claim: MeshClaim) -> "MeshFile":
        """This node in another mesh, never below the admission it had there."""
        former = {**self.former, self.mesh_id: self.admission}
        admission = max(self.admission, former.pop(claim.mesh_id, 1))
        return MeshFile(
            mesh_id=claim.mesh_id,
            paired=claim.paired,
            admission=admission,
            roles=self.roles,
            former=dict(list(former.items())[-FORMER_MESHES:]),
        )


class OwnIdentity:
    """Key, certificate and mesh of this node. ``save_mesh`` is the only thing that changes."""

    def __init__(self, folder: Path, key: NodeKey, key_path: Path, der: bytes, mesh: MeshFile) -> None:
        self.key = key
        self.der = der
        self.mesh = mesh
        self.id32: Id32 = id32_of_key(key.key32)
        self.id16: Id16 = id16_of(self.id32)
        self.node_id: NodeId = node_id_of(self.id32)
        self.key_path = key_path
        self.cert_path = folder / "cert.pem"
        self._mesh_path = folder / "mesh"

    def save_mesh(self, mesh: MeshFile) -> None:
        """Store a new standing, then take it on; raises ``OSError`` and then nothing changed."""
        write_checked(self._mesh_path, mesh)
        self.mesh = mesh


def load_identity(
    state: Path,
    machine_id: bytes | None,
    *,
    credential: Path | None = None,
    keep: bool = False,
    new: bool = False,
) -> OwnIdentity:
    """The identity below ``state``, minted if this is the first start.

    ``machine_id`` is the host's, None if it has none (then a copied folder is not noticed). ``credential`` is where
    the service supervisor put the key, if it keeps it. ``keep`` accepts a folder that came from another host,
    ``new`` puts the old identity and its roster aside and mints another.
    Raises ``RefuseToStart``: ``key_not_private``, ``key_unreadable``, ``key_missing``, ``cert_changed``,
    ``mesh_damaged``, ``host_damaged``, ``identity_copied``, ``state_newer``.
    """
    folder = state / "identity"
    if new:
        _put_aside(state)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key_path = folder / "key.pem"
    known = not new and any((state / trace).exists() for trace in _TRACES)
    if credential is not None:
        key, key_path = read_credential(credential)
        if not known:
            _mint_mesh(folder, machine_id)
    elif (stored := read_key(key_path)) is not None:
        key = stored
    else:
        if known:
            raise RefuseToStart(
                "key_missing",
                f"{folder}/key.pem is gone: restore it from a backup, or run with --new-identity and pair again",
            )
        _mint_mesh(folder, machine_id)
        key = mint_key(key_path)
    der = build_certificate(key.private)
    _check_stored_certificate(folder / "cert.pem", der)
    _check_host(folder / "host", machine_id, keep)
    return OwnIdentity(folder, key, key_path, der, _read_mesh(folder / "mesh"))


def read_machine_id(path: Path = Path("/etc/machine-id")) -> bytes | None:
    """The host's machine id, or None if there is none."""
    try:
        return read_plain(path, 256).strip() or None
    except OSError:
        return None


def _mint_mesh(folder: Path, machine_id: bytes | None) -> None:
    write_checked(folder / "mesh", MeshFile(mesh_id=random_bytes(16)))
    if machine_id is not None:
        write_checked(folder / "host", _host_mark(machine_id))


def _put_aside(state: Path) -> None:
    """Rename the old identity and the roster it signed, together under one suffix."""
    suffix = f".former-{random_bytes(4).hex()}"
    for name in ("identity", "roster"):
        if (state / name).exists():
            (state / name).rename(state / (name + suffix))


def _check_stored_certificate(path: Path, der: bytes) -> None:
    try:
        stored = x509.load_pem_x509_certificate(read_plain(path, _CERT_FILE_MOST)).public_bytes(Encoding.DER)
    except (OSError, ValueError):
        stored = None
    if stored is None:
        write_atomic(path, certificate_pem(der), mode=0o644)
    elif stored != der:
        raise RefuseToStart(
            "cert_changed",
            f"{path} is not the certificate of {path.parent}/key.pem: "
            "foreign certificates are not used; remove the file to have it rebuilt",
        )


def _check_host(path: Path, machine_id: bytes | None, keep: bool) -> None:
    if machine_id is None:
        return
    mark = _host_mark(machine_id)
    try:
        stored = None if keep else read_checked_or_last(path, bytes)
    except Newer as newer:
        raise too_new(newer) from None
    except Damaged:
        raise RefuseToStart(
            "host_damaged",
            f"{path} is damaged: if this is the host the identity was made on, run once with --keep-identity",
        ) from None
    if stored is None:
        write_checked(path, mark)
    elif stored != mark:
        raise RefuseToStart(
            "identity_copied",
            f"{path.parent} was made on another host: run with --new-identity for a node of its own, "
            "or with --keep-identity if the other one is gone",
        )


def _host_mark(machine_id: bytes) -> bytes:
    return sha256(_HOST_DOMAIN + machine_id).digest()[:16]


def _read_mesh(path: Path) -> MeshFile:
    try:
        mesh = read_checked_or_last(path, MeshFile)
    except Newer as newer:
        raise too_new(newer) from None
    except Damaged:
        mesh = None
    if mesh is None:
        raise RefuseToStart(
            "mesh_damaged",
            f"{path} cannot be read: restore it from a backup, or run with --new-identity and pair again",
        )
    return mesh
