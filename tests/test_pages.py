"""What the pages show works: every TOML block is a file that pairmesh takes, and every error code has a cure."""

import re
from pathlib import Path

import pytest

from agent.relay.frontends.codes import CODES, OF_PEERS
from agent.settings.load import FILE, check
from agent.settings.manifest import parse_manifest
from agent.settings.policy import PolicyRead, parse_policy

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL), start=1
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_of_toml_is_a_file_that_is_taken(block: str, tmp_path: Path) -> None:
    raw = block.encode()
    if re.search(r"^engine = ", block, re.MULTILINE):
        manifest, faults = parse_manifest(raw, "shown.toml")
        assert manifest is not None, faults
        return
    (tmp_path / FILE).write_bytes(raw)
    settings, policy = check(tmp_path), parse_policy(raw)
    assert not settings or isinstance(policy, PolicyRead), (settings, policy)


def test_every_code_that_a_client_can_get_has_a_cure() -> None:
    page = (ROOT / "docs/howto/troubleshooting.md").read_text()
    sections = dict(re.findall(r"^### `(\w+)`\n\n(.*?)$", page, re.MULTILINE))
    assert sections.keys() == CODES.keys() - OF_PEERS
    assert all(sections.values())
