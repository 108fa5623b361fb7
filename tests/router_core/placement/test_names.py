"""When two model names mean the same model, and when they only look alike."""

import string
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from router_core.placement.candidates.fleet import Fleet
from router_core.placement.reasons import Action, Reason
from router_core.placement.request.names import nearest, parse_model_name
from tests.support.fleets import POLICY, a_fleet, a_request, a_row, choice_of, chosen_node, decided

HEX = "ab" * 32


@pytest.mark.parametrize(
    ("asked", "name", "tagged"),
    [
        ("llama3", "llama3", "llama3:latest"),
        ("llama3:8b", "llama3:8b", "llama3:8b"),
        ("Llama3:8B-Q4_K_M", "Llama3:8B-Q4_K_M", "Llama3:8B-Q4_K_M"),
        ("library/llama3", "llama3", "llama3:latest"),
        ("registry.ollama.ai/library/llama3:8b", "llama3:8b", "llama3:8b"),
        ("Registry.Ollama.AI/library/llama3", "llama3", "llama3:latest"),
        ("HF.co/User/Repo:Q4", "hf.co/User/Repo:Q4", "hf.co/User/Repo:Q4"),
        ("localhost:5000/me/x", "localhost:5000/me/x", "localhost:5000/me/x:latest"),
        ("LocalHost/me/x", "localhost/me/x", "localhost/me/x:latest"),
        ("Org/Name", "Org/Name", "Org/Name:latest"),
        (f"llama3@sha256:{HEX}", "llama3", "llama3:latest"),
    ],
)
def test_names_are_normalised(asked: str, name: str, tagged: str) -> None:
    found = parse_model_name(asked)
    assert found is not None
    assert (found.name, found.tagged) == (name, tagged)
    assert found.digest == (bytes.fromhex(HEX) if "@" in asked else None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "a b",
        "/a",
        "-a",
        ".a",
        "a//b",
        "a/../b",
        "a\n",
        "a" * 129,
        "ä",
        "registry.ollama.ai/library/",
    ],
)
def test_what_is_no_name_is_refused(text: str) -> None:
    assert parse_model_name(text) is None


def offers(offered: str, engine: str = "llamacpp", **over: Any) -> Fleet:
    return a_fleet(a_row("a", model=offered, engine=engine, endpoint=engine, **over))


def routed(asked: str, fleet: Fleet) -> bool:
    return decided(a_request(model=asked), fleet).action is Action.ROUTE


@pytest.mark.lesson("mem0ai/mem0#4101: the wrong model, or none, for a name")
@pytest.mark.parametrize(
    ("asked", "offered", "engine", "same"),
    [
        ("tiny", "tiny", "llamacpp", True),
        ("Tiny", "tiny", "llamacpp", False),
        ("tiny:latest", "tiny", "llamacpp", False),
        ("tiny", "tiny:latest", "llamacpp", False),
        ("tiny:latest", "tiny", "ollama", True),
        ("tiny", "tiny:latest", "ollama", True),
        ("tiny:8b", "tiny", "ollama", False),
        ("tiny", "tiny:8b", "ollama", False),
        ("tiny:8b-q4", "tiny:8b-q8", "ollama", False),
        ("registry.ollama.ai/library/tiny", "tiny:latest", "ollama", True),
        ("hf.co/u/tiny", "tiny", "ollama", False),
        ("tin", "tiny", "llamacpp", False),
        ("tiny-2", "tiny", "llamacpp", False),
    ],
)
def test_case_tag_registry_and_prefix_twins(asked: str, offered: str, engine: str, same: bool) -> None:
    assert routed(asked, offers(offered, engine)) is same


_TAIL = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=12)


@pytest.mark.promise("names with a common prefix are different models")
@settings(max_examples=60, deadline=None)
@given(_TAIL, _TAIL)
def test_names_with_a_common_prefix_never_match(tail: str, other: str) -> None:
    asked, offered = f"m{tail}", f"m{tail}{other}"
    assume(".." not in offered)
    for engine in ("llamacpp", "ollama"):
        assert not routed(asked, offers(offered, engine))
        assert not routed(offered, offers(asked, engine))


def test_equal_digests_under_different_names_are_one_model() -> None:
    digest = bytes(32)
    fleet = a_fleet(a_row("a", digest=digest, in_flight=12), a_row("b", model="other", digest=digest))
    decision = decided(a_request(), fleet)
    assert chosen_node(decision) == "b"
    assert choice_of(decision).model == "other"


def test_of_two_digests_the_one_on_most_rows_is_meant() -> None:
    one, two = b"\1" * 32, b"\2" * 32
    fleet = a_fleet(
        a_row("a", digest=one, pp=100), a_row("b", digest=one, pp=100), a_row("c", digest=two, pp=9000)
    )
    decision = decided(a_request(), fleet)
    assert chosen_node(decision) in ("a", "b")
    assert "digest_conflict" in decision.record.degraded
    assert decision.record.excluded_counts == {"model_absent": 1}
    assert decision.reason is Reason.NATIVE


def test_of_two_digests_on_as_many_rows_the_smaller_is_meant_whoever_was_heard_first() -> None:
    one, two = b"\1" * 32, b"\2" * 32
    for first, second in ((one, two), (two, one)):
        fleet = a_fleet(a_row("a", digest=first), a_row("b", digest=second))
        assert chosen_node(decided(a_request(), fleet)) == ("a" if first == one else "b")


def test_a_pinned_digest_beats_the_majority() -> None:
    one, two = b"\1" * 32, b"\2" * 32
    fleet = a_fleet(a_row("a", digest=one), a_row("b", digest=one), a_row("c", digest=two))
    assert chosen_node(decided(a_request(model=f"tiny@sha256:{'02' * 32}"), fleet)) == "c"
    assert decided(a_request(model=f"tiny@sha256:{'03' * 32}"), fleet).reason is Reason.MODEL_ABSENT


def test_digests_of_closed_rows_do_not_vote() -> None:
    one, two = b"\1" * 32, b"\2" * 32
    fleet = a_fleet(
        a_row("a", digest=one, draining=True), a_row("b", digest=one, draining=True), a_row("c", digest=two)
    )
    assert chosen_node(decided(a_request(), fleet)) == "c"


def test_an_alias_tries_its_targets_at_a_price() -> None:
    policy = replace(POLICY, aliases=(("chat", ("tiny", "small")),))
    fleet = a_fleet(a_row("a", model="small"), a_row("b", model="tiny"))
    decision = decided(a_request(model="chat"), fleet, policy)
    assert chosen_node(decision) == "b"
    prices = {candidate.model: candidate.adj for candidate in decision.record.candidates}
    assert prices == {"tiny": 0.0, "small": 0.05}


def test_however_many_targets_an_alias_has_none_costs_more_than_the_most() -> None:
    names = [f"tiny{number}" for number in range(8)]
    policy = replace(POLICY, aliases=(("chat", tuple(names)),))
    decision = decided(a_request(model="chat"), a_fleet(*(a_row(name, model=name) for name in names)), policy)
    prices = {candidate.model: round(candidate.adj, 6) for candidate in decision.record.candidates}
    assert [prices[name] for name in names] == [0.0, 0.05, 0.1, 0.15, 0.2, 0.2, 0.2, 0.2]


@pytest.mark.lesson("thushan/olla#191: an alias of nothing that means everything")
def test_an_alias_to_absent_models_is_absent_not_everything() -> None:
    policy = replace(POLICY, aliases=(("chat", ("gone", "lost")),))
    decision = decided(a_request(model="chat"), a_fleet(a_row("a")), policy)
    assert decision.action is Action.REJECT
    assert decision.reason is Reason.MODEL_ABSENT
    assert decision.reason.status == 404


def test_an_absent_model_is_answered_with_names_close_to_it() -> None:
    fleet = a_fleet(
        *(a_row(f"n{i}", model=name) for i, name in enumerate(["llama3", "llama3.1", "llama2", "phi4"]))
    )
    decision = decided(a_request(model="llama33"), fleet)
    assert decision.reason is Reason.MODEL_ABSENT
    assert decision.nearest[0] == "llama3"
    assert len(decision.nearest) <= 3
    assert "phi4" not in decision.nearest


def test_an_invalid_name_is_refused_and_never_recorded() -> None:
    decision = decided(a_request(model="please tell me a story"), a_fleet(a_row("a")))
    assert decision.reason is Reason.MODEL_NAME_INVALID
    assert decision.reason.status == 400
    assert "story" not in repr(decision.record)


def test_nearest_compares_a_bounded_number_of_names() -> None:
    assert nearest("name0", (f"name{i}" for i in range(5000)), 3)[0] == "name0"
