"""The receive pipeline: from the bytes of one record to a verdict, cheapest test first.

Header, membership, stamp, floor, rate, signature, own id, equivocation, body, in this order. Verification precedes
storing, so what is relayed was always verified. It judges and raises the link's ``known``; what follows from a
verdict (store, ratchet, BYE, alarm) is the machine's. Nothing a peer sends raises out of here.
"""

from collections import Counter
from enum import Enum
from typing import Final

from msgspec import Struct

from router_core.errors import RemoteFault
from router_core.ids import Id16
from router_core.mesh.links.bucket import Bucket
from router_core.mesh.links.link import Link
from router_core.mesh.protocol.messages import ByeCode
from router_core.mesh.records.origin import Body, Origin
from router_core.record.codec import decode_leave, decode_static, decode_volatile
from router_core.record.crypto import Verifier
from router_core.record.envelope import Header, Sealed, read_header, verify
from router_core.record.stamp import Stamp, StampVerdict
from router_core.record.state import Kind, Role

MAY_SPEAK: Final = Role.NODE | Role.ROUTER


class DropReason(Enum):
    """What became of one message or record; the label of its counter."""

    ACCEPTED = "accepted"
    TOO_BIG = "too_big"
    UNKNOWN_TYPE = "unknown_type"
    MALFORMED = "malformed"
    BAD_HEADER = "bad_header"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNKNOWN_KIND = "unknown_kind"
    OVER_CAP = "over_cap"
    WRONG_MESH = "wrong_mesh"
    UNKNOWN_ORIGIN = "unknown_origin"
    REMOVED_ORIGIN = "removed_origin"
    NO_ROLE = "no_role"
    QUARANTINED = "quarantined"
    DUPLICATE = "duplicate"
    OLDER = "older"
    BELOW_FLOOR = "below_floor"
    RATE = "rate"
    BAD_SIGNATURE = "bad_signature"
    OWN = "own"
    EQUIVOCATION = "equivocation"
    BAD_BODY = "bad_body"
    FLOODING = "flooding"


PENALTIES: Final = {
    DropReason.TOO_BIG: ByeCode.PROTOCOL,
    DropReason.UNKNOWN_TYPE: ByeCode.PROTOCOL,
    DropReason.MALFORMED: ByeCode.PROTOCOL,
    DropReason.BAD_HEADER: ByeCode.PROTOCOL,
    DropReason.OVER_CAP: ByeCode.PROTOCOL,
    DropReason.WRONG_MESH: ByeCode.WRONG_MESH,
    DropReason.BAD_SIGNATURE: ByeCode.BAD_SIGNATURE,
}
"""Reasons that end the link they came by. All others are dropped without penalty."""

_DROPPED: Final = {
    StampVerdict.DUPLICATE: DropReason.DUPLICATE,
    StampVerdict.OLDER: DropReason.OLDER,
    StampVerdict.BELOW_FLOOR: DropReason.BELOW_FLOOR,
}
_NO_HEADER: Final = "none"


class Judgement(Struct, frozen=True, kw_only=True):
    """``header`` from step 4 on; ``origin`` and ``body`` with ``ACCEPTED`` alone."""

    reason: DropReason
    sealed: Sealed
    header: Header | None = None
    origin: Origin | None = None
    body: Body | None = None
    verified: bool = False


class Receiver:
    """Judges records for one node. ``counts`` is keyed by (kind, reason); ``disputes`` limits how many contradicting
    records from outside links are verified."""

    def __init__(self, own: Id16, key32: bytes, verifier: Verifier, disputes: Bucket) -> None:
        self._own = own
        self.disputes = disputes
        self._key32 = key32
        self._verifier = verifier
        self.mesh8 = bytes(8)
        self.origins: dict[Id16, Origin] = {}
        self.removed: dict[Id16, None] = {}
        self.counts: Counter[tuple[str, str]] = Counter()

    def judge(self, sealed: Sealed, link: Link | None, now: int) -> Judgement:
        """The verdict on one record that came over ``link``, or from outside links."""
        judgement = self._judge(sealed, link, now)
        kind = Kind(judgement.header.kind).name if judgement.header is not None else _NO_HEADER
        self.counts[kind, judgement.reason.value] += 1
        return judgement

    def count_message(self, reason: DropReason) -> None:
        """A whole message was refused."""
        self.counts[_NO_HEADER, reason.value] += 1

    def _judge(self, sealed: Sealed, link: Link | None, now: int) -> Judgement:
        try:
            header = read_header(sealed.signed, self.mesh8)
        except RemoteFault as fault:
            return Judgement(reason=DropReason(fault.reason), sealed=sealed)
        id16 = Id16(header.id16)
        if id16 == self._own:
            if not self._may_dispute(link, now):
                return Judgement(reason=DropReason.RATE, sealed=sealed, header=header)
            genuine = verify(sealed, self._key32, self._verifier)
            reason = DropReason.OWN if genuine else DropReason.BAD_SIGNATURE
            return Judgement(reason=reason, sealed=sealed, header=header, verified=True)
        origin = self.origins.get(id16)
        if origin is None:
            stranger = DropReason.REMOVED_ORIGIN if id16 in self.removed else DropReason.UNKNOWN_ORIGIN
            return Judgement(reason=stranger, sealed=sealed, header=header)
        verdict = self._stamp_verdict(origin, header, sealed.signed)
        refusal = self._refusal(origin, header, verdict, link, now)
        if refusal is not None:
            return Judgement(reason=refusal, sealed=sealed, header=header)
        if not self._is_genuine(origin, sealed):
            return Judgement(reason=DropReason.BAD_SIGNATURE, sealed=sealed, header=header, verified=True)
        if verdict is StampVerdict.EQUIVOCATION:
            return Judgement(reason=DropReason.EQUIVOCATION, sealed=sealed, header=header, verified=True)
        body = _read_body(header)
        if body is None:
            origin.quarantine(now)
            return Judgement(
                reason=DropReason.BAD_BODY, sealed=sealed, header=header, origin=origin, verified=True
            )
        return Judgement(
            reason=DropReason.ACCEPTED, sealed=sealed, header=header, origin=origin, body=body, verified=True
        )

    def _refusal(
        self, origin: Origin, header: Header, verdict: StampVerdict, link: Link | None, now: int
    ) -> DropReason | None:
        """What stands against the record before its signature is looked at."""
        if not origin.member.roles & MAY_SPEAK:
            return DropReason.NO_ROLE
        if now < origin.quarantined_until:
            return DropReason.QUARANTINED
        if link is not None:
            link.raise_known((origin.id16, Kind(header.kind)), Stamp(header.epoch, header.seq))
        if verdict is StampVerdict.EQUIVOCATION:
            return None if self._may_dispute(link, now) else DropReason.RATE
        if (dropped := _DROPPED.get(verdict)) is not None:
            return dropped
        return None if origin.bucket.take(now) else DropReason.RATE

    def _may_dispute(self, link: Link | None, now: int) -> bool:
        """Own records and equal stamps with other bytes pass by the cheap tests: so few of them are verified."""
        return self.disputes.take(now) if link is None else link.may_dispute(now)

    def _stamp_verdict(self, origin: Origin, header: Header, signed: bytes) -> StampVerdict:
        return origin.verdict(header, signed)

    def _is_genuine(self, origin: Origin, sealed: Sealed) -> bool:
        return verify(sealed, origin.key32, self._verifier)


def _read_body(header: Header) -> Body | None:
    try:
        if header.kind == Kind.V:
            return decode_volatile(header.body)
        return decode_static(header.body) if header.kind == Kind.S else decode_leave(header.body)
    except RemoteFault:
        return None
