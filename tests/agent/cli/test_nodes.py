"""Claims about the table of nodes, and the columns and units it is made of."""

import re
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.admin.documents import HeldDoc, LinkDoc, RequestsDoc, ResidencyDoc, ResidentDoc
from agent.cli.columns import columns, count, duration, seconds
from agent.cli.nodes import nodes_table, status_text
from tests.agent.admin.documents import engine, member, status, unseen


def test_the_status_in_full() -> None:
    assert status_text(status()) == dedent(
        """\
        atlas (aaaa-aaaa-aaaa-aaaa), pairmesh 0.1.0, up 1 h 1 min, mesh 00112233
        listening: api 127.0.0.1:11433, mesh 0.0.0.0:7433
        others are told: 192.168.1.5, fd00::5
        policy: balanced (0011aabb)

        NODE    STATE     AGE  LEVEL  ENGINES  WARM  IN FLIGHT  TOK/S  LINK
        atlas*  fresh  0.40 s  none   llama    tiny          1     42  -
        borg    fresh  0.40 s  none   llama    tiny          1     42  up (0.4 ms)
        cyan    gone        -  -      -        -             -      -  backoff: in another mesh
        """
    )


def test_what_is_not_well_is_shown() -> None:
    loading = ResidentDoc(
        model="big", engine="llama", state="loading", running=0, waiting=0, mem_mib=None, ctx=None
    )
    ill = replace(
        member("borg", "b", liveness="late"),
        flags=("draining", "urgent"),
        engines=(engine(), engine("vllm", "down", None, ())),
        residents=(loading,),
        link=LinkDoc(state="dialling"),
    )
    assert re.split(r"\s{2,}", nodes_table([ill])[1]) == [
        "borg",
        "late, draining",
        "0.40 s",
        "none",
        "llama, vllm (down)",
        "big (loading)",
        "1",
        "42",
        "dialling",
    ]


def test_nodes_of_one_name_and_the_cause_of_a_level_can_be_told() -> None:
    twins = [replace(member("ubuntu", each), label=f"ubuntu~{each * 4}") for each in "ab"]
    rows = nodes_table(
        [replace(twins[0], me=True), replace(twins[1], level="high", pressed=("memory", "vram"))]
    )
    assert re.split(r"\s{2,}", rows[1])[0] == "ubuntu~aaaa*"
    assert re.split(r"\s{2,}", rows[2])[:4] == ["ubuntu~bbbb", "fresh", "0.40 s", "high (memory, vram)"]


def test_what_waits_for_a_restart_is_said() -> None:
    told = status()
    waiting = replace(told, own=replace(told.own, waits_for_restart=("api.hosts", "name")))
    assert "\nwaits for a restart: api.hosts, name (see pairmesh config show)\n" in status_text(waiting)


def test_a_way_too_short_to_be_measured_is_not_none() -> None:
    near = replace(member("borg", "b"), link=LinkDoc(state="up", rtt_ms=0))
    assert nodes_table([near])[1].endswith("up (under 1 ms)")


def test_a_link_that_is_up_does_not_hide_that_requests_do_not_get_through() -> None:
    closed = RequestsDoc(state="unreachable", why="timed_out", at=("192.168.1.6",), port=7434)
    ill = replace(member("borg", "b", link=LinkDoc(state="up", rtt_ms=1)), requests=closed)
    assert nodes_table([ill])[1].endswith("up (1.0 ms), requests: unreachable (port 7434)")
    nowhere = replace(ill, requests=replace(closed, why="no_address", at=(), port=None))
    assert nodes_table([nowhere])[1].endswith("requests: unreachable (no address)")
    for other in (replace(ill, liveness="gone"), replace(ill, requests=replace(closed, state="unknown"))):
        assert "requests" not in nodes_table([other])[1]


def test_faults_of_the_own_node_are_listed() -> None:
    made = status()
    text = status_text(replace(made, own=replace(made.own, faults=("duplicate_identity",))))
    assert text.endswith("\nfault: duplicate_identity\n")


def held(model: str, state: str, left_ms: int | None = None, room_for: str | None = None) -> HeldDoc:
    return HeldDoc(endpoint="llama", model=model, state=state, for_ms=0, left_ms=left_ms, room_for=room_for)


def test_models_that_move_are_told_with_what_is_left_of_it() -> None:
    made = status()
    moving = ResidencyDoc(
        loads_left=1,
        movable=9,
        models=(
            held("a", "resident", 42_000),
            held("b", "resident", 0),
            held("c", "draining", 280_000, "llama/d"),
            held("d", "present"),
            held("e", "present", 3_000),
            held("f", "loading", 40_000),
            held("g", "loading"),
            held("h", "failed", 60_000),
            held("i", "unloading", None, "llama/d"),
        ),
    )
    text = status_text(replace(made, own=replace(made.own, residency=moving)))
    assert text[text.index("models") :] == dedent(
        """\
        models move by demand: 1 more load within this hour
          llama/a: resident, and not unloaded by pairmesh for 42 s more
          llama/b: resident
          llama/c: draining, for 4 min 40 s more at most, to make room for llama/d
          llama/d: to be loaded when there is room
          llama/e: to be loaded in 3 s, if it still should be
          llama/f: loading, for 40 s more at most
          llama/g: loading
          llama/h: could not be loaded, not tried again for 1 min 0 s
          llama/i: unloading, to make room for llama/d
        """
    )
    many = ResidencyDoc(
        loads_left=0, movable=100, models=tuple(held(f"m{n}", "failed", 1_000) for n in range(100))
    )
    lines = status_text(replace(made, own=replace(made.own, residency=many))).splitlines()
    assert lines[-1] == "  and 84 more: see --json"
    none = ResidencyDoc(loads_left=6, movable=0, models=())
    lines = status_text(replace(made, own=replace(made.own, residency=none))).splitlines()
    assert lines[-1] == "models move by demand, but no engine that is up here can be told what to hold"


def test_why_an_own_engine_takes_no_requests_stands_beside_it() -> None:
    made = status()
    mine = replace(made.members[0], engines=(engine(), engine("vllm", "down", None, ())))
    other = replace(made.members[1], engines=(engine("vllm", "down", None, ()),))
    made = replace(
        made,
        members=(mine, other),
        own=replace(made.own, engine_errors={"vllm": "identity_changed", "llama": "unreachable"}),
    )
    text = status_text(made)
    assert "llama, vllm (identity changed)" in text
    assert "  vllm (down)" in text


def test_a_hostile_engine_name_stays_one_cell() -> None:
    hostile = replace(unseen("x", "x", "lost"), engines=(engine("a\x1b]0;pwned\x07\n\u202e"),))
    lines = nodes_table([hostile])
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


@settings(max_examples=100)
@given(rows=st.lists(st.lists(st.text(max_size=12), min_size=3, max_size=3), min_size=1, max_size=6))
def test_columns_line_up_whatever_is_in_them(rows: list[list[str]]) -> None:
    lines = columns([[f"{cell}|" for cell in row] for row in rows])
    assert len(lines) == len(rows)
    assert all(line.isprintable() for line in lines)
    widths = {len(line) for line in columns([[*row, "end"] for row in rows])}
    assert len(widths) == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0 s"),
        (0.0004, "0.4 ms"),
        (0.012, "12 ms"),
        (0.0996, "0.10 s"),
        (0.3, "0.30 s"),
        (8.35, "8.3 s"),
        (120.2, "120 s"),
    ],
)
def test_short_times(value: float | None, shown: str) -> None:
    assert seconds(value) == shown


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (None, "-"),
        (0, "0 s"),
        (59_999, "59 s"),
        (187_000, "3 min 7 s"),
        (7_500_000, "2 h 5 min"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_long_times(ms: int | None, shown: str) -> None:
    assert duration(ms) == shown


def test_counts() -> None:
    assert (count(1, "row"), count(0, "row"), count(1_200, "row")) == ("1 row", "0 rows", "1,200 rows")
