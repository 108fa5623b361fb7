"""What mkdocs is told besides ``mkdocs.yml``: the order of the pages, and what becomes of links to files of the
repository that are no pages."""

import re
from pathlib import Path
from typing import Any, Final

from scripts.links import LINK, slug_of

ROOT: Final = Path(__file__).resolve().parent.parent
FIRST: Final = ("index.md", "howto", "comparison.md", "security.md", "architecture.md", "placement.md")
"""Pages and folders in the order of the site; others follow by name, the reference last."""
LAST: Final = "reference"
HOWTO: Final = (
    "install.md",
    "pair.md",
    "lan-clients.md",
    "engines.md",
    "clients.md",
    "upgrade.md",
    "uninstall.md",
)


def on_config(config: Any) -> Any:
    config.nav = _ordered(Path(config.docs_dir))
    config.mdx_configs["toc"]["slugify"] = lambda text, _separator: slug_of(text)
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Links that leave the folder of the pages become their text and the path of the file."""
    folder = Path(config.docs_dir)
    here = (folder / page.file.src_uri).parent

    def shown(hit: re.Match[str]) -> str:
        path = hit["target"].partition("#")[0]
        file = (here / path).resolve()
        if (
            re.match(r"[a-z]+:|#|$", hit["target"])
            or not path
            or (file.suffix == ".md" and file.is_relative_to(folder))
        ):
            return hit[0]
        name = str(file.relative_to(ROOT))
        return hit["text"] if name in hit["text"] else f"{hit['text']} (`{name}`)"

    return LINK.sub(shown, markdown)


def _ordered(folder: Path) -> list[Any]:
    names = [path.name for path in folder.iterdir() if path.is_dir() or path.suffix == ".md"]
    return [
        entry
        for name in sorted(
            names, key=lambda name: (name == LAST, FIRST.index(name) if name in FIRST else len(FIRST), name)
        )
        for entry in _entries(folder, name)
    ]


def _entries(folder: Path, name: str) -> list[Any]:
    if name.endswith(".md"):
        return [name]
    pages = sorted(path.name for path in (folder / name).glob("*.md"))
    pages.sort(key=lambda page: (page != "index.md", HOWTO.index(page) if page in HOWTO else len(HOWTO)))
    titles = {"howto": "How to", "reference": "Reference"}
    return [{titles.get(name, name.capitalize()): [f"{name}/{page}" for page in pages]}] if pages else []
