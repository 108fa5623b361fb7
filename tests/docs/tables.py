"""The tables of the maintainers' pages, as tests read them."""

from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (PAGES / name).read_text()


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below ``heading`` (a line, ``#`` and all), without its head."""
    lines = text.splitlines()
    at = lines.index(heading) + 1
    rows: list[list[str]] = []
    for line in lines[at:]:
        if line.startswith("#"):
            break
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").replace("\\|", "\0").split("|")])
        elif rows:
            break
    assert len(rows) > 2, f"no table below {heading!r}"
    return [[cell.replace("\0", "|") for cell in row] for row in rows[2:]]


def block(text: str, heading: str) -> str:
    """The first fenced block below ``heading``."""
    _, _, rest = text.partition(f"\n{heading}\n")
    _, _, fenced = rest.partition("```")
    return fenced.partition("```")[0].partition("\n")[2]


def plain(cell: str) -> str:
    """A cell without its back-ticks."""
    return cell.replace("`", "")
