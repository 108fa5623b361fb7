"""Routing hints of one request: ``x-pairmesh-*`` headers and the body's ``pairmesh`` object, parsed.

Rules: header beats body beats policy; a malformed narrowing hint refuses the request, a malformed advisory one is
ignored and noted; a note never repeats what the client sent. It does not know which nodes exist: whether a
reference means anything is found out against the fleet.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from router_core import limits
from router_core.ids import parse_marked_name, parse_node_id
from router_core.placement.reasons import HintOutcome
from router_core.placement.request.request import (
    NO_HINTS,
    HintNote,
    Hints,
    Locality,
    Match,
    NodeRef,
    RequestClass,
)
from router_core.record.spelling import CAPABILITIES
from router_core.record.state import Capability

PREFIX: Final = "x-pairmesh-"
TRANSPORT: Final = frozenset({PREFIX + name for name in ("route", "state", "model", "length")})
"""Headers of the mesh itself: dropped when a client sends them, never hints."""
NARROWING: Final = frozenset({"require", "locality"})
"""Hints that restrict the rows: malformed, they refuse the request."""

_LISTS = frozenset({"prefer", "require"})
_KEYS = (
    "prefer",
    "require",
    "match",
    "locality",
    "class",
    "slo_ttft_ms",
    "slo_tpot_ms",
    "deadline_ms",
    "expect_tokens",
)
_RANGES = {
    "slo_ttft_ms": (1, 3_600_000),
    "slo_tpot_ms": (1, 60_000),
    "deadline_ms": (1, 3_600_000),
    "expect_tokens": (0, 1_000_000),
}
_IN_BODY = frozenset({*_KEYS, "session"})
_TWICE: Final = ()
"""The value of a key that is told twice: no hint understands it."""
_HEADER_OF = {key: PREFIX + key.replace("_", "-") for key in _KEYS}
_KEY_OF = {header: key for key, header in _HEADER_OF.items()}
_TERM = re.compile(r"(!?)([a-z]+)(>=|=)(\S+)")
_ENDPOINT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_ENGINE = re.compile(r"[a-z0-9][a-z0-9-]{0,23}")
_LABEL = re.compile(r"([^\s,:=]{1,32}):([^\s,]{1,32})")
_DIGITS = re.compile(r"[0-9]{1,9}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,3})?")
_SESSION = re.compile(r"[\x21-\x7e]{1,128}")
_CLASS_RANK = {RequestClass.BACKGROUND: 0, RequestClass.BATCH: 1, RequestClass.INTERACTIVE: 2}


class Grants(Struct, frozen=True, gc=False, kw_only=True):
    """What a caller may ask for; the operator's policy caps everybody besides. The default is the local caller."""

    prefer: bool = True
    class_cap: RequestClass = RequestClass.INTERACTIVE
    locality_cap: Locality = Locality.ANY
    match_cap: Match = Match.ANY


LOCAL: Final = Grants()


class HintFault(Struct, frozen=True, gc=False, kw_only=True):
    """A narrowing hint that cannot be understood: the request is refused with ``hint_malformed``. ``detail`` says what is
    wrong and what is allowed, and repeats nothing of what was sent; ``in_header`` where the hint stood."""

    hint: str
    detail: str
    in_header: bool = False

    @property
    def where(self) -> str:
        """The header or the member of the body, as clients write it."""
        if self.in_header:
            return _HEADER_OF.get(self.hint, f"{PREFIX}*")
        return self.hint if self.hint == "pairmesh" else f"pairmesh.{self.hint}"


def parse_hints(
    headers: Sequence[tuple[str, str]],
    body: bytes | None = None,
    grants: Grants = LOCAL,
    session_headers: tuple[str, ...] = (),
) -> Hints | HintFault:
    """Hints from ``headers`` (lower-case names) and ``body``, the JSON text of the top-level ``pairmesh`` member.

    The result holds only what could be understood; ``notes`` tells the rest. ``session`` is left as the client sent
    it and must be hashed before it is kept.
    """
    if not headers and body is None and grants is LOCAL:
        return NO_HINTS
    notes: list[HintNote] = []
    told: dict[str, Any] = {}
    fault = _read_body(body, told, notes)
    if fault is not None:
        return fault
    session = _read_headers(headers, told, notes, session_headers)
    if isinstance(session, HintFault):
        return session
    fields: dict[str, Any] = {}
    for key in _KEYS:
        if key not in told:
            continue
        parsed = _PARSERS[key](key, told[key])
        if isinstance(parsed, str):
            in_header = any(name == _HEADER_OF[key] for name, _ in headers)
            return HintFault(hint=key, detail=parsed, in_header=in_header)
        if parsed is None:
            notes.append(HintNote(hint=key, outcome=HintOutcome.IGNORED_MALFORMED))
        else:
            fields.update(parsed)
    said = told.get("session") if session is None else session
    session = said if isinstance(said, str) and _SESSION.fullmatch(said) else None
    if said is not None and session is None:
        notes.append(HintNote(hint="session", outcome=HintOutcome.IGNORED_MALFORMED))
    _clamp(fields, grants, notes)
    if not fields and not notes and session is None:
        return NO_HINTS
    return Hints(
        session=session, told=tuple(key for key in _KEYS if key in told), notes=tuple(notes), **fields
    )


def _read_body(body: bytes | None, told: dict[str, Any], notes: list[HintNote]) -> HintFault | None:
    if body is None:
        return None
    if len(body) > limits.HINT_HEADERS:
        return HintFault(hint="pairmesh", detail=f"longer than {limits.HINT_HEADERS} bytes")
    try:
        members = msgspec.json.decode(body)
        repeated = _repeated(body) if isinstance(members, dict) else set()
    except (msgspec.DecodeError, RecursionError):
        return HintFault(hint="pairmesh", detail="not JSON")
    if members is None:
        return None
    if not isinstance(members, dict):
        return HintFault(hint="pairmesh", detail="not an object")
    told.update((key, value) for key, value in members.items() if key in _IN_BODY and value is not None)
    told.update((key, _TWICE) for key in repeated & _IN_BODY)
    if not members.keys() <= _IN_BODY:
        notes.append(HintNote(hint="pairmesh", outcome=HintOutcome.IGNORED_UNKNOWN))
    return None


def _repeated(body: bytes) -> set[str]:
    """The keys that stand twice in a JSON object: readers disagree about which of their values is meant."""
    counts = Counter(key for key, _ in json.loads(body, object_pairs_hook=list))
    return {key for key, count in counts.items() if count > 1}


def _read_headers(
    headers: Iterable[tuple[str, str]],
    told: dict[str, Any],
    notes: list[HintNote],
    session_headers: tuple[str, ...],
) -> str | HintFault | None:
    """What names the session: None if nothing does, empty, which is no name, if it is told twice."""
    size = 0
    seen: dict[str, list[str]] = {}
    own: list[str] = []
    named: str | None = None
    for name, value in headers:
        if name.startswith(PREFIX):
            if name in TRANSPORT:
                continue
            size += len(name) + len(value)
            seen.setdefault(name, []).append(value)
        elif name == "x-session-id":
            own.append(value)
        elif named is None and name in session_headers:
            named = value
    if size > limits.HINT_HEADERS:
        detail = f"longer than {limits.HINT_HEADERS} bytes together"
        return HintFault(hint="headers", detail=detail, in_header=True)
    for name, values in seen.items():
        key = _KEY_OF.get(name)
        if key in _LISTS:
            told[key] = ",".join(values)
        elif key is not None:
            told[key] = values[0] if len(values) == 1 else None
    if not seen.keys() <= _KEY_OF.keys():
        notes.append(HintNote(hint="header", outcome=HintOutcome.IGNORED_UNKNOWN))
    if len(own) > 1:
        return ""
    return own[0] if own else named


def _clamp(fields: dict[str, Any], grants: Grants, notes: list[HintNote]) -> None:
    if fields.get("prefer") and not grants.prefer:
        del fields["prefer"]
        notes.append(HintNote(hint="prefer", outcome=HintOutcome.IGNORED_UNAUTHORISED))
    if fields.get("match", Match.EXACT).level > grants.match_cap.level:
        fields["match"] = grants.match_cap
        notes.append(HintNote(hint="match", outcome=HintOutcome.CLAMPED))
    asked = fields.get("request_class", RequestClass.INTERACTIVE)
    if _CLASS_RANK[asked] > _CLASS_RANK[grants.class_cap]:
        fields["request_class"] = grants.class_cap
        notes.append(HintNote(hint="class", outcome=HintOutcome.CLAMPED))
    locality = fields.get("locality", Locality.MESH)
    if locality.level > grants.locality_cap.level:
        fields["locality"] = grants.locality_cap
        notes.append(HintNote(hint="locality", outcome=HintOutcome.CLAMPED))


def parse_ref(text: str) -> NodeRef | None:
    """A node reference, ``<node_id>``, ``@name`` or ``@name~xxxx``, each with ``/endpoint``; None if it is none."""
    who, slash, endpoint = text.partition("/")
    if slash and not _ENDPOINT.fullmatch(endpoint):
        return None
    if who.startswith("@"):
        named = parse_marked_name(who[1:])
        if named is None:
            return None
        return NodeRef(text=text, name=named[0], mark=named[1], endpoint=endpoint or None)
    node_id = parse_node_id(who)
    return None if node_id is None else NodeRef(text=text, node_id=node_id, endpoint=endpoint or None)


def _items(value: Any, most: int) -> list[str] | None:
    if not isinstance(value, str):
        return None
    items = [item.strip(" \t") for item in value.split(",")]
    return items if len(items) <= most and all(items) else None


def _prefer(_key: str, value: Any) -> dict[str, Any] | None:
    items = _items(value, limits.PREFER_REFS)
    refs = [parse_ref(item) for item in items] if items is not None else [None]
    if any(ref is None for ref in refs):
        return None
    return {"prefer": tuple(refs)}


def _require(_key: str, value: Any) -> dict[str, Any] | str:
    if not isinstance(value, str):
        return "must be told once, as one text of terms with commas between them"
    items = [item.strip(" \t") for item in value.split(",")]
    if len(items) > limits.REQUIRE_TERMS:
        return f"holds {len(items)} terms: at most {limits.REQUIRE_TERMS} are allowed"
    lists: dict[str, list[Any]] = {}
    caps = Capability(0)
    least: dict[str, float] = {}
    for number, item in enumerate(items, start=1):
        term = _TERM.fullmatch(item)
        if term is None:
            return f"term {number} is not of the form KEY=VALUE, !KEY=VALUE or KEY>=NUMBER, {_KEYS_ALLOWED}"
        negated, key, op, text = term.groups()
        if key in _FLOORS:
            if negated or op != ">=" or not _NUMBER.fullmatch(text):
                return f"term {number}: {key} takes >= and a number"
            least[key] = max(least.get(key, 0.0), float(text) if "." in text else int(text))
        elif op != "=" or key not in _ALLOWED:
            return f"term {number} is none that is known: {_KEYS_ALLOWED}"
        elif key in _NAMED:
            parsed = _NAMED[key](text)
            if parsed is None:
                return f"term {number}: {key} takes {_ALLOWED[key]}"
            lists.setdefault(f"{'refuses' if negated else 'requires'}_{key}", []).append(parsed)
        elif negated or text not in CAPABILITIES:
            return f"term {number}: {key} takes {_ALLOWED[key]}"
        else:
            caps |= CAPABILITIES[text]
    fields: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
    if caps:
        fields["requires_caps"] = caps
    if "ctx" in least:
        fields["ctx_least"] = math.ceil(least["ctx"])
    if "params" in least:
        fields["params_least_m"] = int(least["params"] * 1000)
    if "bits" in least:
        fields["bits_least"] = float(least["bits"])
    return fields


_FLOORS = frozenset({"ctx", "params", "bits"})
_ALLOWED = {
    "node": "@NAME, @NAME~xxxx or a node id of 52 characters, and /ENDPOINT behind it if one of its endpoints is meant",
    "engine": "the name of an engine in lower case",
    "label": "KEY:VALUE, each of at most 32 characters",
    "cap": f"one of {' '.join(CAPABILITIES)}, without !",
}
_KEYS_ALLOWED = "where KEY is one of node engine label cap with =, or ctx params bits with >="


def _engine(text: str) -> str | None:
    return text if _ENGINE.fullmatch(text) else None


def _label(text: str) -> tuple[str, str] | None:
    pair = _LABEL.fullmatch(text)
    return None if pair is None else (pair.group(1), pair.group(2))


_NAMED: dict[str, Callable[[str], Any]] = {"node": parse_ref, "engine": _engine, "label": _label}


def _whole(key: str, value: Any) -> dict[str, Any] | None:
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    low, high = _RANGES[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        return None
    return {key: value}


def _match(_key: str, value: Any) -> dict[str, Any] | None:
    match = _MATCHES.get(value) if isinstance(value, str) else None
    return None if match is None else {"match": match}


def _locality(_key: str, value: Any) -> dict[str, Any] | str:
    locality = _LOCALITIES.get(value) if isinstance(value, str) else None
    return (
        f"must be told once, as one of {' '.join(_LOCALITIES)}"
        if locality is None
        else {"locality": locality}
    )


def _class(_key: str, value: Any) -> dict[str, Any] | None:
    request_class = _CLASSES.get(value) if isinstance(value, str) else None
    return None if request_class is None else {"request_class": request_class}


_MATCHES = {match.value: match for match in Match}
_LOCALITIES = {locality.value: locality for locality in Locality}
_CLASSES = {request_class.value: request_class for request_class in RequestClass}
_PARSERS: dict[str, Callable[[str, Any], dict[str, Any] | str | None]] = {
    "prefer": _prefer,
    "require": _require,
    "match": _match,
    "locality": _locality,
    "class": _class,
    "slo_ttft_ms": _whole,
    "slo_tpot_ms": _whole,
    "deadline_ms": _whole,
    "expect_tokens": _whole,
}
