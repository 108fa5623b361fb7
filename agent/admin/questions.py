"""What the dry runs take: strict JSON bodies with limits, every fault told at once.

Nothing that was sent comes back: a fault names a field of ours and what it takes. What is wrong in the text of a
policy is for its own reader to say.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Final, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from router_core import limits
from router_core.placement.request.request import Locality, Match, RequestClass
from router_core.record.spelling import CAPABILITIES, DIALECTS

T = TypeVar("T", bound=Struct)

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

PROMPT_TOKENS: Final = 1_000
HEADERS: Final = 32
POLICY_CHARS: Final = 65_536
_DIALECT: Final = rf"\A({'|'.join(DIALECTS)})\Z"
_CAPABILITY: Final = rf"\A({'|'.join(CAPABILITIES)})\Z"


def _one_of(words: type[Enum] | Iterable[str]) -> str:
    names = [str(word.value) for word in words] if isinstance(words, type) else words
    return f"one of {' '.join(names)}"


def _whole(least: int, most: int) -> Meta:
    return Meta(ge=least, le=most, description=f"a whole number from {least} to {most:,}")


Capable = Annotated[str, Meta(pattern=_CAPABILITY)]
HeaderName = Annotated[str, Meta(min_length=1, max_length=64)]
HeaderValue = Annotated[str, Meta(max_length=limits.HINT_HEADERS)]


class ExplainBody(Struct, frozen=True, kw_only=True):
    """A request that nobody sends: the facts of ``req`` in a record, and the headers it would come with.

    ``prompt_tokens`` counts the whole prompt, images included; ``output_tokens`` None is as many as usual. A hint
    among ``headers`` beats the fact of its name.
    """

    model: Annotated[str, Meta(min_length=1, max_length=128, description="the name of a model")]
    dialect: Annotated[str, Meta(pattern=_DIALECT, description=_one_of(DIALECTS))] = "chat"
    stream: Annotated[bool, Meta(description="true or false")] = True
    requires: Annotated[
        tuple[Capable, ...],
        Meta(max_length=len(CAPABILITIES), description=f"a list, each {_one_of(CAPABILITIES)}"),
    ] = ()
    prompt_tokens: Annotated[int, _whole(0, 10_000_000)] = PROMPT_TOKENS
    output_tokens: Annotated[int, _whole(0, 1_000_000)] | None = None
    ctx_need: Annotated[int, _whole(1, 10_000_000)] | None = None
    images: Annotated[int, _whole(0, 1_000)] = 0
    request_class: Annotated[RequestClass, Meta(description=_one_of(RequestClass))] | None = msgspec.field(
        default=None, name="class"
    )
    match: Annotated[Match, Meta(description=_one_of(Match))] | None = None
    locality: Annotated[Locality, Meta(description=_one_of(Locality))] | None = None
    slo_ttft_ms: Annotated[int, _whole(1, 3_600_000)] | None = None
    slo_tpot_ms: Annotated[int, _whole(1, 60_000)] | None = None
    deadline_ms: Annotated[int, _whole(1, 3_600_000)] | None = None
    headers: Annotated[
        dict[HeaderName, HeaderValue],
        Meta(
            max_length=HEADERS, description=f"an object of at most {HEADERS} header names with their values"
        ),
    ] = {}


class ReplayBody(Struct, frozen=True, kw_only=True):
    """A stored decision by its ``id``; ``policy`` is the text of a policy.toml, without it the policy in force."""

    id: Annotated[str, Meta(min_length=1, max_length=64, description="the id of a decision")]
    policy: Annotated[str, Meta(max_length=POLICY_CHARS, description="the text of a policy.toml")] | None = (
        None
    )


def takes(kind: type[Struct]) -> dict[str, str]:
    """What each field of ``kind`` takes, in words."""
    return {
        field.encode_name: next(
            str(told.description)
            for part in (field.type, *get_args(field.type))
            for told in get_args(part)
            if isinstance(told, Meta)
        )
        for field in fields(kind)
    }


def read_body(body: bytes, kind: type[T]) -> T | tuple[str, ...]:
    """``body`` as ``kind``, or all that is wrong with it."""
    try:
        tree = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return ("the body must be one JSON object",)
    values, faults, wanted = {}, [], takes(kind)
    for field in fields(kind):
        name = field.encode_name
        if name not in tree:
            if field.required:
                faults.append(f"{name}: missing; takes {wanted[name]}")
            continue
        try:
            values[field.name] = msgspec.json.decode(tree[name], type=field.type)
        except UNREADABLE:
            faults.append(f"{name}: takes {wanted[name]}")
    unknown = len(tree.keys() - wanted.keys())
    if unknown:
        faults.append(f"{unknown} unknown; known are {' '.join(wanted)}")
    return tuple(faults) if faults else kind(**values)
