"""Ollama's lists, written as its own clients read them: what is unknown is a value that they can show."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

from agent.relay.dialects.ollama import NATIVE
from agent.relay.ports import Held, Offered

_NO_TIME = "1970-01-01T00:00:00Z"
_NO_DIGEST = "0" * 64
"""Ollama's own client cuts a digest at its twelfth letter, and breaks where there is none."""
_KEEP_ALIVE_MS = 300_000
"""How long an Ollama server keeps a model by default; it tells so itself while it does not know better."""
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


def ps_of(held: Iterable[Held], wall_ms: int) -> bytes:
    """``/api/ps`` at ``wall_ms``: every one of ``held`` with a dialect of Ollama, by name."""
    listed = [each for each in held if each.offered.dialects & NATIVE]
    listed.sort(key=lambda each: each.offered.name)
    return msgspec.json.encode({"models": [_running(each, wall_ms) for each in listed]})


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


def _running(held: Held, wall_ms: int) -> dict[str, Any]:
    """Where it is not known how much is on GPUs, more is told to be than there is: Ollama's client shows that as unknown,
    and nothing there as all on the CPU."""
    share, size = held.vram_share_pct, held.size_bytes or held.offered.size_bytes or 0
    at_ms = wall_ms + _KEEP_ALIVE_MS if held.expires_ms is None else held.expires_ms
    at = datetime.fromtimestamp(at_ms / 1_000, UTC)
    told: dict[str, Any] = {
        "name": held.offered.name,
        "model": held.offered.name,
        "size": size,
        "digest": _digest(held.offered),
        "details": _details(held.offered),
        "expires_at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "size_vram": size * share // 100 if share is not None and size else size + 1,
    }
    if held.ctx is not None:
        told["context_length"] = held.ctx
    return told


def _digest(offered: Offered) -> str:
    return offered.digest.hex() if offered.digest is not None else _NO_DIGEST


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
