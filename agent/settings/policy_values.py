"""Parsers of the policy's own kinds of values, and their inverses."""

import re
from enum import Enum
from typing import Any, Final

from agent.settings.toml_table import FILE_NAME
from agent.settings.values import Refuse, nearest, number
from router_core.placement.request.names import parse_model_name

COMPARED: Final = ("pair-1.0", "least-count", "round-robin", "p2c")
"""Policies that the simulator plays beside ours. They need what no daemon has, or forget what ours must not."""
ALIASES_MOST: Final = 256
TARGETS_MOST: Final = 8
HEADERS_MOST: Final = 8
MODELS_MOST: Final = 64
NO_PACE: Final = "none"

_HEADER = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_NEVER_A_SESSION = re.compile(
    r"x-pairmesh-.*|authorization|proxy-authorization|cookie|x-api-key|x-request-id"
)


def preset(written: object, refuse: Refuse, *, names: tuple[str, ...], compared: tuple[str, ...]) -> str:
    """The name of a preset."""
    if written in compared:
        refuse("serves for comparison alone; scripts/simulate placement plays it")
    elif written not in names:
        refuse("unknown preset", meant=nearest(written, names) if isinstance(written, str) else None)
    return str(written)


def seconds(shown_ms: int) -> float | int:
    """Milliseconds as seconds, whole where they are."""
    whole, rest = divmod(shown_ms, 1000)
    return shown_ms / 1000 if rest else whole


def pace(written: object, refuse: Refuse) -> float | None:
    """Seconds per token, None for no target."""
    if written == NO_PACE:
        return None
    found = number(written)
    if found is None or not 0.001 <= found <= 60:
        refuse("neither a pace nor none")
        return None
    return found


def shown_pace(value: float | None) -> object:
    """A pace as policy.toml writes it."""
    return NO_PACE if value is None else value


def aliases(written: object, refuse: Refuse) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A table of aliases: the models that each one names."""
    if not isinstance(written, dict):
        refuse("not a table")
        return ()
    if len(written) > ALIASES_MOST:
        refuse("too many aliases", value=len(written), allowed=f"at most {ALIASES_MOST}")
        return ()
    found = []
    for alias, targets in written.items():
        if parse_model_name(alias) is None:
            refuse("not a model's name", at=alias, value=alias)
        found.append((alias, _models(targets, refuse, alias, TARGETS_MOST)))
        if targets == []:
            refuse("names no model", at=alias, value=targets)
    return tuple(found)


def shown_aliases(value: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, Any]:
    """Aliases as policy.toml writes them."""
    return {alias: list(targets) for alias, targets in value}


def models(written: object, refuse: Refuse) -> tuple[str, ...]:
    """A list of model names."""
    return _models(written, refuse, "", MODELS_MOST)


def penalties(written: object, refuse: Refuse) -> tuple[float, ...]:
    """Of quant, family and any, in this order."""
    found = [number(item) for item in written] if isinstance(written, list) else []
    known = tuple(item for item in found if item is not None and 0 <= item <= 1)
    if len(known) != 3 or len(found) != 3:
        refuse("not three costs")
    return known


def member(written: object, refuse: Refuse, *, kind: type[Enum]) -> Enum:
    """The member of ``kind`` that has this value."""
    for known in kind:
        if written == known.value:
            return known
    names = [known.value for known in kind]
    refuse("unknown choice", meant=nearest(written, names) if isinstance(written, str) else None)
    return next(iter(kind))


def shown_member(value: Enum) -> object:
    """A member of an enum as policy.toml writes it."""
    return value.value


def credential(written: object, refuse: Refuse) -> str | None:
    """The name of a file beside the other credentials; empty for none."""
    if written == "":
        return None
    if not isinstance(written, str) or not re.fullmatch(FILE_NAME, written):
        refuse("not a file's name")
        return None
    return written


def shown_credential(value: str | None) -> str:
    """A credential's file name as policy.toml writes it, empty for none."""
    return value or ""


def headers(written: object, refuse: Refuse) -> tuple[str, ...]:
    """Header names, lower case; none whose value is a secret or ours."""
    found = []
    for item in _texts(written, refuse, "", HEADERS_MOST):
        name = item.lower()
        if not _HEADER.fullmatch(name):
            refuse("not a header's name", value=item.partition(":")[0])
        elif _NEVER_A_SESSION.fullmatch(name):
            refuse("may not name a session", value=item)
        found.append(name)
    return tuple(found)


def _models(written: object, refuse: Refuse, at: str, most: int) -> tuple[str, ...]:
    found = _texts(written, refuse, at, most)
    for item in found:
        if parse_model_name(item) is None:
            refuse("not a model's name", at=at, value=item)
    return tuple(found)


def _texts(written: object, refuse: Refuse, at: str, most: int) -> list[str]:
    if not isinstance(written, list) or not all(isinstance(item, str) for item in written):
        refuse("not a list of text", at=at, value=written)
        return []
    if len(written) > most:
        refuse("too many entries", at=at, value=len(written), allowed=f"at most {most}")
        return []
    for index, item in enumerate(written):
        if item in written[:index]:
            refuse("listed twice", at=at, value=item)
    return written
