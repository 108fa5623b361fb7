"""Links of the pages: what leads nowhere is found, what is code or leads to another host is let be."""

from pathlib import Path

import pytest

from scripts import links


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "LICENSE").touch()
    (tmp_path / "docs/other.md").write_text("# Other\n\n## Open `7433/tcp`, please\n\n## Twice\n\n## Twice\n")
    return tmp_path / "docs/page.md"


@pytest.mark.parametrize(
    "target",
    [
        "other.md",
        "other.md#open-7433tcp-please",
        "other.md#twice-1",
        "#here",
        "../LICENSE",
        "https://example.com/nothing#x",
    ],
)
def test_a_link_to_what_is_there_is_fine(page: Path, target: str) -> None:
    page.write_text(f"# Here\n\nSee [this]({target}).\n")
    assert links.faults(page.parents[1], [page]) == []


@pytest.mark.parametrize(
    "target",
    [
        "absent.md",
        "other.md#closed",
        "other.md#twice-2",
        "#there",
        "../../outside",
        "/LICENSE",
        "../LICENSE#x",
    ],
)
def test_a_link_to_what_is_not_there_is_told_with_its_line(page: Path, target: str) -> None:
    page.write_text(f"# Here\n\n```sh\n[not](a-link)\n```\n\nSee [this]({target}).\n")
    assert links.faults(page.parents[1], [page]) == [f"docs/page.md:7: leads nowhere: {target}"]


def test_what_stands_in_code_is_no_link(page: Path) -> None:
    page.write_text("`[a](b)`\n\n```toml\n[[models]](x)\n# Here\n```\n")
    assert links.faults(page.parents[1], [page]) == []
