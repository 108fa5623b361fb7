"""Every mesh time that the settings accept, the mesh accepts too."""

from pathlib import Path

import pytest

from agent.assembly.mesh import mesh_policy
from agent.settings.load import Settings, load
from agent.settings.schema import SCHEMA

TIMES = ("backoff_max_s", "gone_min_s", "gone_redial_s")


@pytest.mark.parametrize("name", TIMES)
def test_the_least_and_the_most_accepted_value_make_a_policy(tmp_path: Path, name: str) -> None:
    low, high = (
        int(text) for text in SCHEMA.by_path[f"mesh.{name}"].takes.removeprefix("seconds, ").split(" to ")
    )
    for value in (low, high):
        settings = load(tmp_path, host_name="n", flags={f"mesh.{name}": value})
        assert isinstance(settings, Settings)
        assert getattr(mesh_policy(settings.mesh), name) == value
    refused = load(tmp_path, host_name="n", flags={f"mesh.{name}": low - 1})
    assert not isinstance(refused, Settings)
