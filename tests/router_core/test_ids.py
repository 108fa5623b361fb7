"""Names of nodes: what people are told where several share one, and what they may write."""

from hypothesis import given
from hypothesis import strategies as st

from router_core.ids import (
    SHORTEST_MARK,
    NodeId,
    NodeName,
    id32_of_key,
    labels_of,
    node_id_of,
    parse_marked_name,
)

_IDS = st.binary(min_size=32, max_size=32).map(id32_of_key).map(node_id_of)
_NAMES = st.sampled_from(["ubuntu", "desk", "a"]).map(NodeName)


@given(st.dictionaries(_IDS, _NAMES, max_size=12))
def test_a_label_is_the_name_or_tells_apart_who_shares_it(names: dict[NodeId, NodeName]) -> None:
    labels = labels_of(names)
    assert labels.keys() == names.keys()
    assert len(set(labels.values())) == len(names)
    shared = {name for name in names.values() if list(names.values()).count(name) > 1}
    for node_id, label in labels.items():
        named = parse_marked_name(label)
        assert named is not None
        name, mark = named
        assert name == names[node_id]
        assert bool(mark) is (name in shared)
        meant = [other for other, its in names.items() if its == name and other.startswith(mark)]
        assert meant == [node_id]


def test_ids_that_begin_alike_are_marked_as_far_as_it_takes() -> None:
    one, other = NodeId("abcdef" + "a" * 46), NodeId("abcdeg" + "a" * 46)
    assert labels_of({one: NodeName("u"), other: NodeName("u")}) == {one: "u~abcdef", other: "u~abcdeg"}
    assert SHORTEST_MARK == 4


def test_a_mark_is_some_first_characters_of_an_id_and_nothing_else() -> None:
    assert parse_marked_name("desk") == ("desk", "")
    assert parse_marked_name("desk~abcd") == ("desk", "abcd")
    for text in (
        "desk~",
        "desk~abc",
        "desk~abc1",
        "desk~ABCD",
        "~abcd",
        "desk~abcd~abcd",
        "desk~" + "a" * 53,
    ):
        assert parse_marked_name(text) is None, text
