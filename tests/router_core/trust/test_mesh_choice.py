import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.ids import MeshId
from router_core.trust.mesh_choice import MeshChoice, MeshClaim, choose_mesh

A, B = MeshId(b"a" * 16), MeshId(b"b" * 16)
claims = st.builds(MeshClaim, st.sampled_from([MeshId(bytes([i]) * 16) for i in range(4)]), st.booleans())


@pytest.mark.parametrize(
    ("mine", "theirs", "choice"),
    [
        (MeshClaim(A, False), MeshClaim(A, True), MeshChoice.KEEP),
        (MeshClaim(A, False), MeshClaim(B, False), MeshChoice.KEEP),
        (MeshClaim(B, False), MeshClaim(A, False), MeshChoice.ADOPT),
        (MeshClaim(A, False), MeshClaim(B, True), MeshChoice.ADOPT),
        (MeshClaim(B, True), MeshClaim(A, False), MeshChoice.KEEP),
        (MeshClaim(A, True), MeshClaim(B, True), MeshChoice.MISMATCH),
    ],
)
def test_paired_beats_unpaired_and_of_unpaired_the_smallest_wins(
    mine: MeshClaim, theirs: MeshClaim, choice: MeshChoice
) -> None:
    assert choose_mesh(mine, theirs) is choice


@given(mine=claims, theirs=claims)
def test_both_sides_end_in_one_mesh_or_both_refuse(mine: MeshClaim, theirs: MeshClaim) -> None:
    here, there = choose_mesh(mine, theirs), choose_mesh(theirs, mine)
    assert (here is MeshChoice.MISMATCH) == (there is MeshChoice.MISMATCH)
    if here is not MeshChoice.MISMATCH:
        mesh_here = theirs.mesh_id if here is MeshChoice.ADOPT else mine.mesh_id
        mesh_there = mine.mesh_id if there is MeshChoice.ADOPT else theirs.mesh_id
        assert mesh_here == mesh_there


@given(start=st.lists(claims.filter(lambda claim: not claim.paired), min_size=2, max_size=5), data=st.data())
def test_importing_every_pair_in_any_order_ends_in_one_mesh(
    start: list[MeshClaim], data: st.DataObject
) -> None:
    claim = dict(enumerate(start))
    pairs = [(here, there) for here in claim for there in claim if here != there]
    for _ in range(2):
        for here, there in data.draw(st.permutations(pairs)):
            if choose_mesh(claim[here], claim[there]) is MeshChoice.ADOPT:
                claim[here] = claim[there]
    assert len({each.mesh_id for each in claim.values()}) == 1
