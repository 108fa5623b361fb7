"""The pages of docs/reference say what a daemon really shows, and collecting names from the source misses none."""

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import aiohttp
import pytest

from agent.assembly.node import Assembly
from scripts import reference_scan
from tests.agent.node.rig import an_asked, an_endpoint, stated
from tests.agent.test_assembly import node

ROOT = Path(__file__).parents[1]
NAMES = (ROOT / "docs/reference/surface.txt").read_text().splitlines()
EXPANSIONS = {"room.{}": ["room.one", "room.two"]}

__all__ = ["node"]


def of_kind(kind: str) -> set[str]:
    return {line.removeprefix(f"{kind} ") for line in NAMES if line.startswith(f"{kind} ")}


def keys(document: object, above: str = "") -> Iterator[str]:
    """The keys of a JSON document, ``[]`` for each of a list."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield f"{above}.{key}"
            yield from keys(value, f"{above}.{key}")
    elif isinstance(document, list):
        for item in document:
            yield from keys(item, f"{above}[]")


def undocumented(name: str, document: object) -> set[str]:
    patterns = [
        re.escape(line.removeprefix(f"{name}: ")).replace(r"\{\}", r"[^.\[]+")
        for line in of_kind("json")
        if line.startswith(f"{name}: ")
    ]
    known = re.compile("|".join(patterns))
    return {key for each in keys(document) if not known.fullmatch(key := each.removeprefix("."))}


async def test_the_metrics_of_a_node_are_those_of_the_list(node: Assembly) -> None:
    shown = dict(re.findall(r"^# TYPE (\S+) (\S+)$", node.registry.render(), re.MULTILINE))
    listed = {line.partition("{")[0]: line.rpartition(" ")[2] for line in of_kind("metric")}
    assert shown.items() <= listed.items()
    of_gpus = ("pairmesh_probe", "pairmesh_nvml", "pairmesh_gpu", "pairmesh_sample")
    assert not {name for name in listed.keys() - shown.keys() if not name.startswith(of_gpus)}


async def test_the_documents_of_a_node_have_no_key_that_the_list_lacks(node: Assembly) -> None:
    now = node.clock.boot_ms()
    node.placement.viewing.said(*stated(an_endpoint(), now=now), 2_000)
    node.placement.placing(an_asked(now)).decide(attempt=1, tried=frozenset(), refused=frozenset(), now=now)
    port = await node.admin.listen_tcp("127.0.0.1", 0)
    documents: dict[str, Any] = {}
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            for path in ("/v1/status", "/v1/view"):
                async with session.get(path) as reply:
                    documents[f"GET {path}"] = await reply.json()
            async with session.post("/v1/explain", json={"model": "m"}) as reply:
                documents["POST /v1/explain"] = await reply.json()
    finally:
        await node.admin.aclose()
    for name, document in documents.items():
        assert len(set(keys(document))) > 30, name
        assert undocumented(name, document) == set()


def scanned(tmp_path: Path, text: str) -> tuple[reference_scan.Module, ...]:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/part.py").write_text(dedent(text))
    return reference_scan.modules(tmp_path)


def test_events_are_followed_through_helpers_tables_and_choices(tmp_path: Path) -> None:
    code = scanned(
        tmp_path,
        """
        SAID = {1: (Severity.WARNING, "member.gone")}

        class Part:
            def go(self, state, up):
                known = {"id": 1}
                self._log.info("part.up" if up else "part.down", **known)
                severity, event = SAID[state]
                self._log.event(severity, event, {"node": 2})
                self._failed("part.failed", OSError())
                say = self._log.info if up else self._log.error
                say(f"room.{state}", size=3)

            def _failed(self, event, error):
                self._log.warning(event, cause=error)

            def notify(self):
                self.tell(Alarm.LOUD, peer=1)
        """,
    )
    found = reference_scan.events(code, EXPANSIONS, ("Alarm", "mesh"))
    assert {name: sorted(event.fields) for name, event in found.items()} == {
        "part.up": ["id"],
        "part.down": ["id"],
        "member.gone": ["node"],
        "part.failed": ["cause"],
        "room.one": ["size"],
        "room.two": ["size"],
        "mesh.loud": ["peer"],
    }
    assert found["part.failed"].levels == {"warning"}


@pytest.mark.parametrize("event", ['f"other.{self.x}"', "self.name()"])
def test_an_event_that_cannot_be_followed_is_a_fault(tmp_path: Path, event: str) -> None:
    code = scanned(tmp_path, f"class Part:\n    def go(self):\n        self._log.info({event})\n")
    with pytest.raises(reference_scan.ScanFault, match=r"agent/part\.py:3"):
        reference_scan.events(code, EXPANSIONS, ("Alarm", "mesh"))


def test_metrics_are_followed_into_loops_over_tables(tmp_path: Path) -> None:
    code = scanned(
        tmp_path,
        """
        LABELS = ("node", "name")
        ROWS = (("free_bytes", "Free.", 1), ("used_bytes", "Used.", 2))

        def collect():
            yield Counter("pairmesh_calls_total", "Calls.", LABELS)
            for name, text, value in ROWS:
                yield gauge_family(f"pairmesh_{name}", text, ("gpu",), {}, Shape.COUNTER)
        """,
    )
    assert [(m.name, m.shape, m.labels, m.help) for m in reference_scan.metrics(code, {})] == [
        ("pairmesh_calls_total", "counter", ("node", "name"), "Calls."),
        ("pairmesh_free_bytes", "counter", ("gpu",), "Free."),
        ("pairmesh_used_bytes", "counter", ("gpu",), "Used."),
    ]


def test_refusals_are_followed_to_the_code_that_a_helper_is_given(tmp_path: Path) -> None:
    code = scanned(
        tmp_path,
        """
        WHY = {1: ("port_in_use", "stop the other one")}

        def refuse(number):
            reason, advice = WHY.get(number, ("cannot_listen", "correct it"))
            return RefuseToStart(reason, advice)

        def require(folder, reason):
            raise RefuseToStart(reason, "chmod it")

        def prepare(folder):
            require(folder, "state_not_private")
            raise RefuseToStart("state_in_use", "stop it")
        """,
    )
    assert reference_scan.raised(code, "RefuseToStart") == [
        "cannot_listen",
        "port_in_use",
        "state_in_use",
        "state_not_private",
    ]
