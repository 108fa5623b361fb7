"""Ollama's lists, written as its own clients read them. What is unknown is the empty value they know: "" or 0."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from agent.relay.dialects.ollama import NATIVE
from agent.relay.ports import Held, Offered

_NO_TIME = "1970-01-01T00:00:00Z"
_DIGITS = re.compile(r"\d+")


def tags_of(offered: Iterable[Offered]) -> bytes:
    """``/api/tags``: one entry per name and digest; an offer without a digest is no model of its own if another offer
    of that name has one."""
    kept: dict[tuple[str, bytes | None], Offered] = {}
    for each in offered:
        known = kept.get((each.name, each.digest))
        if known is None or (known.modified_at is None and each.modified_at is not None):
            kept[each.name, each.digest] = each
    digested = {name for name, digest in kept if digest is not None}
    listed = [each for (name, digest), each in kept.items() if digest is not None or name not in digested]
    listed.sort(key=lambda each: (each.name, each.digest or b""))
    return msgspec.json.encode({"models": [_tag(each) for each in listed]})


def ps_of(held: Iterable[Held]) -> bytes:
    """``/api/ps``: every one of ``held`` with a dialect of Ollama, by name."""
    listed = [each for each in held if each.offered.dialects & NATIVE]
    listed.sort(key=lambda each: each.offered.name)
    return msgspec.json.encode({"models": [_running(each) for each in listed]})


def least_version(versions: Iterable[str]) -> str | None:
    """The lowest of ``versions``, compared number by number."""
    return min(versions, key=lambda told: [int(part) for part in _DIGITS.findall(told)], default=None)


def _tag(offered: Offered) -> dict[str, Any]:
    return {
        "name": offered.name,
        "model": offered.name,
        "modified_at": offered.modified_at or _NO_TIME,
        "size": offered.size_bytes or 0,
        "digest": _digest(offered),
        "details": _details(offered),
    }


def _running(held: Held) -> dict[str, Any]:
    """Where it is not known how much is on GPUs, both sizes are 0: Ollama's client shows that as unknown."""
    share, size = held.vram_share_pct, held.size_bytes or 0
    told: dict[str, Any] = {
        "name": held.offered.name,
        "model": held.offered.name,
        "size": size if share is not None else 0,
        "digest": _digest(held.offered),
        "details": _details(held.offered),
    }
    if held.expires_ms is not None:
        at = datetime.fromtimestamp(held.expires_ms / 1_000, UTC)
        told["expires_at"] = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    told["size_vram"] = size * share // 100 if share is not None else 0
    if held.ctx is not None:
        told["context_length"] = held.ctx
    return told


def _digest(offered: Offered) -> str:
    return offered.digest.hex() if offered.digest is not None else ""


def _details(offered: Offered) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": offered.format or "",
        "family": offered.family or "",
        "families": [offered.family] if offered.family else [],
        "parameter_size": _parameters(offered.params_m),
        "quantization_level": offered.quant or "",
    }


def _parameters(millions: int | None) -> str:
    if millions is None:
        return ""
    return f"{millions / 1_000:.1f}B" if millions >= 1_000 else f"{millions}M"
