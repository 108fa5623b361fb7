"""Reading facts out of foreign JSON: the right type or None, never a guess and never an exception."""

from typing import Any

from agent.engines.contract import EngineMisspoke

TEXT_MOST = 1_024


def text(tree: Any, *path: str) -> str | None:
    """A non-empty string of at most ``TEXT_MOST`` characters at ``path``."""
    value = _at(tree, path)
    return value if isinstance(value, str) and 0 < len(value) <= TEXT_MOST else None


def whole(tree: Any, *path: str) -> int | None:
    """A whole number >= 0 at ``path``."""
    value = _at(tree, path)
    ok = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return value if ok else None


def number(tree: Any, *path: str) -> float | None:
    """A number >= 0 at ``path``."""
    value = _at(tree, path)
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18
    return float(value) if ok else None


def truth(tree: Any, *path: str) -> bool | None:
    """A boolean at ``path``."""
    value = _at(tree, path)
    return value if isinstance(value, bool) else None


def texts(tree: Any, *path: str) -> tuple[str, ...]:
    """The strings of a list at ``path``."""
    value = _at(tree, path)
    found = value if isinstance(value, list) else []
    return tuple(item for item in found if isinstance(item, str) and 0 < len(item) <= TEXT_MOST)


def objects(tree: Any, *path: str) -> list[dict[str, Any]]:
    """The objects of a list that must be there. Raises :class:`EngineMisspoke` ``shape``."""
    value = _at(tree, path)
    if not isinstance(value, list):
        raise EngineMisspoke("shape", f"no list at {'.'.join(path) or 'top'}")
    return [item for item in value if isinstance(item, dict)]


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
