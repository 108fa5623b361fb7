"""Lists of models out of engines' answers: bounded in time and memory, however long the engine makes them.

Of a long list the first ``limits.ENGINE_MODELS`` are looked at and the rest is counted, never decoded.
"""

import zlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from agent.engines.contract import EngineMisspoke
from router_core import limits

INLINE_BYTES: Final = 64 * limits.KIB
"""A body up to here is decoded in less time than a thread takes to be asked."""
ITEM_BYTES: Final = 64 * limits.KIB
_GZIP: Final = 31
_RAW: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])


class EngineList(Struct, frozen=True, kw_only=True):
    """The objects of a list, at most ``limits.ENGINE_MODELS``, and how many ``more`` there are; ``size`` is that of the
    whole answer in bytes."""

    items: tuple[dict[str, Any], ...]
    more: int = 0
    size: int = 0


def read_listing(body: bytes, key: str) -> EngineList:
    """The list at ``key`` of a JSON object. Raises :class:`EngineMisspoke` ``not_json`` or ``shape``."""
    try:
        value = _RAW.decode(body).get(key)
        raws = [] if value is None else _RAWS.decode(value)
    except msgspec.ValidationError:
        raise EngineMisspoke("shape", f"no list at {key}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EngineMisspoke("not_json", f"{len(body)} bytes") from None
    if value is None:
        raise EngineMisspoke("shape", f"no list at {key}")
    kept, more = raws[: limits.ENGINE_MODELS], max(0, len(raws) - limits.ENGINE_MODELS)
    items, left = [], limits.ENGINE_BODY
    for raw in kept:
        size = len(memoryview(raw))
        if size > ITEM_BYTES or size > left:
            more += 1
            continue
        left -= size
        try:
            item = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise EngineMisspoke("not_json", f"{len(body)} bytes") from None
        if isinstance(item, dict):
            items.append(item)
    return EngineList(items=tuple(items), more=more, size=len(body))


def unpacked(body: bytes, headers: Mapping[str, str], cap: int) -> bytes:
    """``body`` without the gzip that some servers use although nobody asked for it. Raises :class:`EngineMisspoke`."""
    if headers.get("content-encoding", "").strip().lower() not in ("gzip", "x-gzip"):
        return body
    reader = zlib.decompressobj(_GZIP)
    try:
        told = reader.decompress(body, cap + 1)
    except zlib.error:
        raise EngineMisspoke("not_json", "broken gzip") from None
    if len(told) > cap:
        raise EngineMisspoke("too_large", f"more than {cap} bytes, at most {cap}")
    return told
