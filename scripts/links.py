"""Links in Markdown files of the repository: what they lead to, and which of them lead nowhere. No network."""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import unquote

_FENCE: Final = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE: Final = re.compile(r"`[^`\n]*`")
LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*)\]\((?P<target>[^)\s]+)\)")
_HEADING: Final = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
_ANCHOR: Final = re.compile(r'<a (?:id|name)="([^"]+)"')
_ELSEWHERE: Final = re.compile(r"[a-z][a-z0-9+.-]*:")


def faults(root: Path, pages: Iterable[Path]) -> list[str]:
    """Every link of ``pages`` to a file or a heading that is not there."""
    return [
        f"{page.relative_to(root)}:{line}: leads nowhere: {target}"
        for page in pages
        for line, target in _links(page)
        if not _leads(root, page, target)
    ]


def _links(page: Path) -> Iterator[tuple[int, str]]:
    text = page.read_text()
    bare = _CODE.sub(_blank, _FENCE.sub(_blank, text))
    for hit in LINK.finditer(bare):
        yield bare.count("\n", 0, hit.start()) + 1, hit["target"]


def _blank(hit: re.Match[str]) -> str:
    """As many lines and characters without a word in them."""
    return re.sub(r"[^\n]", "x", hit[0])


def _leads(root: Path, page: Path, target: str) -> bool:
    if _ELSEWHERE.match(target):
        return True
    path, _, anchor = target.partition("#")
    file = (page.parent / unquote(path)).resolve() if path else page
    if path.startswith("/") or not file.is_relative_to(root) or not file.exists():
        return False
    return not anchor or (file.suffix == ".md" and anchor in anchors(file))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page: its headings, as code hosts name them, and those written out."""
    text = _FENCE.sub("", page.read_text())
    found = set(_ANCHOR.findall(text))
    for heading in _HEADING.findall(text):
        slug = slug_of(heading)
        again = next((n for n in range(1, 100) if f"{slug}-{n}" not in found), 0) if slug in found else 0
        found.add(f"{slug}-{again}" if again else slug)
    return frozenset(found)


def slug_of(heading: str) -> str:
    """``A heading, with marks`` as ``a-heading-with-marks``."""
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", bare.lower()).replace(" ", "-")
