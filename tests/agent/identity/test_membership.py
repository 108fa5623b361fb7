import asyncio
import ssl
from pathlib import Path

import pytest

from agent.identity.membership import AddCode, RemoveCode
from agent.store.members import PeerFiles
from router_core.ids import short_id
from router_core.record.state import Role
from router_core.trust.statements import FULL_MEMBER
from tests.support.members import Node, introduce, start_node
from tests.support.until import until


async def nodes(tmp_path: Path, *names: str) -> list[Node]:
    return [await start_node(tmp_path / name, name) for name in names]


def ids(node: Node) -> set[bytes]:
    return set(node.membership.members)


async def test_adding_a_file_admits_its_node_everywhere_at_once(tmp_path: Path) -> None:
    here, there = await nodes(tmp_path, "here", "there")
    before = here.contexts.build
    told = []
    here.membership.subscribe_addresses(lambda node_id, addresses: told.append((node_id, addresses)))
    added = await here.membership.add(there.file("192.168.1.9"), there.own.node_id)
    assert (added.code, added.node_id) == (AddCode.ADDED, there.own.node_id)
    member = here.membership.members[there.own.id16]
    assert (member.der, member.name, member.roles) == (there.own.der, "there", FULL_MEMBER)
    assert here.membership.by_der == {there.own.der: member}
    assert here.contexts.build == before + 1
    assert here.contexts.client.cert_store_stats()["x509"] == 1
    assert here.contexts.server.current.cert_store_stats()["x509"] == 1
    assert here.changes == [(here.membership.members, here.membership.mesh_id)]
    (address,) = PeerFiles(tmp_path / "here").load()[there.own.node_id]
    assert told == [(there.own.node_id, (address,))]
    assert (address.ip, address.mesh_port, address.ingress_port) == (bytes([192, 168, 1, 9]), 7_433, 7_434)


async def test_adding_both_ways_ends_in_the_smaller_mesh(tmp_path: Path) -> None:
    here, there = await nodes(tmp_path, "here", "there")
    smaller = min(here.membership.mesh_id, there.membership.mesh_id)
    await introduce(here, there)
    assert here.membership.mesh_id == there.membership.mesh_id == smaller
    assert (ids(here), ids(there)) == ({there.own.id16}, {here.own.id16})


async def test_importing_every_pair_ends_in_one_mesh_that_outlives_a_restart(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d")
    fleet = await nodes(tmp_path, *names)
    files = [node.file() for node in fleet]
    for node in fleet:
        for other, file in zip(fleet, files, strict=True):
            if node is not other:
                await node.membership.add(file, other.own.node_id)
    assert {node.membership.mesh_id for node in fleet} == {min(node.membership.mesh_id for node in fleet)}
    again = await nodes(tmp_path, *names)
    for before, after in zip(fleet, again, strict=True):
        assert after.membership.members == before.membership.members
        assert after.membership.mesh_id == before.membership.mesh_id
        assert after.membership.quarantined == ()
        assert after.contexts.client.cert_store_stats()["x509"] == 3


async def test_two_paired_meshes_do_not_mix(tmp_path: Path) -> None:
    here, there = await nodes(tmp_path, "here", "there")
    for node in (here, there):
        node.own.save_mesh(node.own.mesh.moved(type(node.own.mesh.claim)(node.membership.mesh_id, True)))
    added = await here.membership.add(there.file(), there.own.node_id)
    assert added.code is AddCode.MESH_MISMATCH
    assert ids(here) == set()


async def test_what_is_not_the_expected_node_is_not_added(tmp_path: Path) -> None:
    here, there = await nodes(tmp_path, "here", "there")
    add = here.membership.add
    assert (await add(there.file(), here.own.node_id)).code is AddCode.ID_DIFFERS
    for part in (there.own.node_id[:8], short_id(there.own.node_id), there.own.node_id.upper()):
        assert (await add(there.file(), part)).code is AddCode.ID_NOT_WHOLE
    assert (await add(here.file(), here.own.node_id)).code is AddCode.SELF
    assert (await add(b"{}", there.own.node_id)).code is AddCode.MALFORMED
    assert (here.changes, ids(here)) == ([], set())


async def test_adding_again_changes_nothing_but_other_roles_do(tmp_path: Path) -> None:
    here, there = await nodes(tmp_path, "here", "there")
    await introduce(here, there)
    told = len(here.changes)
    assert (await here.membership.add(there.file(), there.own.node_id)).code is AddCode.ALREADY_MEMBER
    assert len(here.changes) == told
    narrowed = await here.membership.add(there.file(), there.own.node_id, Role.NODE)
    assert narrowed.code is AddCode.ADDED
    member = here.membership.members[there.own.id16]
    assert (member.roles, member.admission) == (Role.NODE, 2)


async def test_a_full_roster_says_so(tmp_path: Path) -> None:
    here = await start_node(tmp_path / "here", limit=1)
    one, two = await nodes(tmp_path, "one", "two")
    assert (await here.membership.add(one.file(), one.own.node_id)).code is AddCode.ADDED
    assert (await here.membership.add(two.file(), two.own.node_id)).code is AddCode.FULL


@pytest.mark.threat("T27")
async def test_a_removed_node_is_out_at_once_and_after_a_restart_until_added_again(tmp_path: Path) -> None:
    here, there = await nodes(tmp_path, "here", "there")
    await introduce(here, there)
    removed = await here.membership.remove(there.own.node_id[:12])
    assert (removed.code, removed.node_id) == (RemoveCode.REMOVED, there.own.node_id)
    assert (here.membership.by_der, ids(here)) == ({}, set())
    assert here.contexts.client.cert_store_stats()["x509"] == 0
    assert here.changes[-1] == ({}, here.membership.mesh_id)
    assert [entry.removed for entry in here.membership.entries()] == [True]
    assert PeerFiles(tmp_path / "here").load() == {}
    again = await start_node(tmp_path / "here")
    assert ids(again) == set()
    assert [entry.removed for entry in again.membership.entries()] == [True]
    back = await again.membership.add(there.file(), there.own.node_id)
    assert back.code is AddCode.ADDED
    assert again.membership.members[there.own.id16].admission == 2


async def test_removal_needs_a_reference_to_one_member(tmp_path: Path) -> None:
    here = await start_node(tmp_path / "here")
    assert (await here.membership.remove("@box")).code is RemoveCode.NOT_A_MEMBER
    twins = [await start_node(tmp_path / folder, "box") for folder in ("one", "two")]
    for twin in twins:
        await here.membership.add(twin.file(), twin.own.node_id)
    assert (await here.membership.remove("@box")).code is RemoveCode.AMBIGUOUS
    assert (await here.membership.remove("")).code is RemoveCode.NOT_A_MEMBER
    assert len(ids(here)) == 2
    twin = twins[-1]
    marked = await here.membership.remove(f"@box~{twin.own.node_id[:4]}")
    assert (marked.code, marked.node_id) == (RemoveCode.REMOVED, twin.own.node_id)
    assert (await here.membership.remove("@box")).code is RemoveCode.REMOVED


async def test_a_name_that_this_node_has_as_well_names_nobody_who_could_be_removed(tmp_path: Path) -> None:
    (here,) = await nodes(tmp_path, "box")
    twin = await start_node(tmp_path / "twin", "box")
    await here.membership.add(twin.file(), twin.own.node_id)
    assert (await here.membership.remove("@box")).code is RemoveCode.AMBIGUOUS
    assert (await here.membership.remove(twin.own.node_id)).code is RemoveCode.REMOVED


async def test_a_removal_counts_what_was_open_before_anybody_was_told(tmp_path: Path) -> None:
    here, there = await nodes(tmp_path, "here", "there")
    await here.membership.add(there.file(), there.own.node_id)
    links = [1, 2]
    here.membership.count_also(lambda member: len(links) if member.id16 == there.own.id16 else 0)
    here.membership.count_also(lambda _member: 3)
    here.membership.subscribe(lambda _members, _mesh_id: links.clear())
    removed = await here.membership.remove(there.own.node_id)
    assert removed.aborted == 5


@pytest.mark.threat("T48")
async def test_a_damaged_entry_is_quarantined_and_the_rest_is_used(tmp_path: Path) -> None:
    here, one, two = await nodes(tmp_path, "here", "one", "two")
    for other in (one, two):
        await here.membership.add(other.file(), other.own.node_id)
    for path in (tmp_path / "here/roster").glob(f"{one.own.node_id}*"):
        path.write_bytes(path.read_bytes()[:-1])
    again = await start_node(tmp_path / "here")
    assert again.membership.quarantined == (one.own.node_id,)
    assert ids(again) == {two.own.id16}


@pytest.mark.threat("T48")
async def test_a_stored_entry_that_another_key_signed_does_not_convince(tmp_path: Path) -> None:
    here, there, victim = await nodes(tmp_path, "here", "there", "victim")
    await here.membership.add(victim.file(), victim.own.node_id)
    await there.membership.add(victim.file(), victim.own.node_id)
    name = victim.own.node_id
    (tmp_path / "here/roster" / name).write_bytes((tmp_path / "there/roster" / name).read_bytes())
    again = await start_node(tmp_path / "here")
    assert again.membership.quarantined == (name,)
    assert ids(again) == set()


@pytest.mark.threat("T48")
async def test_a_crash_between_mesh_and_roster_loses_no_member(tmp_path: Path) -> None:
    here, there, other = await nodes(tmp_path, "here", "there", "other")
    await here.membership.add(other.file(), other.own.node_id)
    claim = there.own.mesh.claim
    here.own.save_mesh(here.own.mesh.moved(claim))
    again = await start_node(tmp_path / "here")
    assert again.membership.mesh_id == claim.mesh_id
    assert (ids(again), again.membership.quarantined) == ({other.own.id16}, ())
    assert ids(await start_node(tmp_path / "here")) == {other.own.id16}


@pytest.mark.threat("T48")
async def test_without_a_disk_nobody_is_added_but_a_removal_counts_and_is_stored_later(
    tmp_path: Path,
) -> None:
    here = await start_node(tmp_path / "here", retry_s=0.01)
    one, two = await nodes(tmp_path, "one", "two")
    await introduce(here, one)
    folder = tmp_path / "here/roster"
    folder.rename(tmp_path / "away")
    folder.write_bytes(b"no folder")
    assert (await here.membership.add(two.file(), two.own.node_id)).code is AddCode.NOT_STORED
    assert ids(here) == {one.own.id16}
    assert (await here.membership.remove(one.own.node_id)).code is RemoveCode.REMOVED_NOT_STORED
    assert ids(here) == set()
    folder.unlink()
    (tmp_path / "away").rename(folder)
    await until(lambda: len(here.tasks) == 0)
    assert ids(await start_node(tmp_path / "here")) == set()


async def test_only_the_newest_build_of_contexts_is_installed(tmp_path: Path) -> None:
    (here,) = await nodes(tmp_path, "here")
    older = asyncio.ensure_future(here.contexts.rebuild([here.own.der]))
    await asyncio.sleep(0)
    newer = asyncio.ensure_future(here.contexts.rebuild([]))
    assert (await older, await newer) == (False, True)
    assert here.contexts.client.cert_store_stats()["x509"] == 0


async def test_the_contexts_are_what_the_recipe_says(tmp_path: Path) -> None:
    (here,) = await nodes(tmp_path, "here")
    server, client = here.contexts.server.current, here.contexts.client
    for built in (server, client):
        assert built.minimum_version == built.maximum_version == ssl.TLSVersion.TLSv1_3
        assert built.verify_mode == ssl.CERT_REQUIRED
        assert built.verify_flags & ssl.VERIFY_X509_STRICT
        assert built.keylog_filename is None
    assert server.num_tickets == 0
    assert client.check_hostname
    with pytest.raises(NotImplementedError):
        here.contexts.server.wrap_socket(None)
