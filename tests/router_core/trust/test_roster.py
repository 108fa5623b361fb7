from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.identity.certificate import build_certificate, check_cert
from agent.identity.keys import Ed25519Verifier, NodeKey
from router_core.ids import Id32, MeshId, NodeName, id16_of, id32_of_key, mesh8_of
from router_core.record.envelope import Sealed
from router_core.record.membership import Member
from router_core.record.state import Role
from router_core.trust.roster import ADMISSION_STEP, ENDORSERS, MergeVerdict, Roster, RosterEntry, join
from router_core.trust.statements import (
    FULL_MEMBER,
    Endorsement,
    Removal,
    RemovalReason,
    Via,
    endorse,
    remove,
)

MESH = MeshId(b"mesh-id8........")
OTHER_MESH = MeshId(b"another8........")
VERIFIER = Ed25519Verifier()
SHORT = settings(max_examples=60, deadline=None)


@cache
def key(number: int) -> NodeKey:
    return NodeKey.from_seed(bytes([number]) * 32)


@cache
def der(number: int) -> bytes:
    return build_certificate(key(number).private)


def id32(number: int) -> Id32:
    return id32_of_key(key(number).key32)


def e(
    subject: int = 1,
    admission: int = 1,
    *,
    signer: int = 0,
    roles: int = FULL_MEMBER,
    mesh: MeshId = MESH,
    certificate: bytes | None = None,
    name: str = "node",
) -> Endorsement:
    return endorse(
        key(signer),
        mesh8=mesh8_of(mesh),
        by=id16_of(id32(signer)),
        id32=id32(subject),
        admission=admission,
        der=der(subject) if certificate is None else certificate,
        roles=roles,
        via=Via.FILE,
        name=NodeName(name),
    )


def x(subject: int = 1, admission: int = 1, *, signer: int = 0) -> Removal:
    return remove(
        key(signer),
        mesh8=mesh8_of(MESH),
        by=id16_of(id32(signer)),
        id32=id32(subject),
        admission=admission,
        reason=RemovalReason.REMOVED,
    )


def hear(roster: Roster, *statements: Endorsement | Removal) -> tuple[MergeVerdict, Roster]:
    verdict = MergeVerdict.ACCEPTED
    for statement in statements:
        verdict, roster = roster.hear(statement.sealed, VERIFIER, check_cert)
    return verdict, roster


def empty(limit: int = 64) -> Roster:
    return Roster(key(0).key32, MESH, limit=limit)


def test_an_own_endorsement_makes_a_member() -> None:
    verdict, roster = hear(empty(), e(name="box"))
    assert verdict is MergeVerdict.ACCEPTED
    member = Member(id32=id32(1), der=der(1), roles=FULL_MEMBER, admission=1, name=NodeName("box"))
    assert roster.members() == {member.id16: member}
    assert roster.by_der == {der(1): member}


def test_a_roster_never_changes() -> None:
    before = empty()
    hear(before, e())
    assert before.members() == {}
    with pytest.raises(TypeError):
        before.members()[id16_of(id32(1))] = None  # type: ignore[index]  # the refusal is the claim


@pytest.mark.threat("T27")
def test_a_removed_id_is_in_no_look_up_and_its_admission_stays_ended() -> None:
    verdict, roster = hear(empty(), e(), x())
    assert verdict is MergeVerdict.ACCEPTED
    assert (roster.members(), roster.by_der) == ({}, {})
    assert roster.entries[id16_of(id32(1))].removed
    assert hear(roster, e())[0] is MergeVerdict.STALE
    assert hear(roster, x())[0] is MergeVerdict.DUPLICATE
    assert roster.next_admission(id32(1), 1) == 2


def test_a_higher_admission_ends_a_removal() -> None:
    verdict, roster = hear(empty(), e(), x(), e(admission=2))
    assert verdict is MergeVerdict.ACCEPTED
    assert len(roster.members()) == 1
    assert hear(roster, x(admission=1))[0] is MergeVerdict.STALE


@pytest.mark.parametrize(
    ("heard", "then", "verdict"),
    [
        ([], x(), MergeVerdict.UNKNOWN_SUBJECT),
        ([e()], x(admission=2), MergeVerdict.UNKNOWN_SUBJECT),
        ([e()], e(), MergeVerdict.DUPLICATE),
        ([e(admission=2)], e(admission=1), MergeVerdict.STALE),
        ([], e(signer=2), MergeVerdict.NOT_INTRODUCER),
        ([e()], x(signer=1), MergeVerdict.NOT_INTRODUCER),
        ([], e(mesh=OTHER_MESH), MergeVerdict.WRONG_MESH),
        ([], e(certificate=der(2)), MergeVerdict.BAD_CERT),
        ([], e(certificate=b"junk"), MergeVerdict.BAD_CERT),
        ([], e(admission=ADMISSION_STEP + 1), MergeVerdict.MALFORMED),
        ([], replace(e(), sealed=Sealed(b"\x90", bytes(64))), MergeVerdict.MALFORMED),
        ([], replace(e(), sealed=Sealed(e().sealed.signed, bytes(64))), MergeVerdict.BAD_SIGNATURE),
        (
            [e()],
            replace(x(), sealed=Sealed(x().sealed.signed, x(admission=2).sealed.sig)),
            MergeVerdict.BAD_SIGNATURE,
        ),
    ],
)
def test_a_refused_statement_changes_nothing(
    heard: list[Endorsement | Removal], then: Removal | Endorsement, verdict: MergeVerdict
) -> None:
    _, roster = hear(empty(), *heard)
    told, after = hear(roster, then)
    assert told is verdict
    assert after is roster


def test_a_second_id_with_an_equal_first_half_is_refused() -> None:
    _, roster = hear(empty(), e())
    twin = replace(roster.entries[id16_of(id32(1))].endorsements[0], id32=Id32(id32(1)[:16] + bytes(16)))
    twin_roster = Roster(key(0).key32, MESH, {id16_of(id32(1)): RosterEntry(endorsements=(twin,))})
    assert hear(twin_roster, e())[0] is MergeVerdict.ID16_TAKEN


def test_another_certificate_for_a_pinned_id_is_refused() -> None:
    _, roster = hear(empty(), e())
    verdict, after = roster.hear(e(admission=2, certificate=b"other").sealed, VERIFIER, lambda _: id32(1))
    assert verdict is MergeVerdict.CERT_MISMATCH
    assert after is roster


def test_the_roster_is_full_at_its_limit_but_a_member_may_be_admitted_anew() -> None:
    _, roster = hear(empty(limit=2), e(1), e(2))
    assert hear(roster, e(3))[0] is MergeVerdict.FULL
    assert hear(roster, e(1, admission=2))[0] is MergeVerdict.ACCEPTED
    _, roster = hear(roster, x(1))
    assert hear(roster, e(3))[0] is MergeVerdict.ACCEPTED


def test_moving_to_another_mesh_keeps_members_and_removals() -> None:
    _, roster = hear(empty(), e(1, roles=Role.NODE, name="one"), e(2, 5), x(2, 5))
    moved = roster.moved(OTHER_MESH, key(0))
    assert moved.members() == roster.members()
    assert moved.entries[id16_of(id32(2))].removed
    again = Roster(key(0).key32, OTHER_MESH)
    for entry in moved.entries.values():
        said: list[Endorsement | Removal] = [*entry.endorsements]
        for statement in [*said, entry.removal] if entry.removal is not None else said:
            verdict, again = again.hear(statement.sealed, VERIFIER, check_cert)
            assert verdict is MergeVerdict.ACCEPTED
    assert again.entries == moved.entries


@cache
def _endorsement(signer: int, admission: int, roles: int) -> Endorsement:
    return e(1, admission, signer=signer, roles=roles)


@cache
def _removal(signer: int, admission: int) -> Removal:
    return x(1, admission, signer=signer)


@st.composite
def entries(draw: st.DrawFn) -> RosterEntry:
    admission = draw(st.integers(1, 2))
    signers = draw(st.lists(st.integers(2, 8), min_size=1, max_size=ENDORSERS, unique=True))
    single = [
        RosterEntry(endorsements=(_endorsement(signer, admission, draw(st.sampled_from([1, 3, 11]))),))
        for signer in signers
    ]
    entry = single[0]
    for other in single[1:]:
        entry = join(entry, other)
    removal = _removal(draw(st.integers(2, 4)), admission) if draw(st.booleans()) else None
    return replace(entry, removal=removal)


@SHORT
@given(left=entries(), right=entries())
def test_joining_commutes(left: RosterEntry, right: RosterEntry) -> None:
    assert join(left, right) == join(right, left)


@SHORT
@given(one=entries(), two=entries(), three=entries())
def test_joining_associates(one: RosterEntry, two: RosterEntry, three: RosterEntry) -> None:
    assert join(join(one, two), three) == join(one, join(two, three))


@SHORT
@given(one=entries(), two=entries())
def test_joining_is_idempotent_and_absorbs(one: RosterEntry, two: RosterEntry) -> None:
    joined = join(one, two)
    assert join(one, one) == one
    assert join(joined, one) == joined


@SHORT
@given(one=entries(), two=entries())
def test_a_removal_wins_until_a_higher_admission(one: RosterEntry, two: RosterEntry) -> None:
    joined = join(one, two)
    newest = [entry for entry in (one, two) if entry.admission == joined.admission]
    assert joined.admission == max(one.admission, two.admission)
    assert joined.removed == any(entry.removed for entry in newest)


@SHORT
@given(one=entries(), two=entries())
def test_roles_are_what_every_endorser_grants(one: RosterEntry, two: RosterEntry) -> None:
    joined = join(one, two)
    for endorsement in joined.endorsements:
        assert joined.roles & endorsement.roles == joined.roles
    assert len(joined.endorsements) <= ENDORSERS
