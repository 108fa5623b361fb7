"""Model names: what is a name, and when two of them mean the same model.

Rules: names are normalised on both sides and then compared byte for byte; no prefix, substring or case-folded match,
ever. A digest, where an engine gives one, is the identity. It does not know who offers what.
"""

import re
from collections.abc import Iterable

from msgspec import Struct

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_PIN = re.compile(r"@sha256:([0-9a-f]{64})")
_DEFAULT_TAG = ":latest"
_NAMES_COMPARED = 512
_ALIKE = 0.3


class ModelName(Struct, frozen=True, gc=False, kw_only=True):
    """A model name, normalised. ``tagged`` is the form in which Ollama's offerings are compared."""

    name: str
    tagged: str
    digest: bytes | None = None


def parse_model_name(text: str) -> ModelName | None:
    """``text`` as a normalised model name, or None if it is none.

    A registry host in front is case-folded; the default registry and its ``library/`` are dropped; a trailing
    ``@sha256:<64 hex>`` becomes the pinned digest.
    """
    if not _NAME.fullmatch(text) or ".." in text or "//" in text:
        return None
    digest = None
    pin = _PIN.search(text)
    if pin is not None and pin.end() == len(text):
        digest = bytes.fromhex(pin.group(1))
        text = text[: pin.start()]
    first, slash, rest = text.partition("/")
    if slash and rest and ("." in first or ":" in first or first.lower() == "localhost"):
        text = f"{first.lower()}/{rest}"
    text = text.removeprefix("registry.ollama.ai/").removeprefix("library/")
    if not text:
        return None
    tagged = text if ":" in text.rpartition("/")[2] else text + _DEFAULT_TAG
    return ModelName(name=text, tagged=tagged, digest=digest)


def nearest(name: str, offered: Iterable[str], most: int) -> tuple[str, ...]:
    """Up to ``most`` offered names that look like ``name``, best first: a help for people, never a match.

    Likeness is the share of common letter triples (Jaccard); at most 512 names are compared.
    """
    wanted = _triples(name)
    ranked: list[tuple[float, str]] = []
    for other, _ in zip(sorted(set(offered)), range(_NAMES_COMPARED), strict=False):
        theirs = _triples(other)
        alike = len(wanted & theirs) / len(wanted | theirs)
        if alike >= _ALIKE:
            ranked.append((-alike, other))
    return tuple(other for _, other in sorted(ranked)[:most])


def _triples(name: str) -> set[str]:
    padded = f"  {name.lower()} "
    return {padded[i : i + 3] for i in range(len(padded) - 2)}
