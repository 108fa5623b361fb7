"""Which mesh two nodes end up in when one learns of the other by file.

A mesh id that people have paired under beats one that no one has; of two unpaired ones the smaller wins; two
paired ones that differ are for a human to settle. The rule is symmetric, so both sides choose the same.
"""

from enum import Enum

from msgspec import Struct

from router_core.ids import MeshId


class MeshClaim(Struct, frozen=True, gc=False):
    """The mesh a node says it is in, and whether that id comes from pairing by code."""

    mesh_id: MeshId
    paired: bool


class MeshChoice(Enum):
    """What the claimant of ``mine`` does."""

    KEEP = "keep"
    ADOPT = "adopt"
    MISMATCH = "mesh_mismatch"


def choose_mesh(mine: MeshClaim, theirs: MeshClaim) -> MeshChoice:
    """Keep the own mesh id, adopt theirs, or refuse."""
    if mine.mesh_id == theirs.mesh_id:
        return MeshChoice.KEEP
    if mine.paired and theirs.paired:
        return MeshChoice.MISMATCH
    if mine.paired != theirs.paired:
        return MeshChoice.KEEP if mine.paired else MeshChoice.ADOPT
    return MeshChoice.KEEP if mine.mesh_id < theirs.mesh_id else MeshChoice.ADOPT
