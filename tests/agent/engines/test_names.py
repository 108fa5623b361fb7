"""Names under which models are offered."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engines.contract import OwnedModel
from agent.engines.names import is_publishable, name_of_path, overlaid, publishable
from agent.settings.manifest import DeclaredModel


def owned(native_id: str, *aliases: str, name: str | None = None) -> OwnedModel:
    return OwnedModel(native_id=native_id, name=name or name_of_path(native_id), aliases=aliases)


@pytest.mark.parametrize(
    ("native_id", "name"),
    [
        ("tiny", "tiny"),
        ("/srv/models/Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M.gguf"),
        ("./models/tiny.gguf", "tiny.gguf"),
        ("models/tiny.gguf", "tiny.gguf"),
        ("tiny.gguf", "tiny.gguf"),
        ("user/repo-GGUF:Q4_K_M", "user/repo-GGUF:Q4_K_M"),
        ("hf.co/user/repo:Q8_0", "hf.co/user/repo:Q8_0"),
    ],
)
def test_the_path_of_a_file_never_leaves_the_host(native_id: str, name: str) -> None:
    assert name_of_path(native_id) == name


@pytest.mark.parametrize(
    "name", ["", "a b", "../x", "a..b", "a//b", "/a", ".a", "x" * 129, "ä", "a\nb", "a\n"]
)
def test_unfit_names_are_left_out_and_counted(name: str) -> None:
    assert not is_publishable(name)
    assert publishable([owned("n", name=name or " "), owned("fine")]) == ((owned("fine"),), 1)


def test_a_manifest_can_give_an_unfit_name_a_fit_one() -> None:
    entry = DeclaredModel(name="spaced", upstream_name="my model")
    kept, unfit = publishable(overlaid([owned("my model")], [entry]))
    assert [(model.name, model.native_id) for model in kept] == [("spaced", "my model")]
    assert unfit == 0


def test_each_name_is_offered_once_and_unfit_aliases_not_at_all() -> None:
    models = [owned("/a/m.gguf", "x", "/a/m.gguf"), owned("/b/m.gguf"), owned("y", "x", "m.gguf", "z")]
    kept, unfit = publishable(models)
    assert [(model.native_id, model.name, model.aliases) for model in kept] == [
        ("/a/m.gguf", "m.gguf", ("x",)),
        ("y", "y", ("z",)),
    ]
    assert unfit == 0


Ids = st.text(st.sampled_from("ab/.:-_ @é"), min_size=1, max_size=12)


@settings(max_examples=100)
@given(st.lists(st.tuples(Ids, st.lists(Ids, max_size=3)), max_size=8))
def test_what_is_offered_is_fit_distinct_and_leads_back_to_one_model(
    spec: list[tuple[str, list[str]]],
) -> None:
    kept, _ = publishable(owned(native, *aliases) for native, aliases in spec)
    labels = [label for model in kept for label in (model.name, *model.aliases)]
    assert len(labels) == len(set(labels))
    assert all(is_publishable(label) for label in labels)
