"""``x-pairmesh-route``, ``x-pairmesh-ahead`` and ``x-pairmesh-state``: what a router tells a peer's ingress, and what it
hears back.

An ingress takes a route of exactly these fields, so what came later has a header of its own.
"""

import base64
import binascii
import re

from agent.relay.ports import Routed, RouteHeader
from router_core import limits

_CLASSES = {"interactive": "i", "batch": "b", "background": "g"}
_CLASS_OF = {short: name for name, short in _CLASSES.items()}
_ROUTE = re.compile(
    r"v=1;d=([A-Za-z0-9]{1,32});a=(\d{1,2});e=([a-z0-9][a-z0-9-]{0,31});i=(\d{1,10});s=(\d{1,10});p=(\d{1,9});"
    r"o=(\d{1,9});c=([ibg]);w=(\d{1,9});t=(\d{1,9});r=([01])"
)
_ENDPOINT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_AHEAD = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,3})?")
_SIGNATURE = 64
_NUMBER_MOST = 10**9 - 1
_AHEAD_MOST = 10**6 - 1.0
_U32 = 2**32


def route_of(routed: Routed) -> RouteHeader:
    """What a decision tells the node that is to serve it; counts are cut to what the header can carry."""
    choice = routed.choice
    return RouteHeader(
        decision_id=routed.decision_id,
        attempt=routed.attempt,
        endpoint=choice.endpoint_name,
        inst=routed.inst,
        seq=routed.reservation.route_seq,
        prompt_tokens=min(choice.prompt_tokens, _NUMBER_MOST),
        output_tokens=min(choice.output_tokens, _NUMBER_MOST),
        request_class=routed.stands_as,
        wait_ms=min(routed.left_ms, _NUMBER_MOST),
        left_ms=min(routed.left_ms, _NUMBER_MOST),
        resident=choice.resident,
        ahead=None if choice.ahead is None else min(choice.ahead, _AHEAD_MOST),
    )


def format_route(route: RouteHeader) -> str:
    """The header's value. Raises ``ValueError`` for an endpoint whose name cannot stand in it."""
    if _ENDPOINT.fullmatch(route.endpoint) is None:
        raise ValueError("an endpoint's name that cannot be told")
    return (
        f"v=1;d={route.decision_id};a={route.attempt};e={route.endpoint};i={route.inst};s={route.seq};"
        f"p={route.prompt_tokens};o={route.output_tokens};c={_CLASSES[route.request_class]};"
        f"w={route.wait_ms};t={route.left_ms};r={int(route.resident)}"
    )


def format_ahead(route: RouteHeader) -> str | None:
    """The value of ``x-pairmesh-ahead``, None to send none."""
    return None if route.ahead is None else f"{route.ahead:.3f}"


def parse_route(text: str, ahead: str | None = None) -> RouteHeader | None:
    """The route of a header's value, None if it is not one. ``ahead`` is the value of the header beside it, if there is
    one."""
    told = _ROUTE.fullmatch(text)
    if told is None or (ahead is not None and _AHEAD.fullmatch(ahead) is None):
        return None
    inst, seq = int(told[4]), int(told[5])
    if inst >= _U32 or seq >= _U32:
        return None
    return RouteHeader(
        decision_id=told[1],
        attempt=int(told[2]),
        endpoint=told[3],
        inst=inst,
        seq=seq,
        prompt_tokens=int(told[6]),
        output_tokens=int(told[7]),
        request_class=_CLASS_OF[told[8]],
        wait_ms=int(told[9]),
        left_ms=int(told[10]),
        resident=told[11] == "1",
        ahead=None if ahead is None else float(ahead),
    )


def encode_state(signed: bytes, signature: bytes) -> bytes:
    """A signed record as a header value: base64url of the signature and what it signs."""
    return base64.urlsafe_b64encode(signature + signed).rstrip(b"=")


def decode_state(value: bytes) -> tuple[bytes, bytes] | None:
    """(signed, signature) of a header value, None if it is none or too long. Nothing is verified here."""
    if len(value) > limits.ROUTE_STATE_HEADER:
        return None
    try:
        raw = base64.urlsafe_b64decode(value + b"=" * (-len(value) % 4))
    except (binascii.Error, ValueError):
        return None
    return (raw[_SIGNATURE:], raw[:_SIGNATURE]) if len(raw) > _SIGNATURE else None
