"""Claims about the verbs of members, over real memberships on disk."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.admin.ports import VerbRefused, Verbs
from agent.admin.trust_verbs import trust_verbs
from agent.identity.membership import Membership
from router_core.record.state import Address
from tests.agent.admin.membership import membership

HERE = Address(ip=b"\x7f\0\0\x01", mesh_port=7433, ingress_port=7434)


class Heard:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def audit(self, event: str, **facts: str | int | bool | None) -> None:
        self.lines.append((event, facts))


@pytest.fixture
async def atlas(tmp_path: Path) -> AsyncIterator[Membership]:
    async with membership(tmp_path / "atlas", "atlas") as made:
        yield made


@pytest.fixture
async def borg(tmp_path: Path) -> AsyncIterator[Membership]:
    async with membership(tmp_path / "borg", "borg") as made:
        yield made


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def verbs(atlas: Membership, heard: Heard) -> Verbs:
    return trust_verbs(atlas, atlas.own.node_id, lambda: [HERE], heard)


def file_of(node: Membership) -> str:
    return node.export([HERE]).decode()


async def refusal(verbs: Verbs, verb: str, **arguments: Any) -> str:
    with pytest.raises(VerbRefused) as caught:
        await verbs[verb](arguments)
    return caught.value.code


async def test_a_member_is_exported_added_listed_and_removed(
    verbs: Verbs, atlas: Membership, borg: Membership, heard: Heard
) -> None:
    exported = await verbs["trust-export"]({})
    assert json.loads(exported["file"])["node_id"] == exported["id"] == atlas.own.node_id
    added = await verbs["trust-add"]({"file": file_of(borg), "id": borg.own.node_id})
    assert (added["code"], added["id"]) == ("added", borg.own.node_id)
    (line,) = msgspec.to_builtins(await verbs["trust-list"]({}))["members"]
    assert (line["name"], line["roles"], line["removed"]) == ("borg", ("node", "router", "introducer"), False)
    removed = await verbs["trust-remove"]({"ref": "@borg"})
    assert removed == {"code": "removed", "id": borg.own.node_id, "connections_cut": 0}
    (line,) = msgspec.to_builtins(await verbs["trust-list"]({}))["members"]
    assert line["removed"] is True
    assert [event for event, _ in heard.lines] == ["trust.added", "trust.removed"]
    assert {facts["node"] for _, facts in heard.lines} == {borg.own.node_id}


async def test_adding_twice_changes_nothing_and_is_not_audited(
    verbs: Verbs, borg: Membership, heard: Heard
) -> None:
    arguments = {"file": file_of(borg), "id": borg.own.node_id}
    await verbs["trust-add"](arguments)
    arguments["file"] = file_of(borg)
    assert (await verbs["trust-add"](arguments))["code"] == "already_member"
    assert len(heard.lines) == 1


async def test_roles_are_those_asked_for(verbs: Verbs, borg: Membership) -> None:
    await verbs["trust-add"]({"file": file_of(borg), "id": borg.own.node_id, "roles": ["observer"]})
    (line,) = msgspec.to_builtins(await verbs["trust-list"]({}))["members"]
    assert line["roles"] == ("observer",)


async def test_the_wrong_file_is_refused_by_name(verbs: Verbs, atlas: Membership, borg: Membership) -> None:
    assert await refusal(verbs, "trust-add", file=file_of(borg), id=atlas.own.node_id) == "id_differs"
    assert await refusal(verbs, "trust-add", file=file_of(atlas), id=atlas.own.node_id) == "self"
    assert await refusal(verbs, "trust-add", file="not a file", id=borg.own.node_id) == "malformed"
    assert await refusal(verbs, "trust-remove", ref="@nobody") == "not_a_member"


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("trust-list", {"extra": 1}),
        ("trust-export", {"file": "x"}),
        ("trust-add", {}),
        ("trust-add", {"file": "x"}),
        ("trust-add", {"file": 3, "id": "x"}),
        ("trust-add", {"file": "x" * 20_000, "id": "x"}),
        ("trust-add", {"file": "x", "id": "x", "roles": ["king"]}),
        ("trust-add", {"file": "x", "id": "x", "roles": "node"}),
        ("trust-remove", {"ref": ""}),
        ("trust-remove", {"ref": "x" * 97}),
        ("trust-remove", {"id": "x"}),
    ],
)
async def test_arguments_of_another_shape_are_refused(
    verbs: Verbs, verb: str, arguments: dict[str, Any]
) -> None:
    assert await refusal(verbs, verb, **arguments) == "arguments_malformed"
