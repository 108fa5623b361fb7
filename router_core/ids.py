"""Names of nodes and meshes, and the constructors that parse them.

A node *is* the SHA-256 of its public key. ``Id32`` is that hash, ``NodeId`` its base32 form for people and
files, ``Id16`` its first half and the key on the wire, ``Id8`` a short mark where a clash is harmless.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final, NewType

Id32 = NewType("Id32", bytes)
Id16 = NewType("Id16", bytes)
Id8 = NewType("Id8", bytes)
NodeId = NewType("NodeId", str)
NodeName = NewType("NodeName", str)
MeshId = NewType("MeshId", bytes)
"""16 random bytes, the identity of a mesh; its first 8 are ``mesh8``."""

_NODE_ID = re.compile(r"[a-z2-7]{51}[aq]")
_NODE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_MARK = re.compile(r"[a-z2-7]{4,52}")
SHORTEST_PREFIX = 8
SHORTEST_MARK: Final = 4
"""Of an id, so many characters at least tell nodes of one name apart."""

SPKI_PREFIX: Final = bytes.fromhex("302a300506032b6570032100")
"""DER of a SubjectPublicKeyInfo up to the 32 bytes of an Ed25519 key (RFC 8410)."""


def id32_of_key(key32: bytes) -> Id32:
    """The id of the node that owns the raw Ed25519 public key ``key32``."""
    return Id32(sha256(SPKI_PREFIX + key32).digest())


def node_id_of(id32: Id32) -> NodeId:
    """The 52-character lower-case base32 form of a 32-byte id."""
    return NodeId(base64.b32encode(id32).decode("ascii").rstrip("=").lower())


def parse_node_id(text: str) -> NodeId | None:
    """``text`` as a canonical node id, or None."""
    return NodeId(text) if _NODE_ID.fullmatch(text) else None


def id32_of(node_id: NodeId) -> Id32:
    """The 32 bytes behind a canonical node id."""
    return Id32(base64.b32decode(node_id.upper() + "===="))


def id16_of(id32: Id32) -> Id16:
    """The first 16 bytes of a node's id."""
    return Id16(id32[:16])


def id8_of(id16: bytes) -> Id8:
    """The first 8 bytes of a node's id."""
    return Id8(id16[:8])


def mesh8_of(mesh_id: MeshId) -> bytes:
    """The first 8 bytes of a mesh id."""
    return mesh_id[:8]


def short_id(node_id: NodeId) -> str:
    """``xxxx-xxxx-xxxx-xxxx``, for display."""
    return "-".join(node_id[i : i + 4] for i in range(0, 16, 4))


def parse_node_name(text: str) -> NodeName | None:
    """``text`` as a node name (``[a-z0-9][a-z0-9-]{0,31}``), or None."""
    return NodeName(text) if _NODE_NAME.fullmatch(text) else None


def parse_marked_name(text: str) -> tuple[NodeName, str] | None:
    """``name`` or ``name~xxxx``: the name and the mark, which is empty if there is none; None if it is neither."""
    plain, tilde, mark = text.partition("~")
    name = parse_node_name(plain)
    if name is None or (tilde and not _MARK.fullmatch(mark)):
        return None
    return name, mark


def labels_of(names: Mapping[NodeId, NodeName]) -> dict[NodeId, str]:
    """What each node is called where it must not be mistaken for another: its name, with as many first characters of
    its id behind it as it takes if others share the name."""
    sharers: dict[NodeName, list[NodeId]] = {}
    for node_id, name in names.items():
        sharers.setdefault(name, []).append(node_id)
    labels: dict[NodeId, str] = {}
    for name, ids in sharers.items():
        length = _telling_length(ids)
        labels |= {each: f"{name}~{each[:length]}" if length else name for each in ids}
    return labels


def _telling_length(ids: Sequence[NodeId]) -> int:
    """How many first characters tell ``ids`` apart; 0 if there is but one."""
    if len(ids) == 1:
        return 0
    length = SHORTEST_MARK
    while len({each[:length] for each in ids}) < len(ids):
        length += 1
    return length


def matches_prefix(node_id: NodeId, prefix: str) -> bool:
    """True if ``prefix`` (dashes ignored, at least 8 characters) abbreviates ``node_id``."""
    plain = prefix.replace("-", "").lower()
    return len(plain) >= SHORTEST_PREFIX and node_id.startswith(plain)
