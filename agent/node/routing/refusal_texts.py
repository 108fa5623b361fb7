"""A refusal in words: what this very request lacks, what is allowed, and which header or setting says so. Pure.

Nothing of a request is repeated: capabilities, dialects, terms and settings are told by their own names, and sizes in
numbers.
"""

from collections.abc import Callable, Iterable
from functools import reduce
from operator import and_, or_
from typing import Final

from agent.relay.dialects.relayed import RELAYED
from router_core.placement.candidates.candidate import Row
from router_core.placement.decision.decision import Decision
from router_core.placement.filters.eligibility import context_of, lacking, unmet_terms
from router_core.placement.reasons import Reason
from router_core.placement.request.request import Locality
from router_core.record.spelling import capability_names, dialect_name
from router_core.record.state import Dialect

_GIB: Final = 2**30


def words_of(decision: Decision) -> str | None:
    """What to say instead of the usual text of the refusal's code; None if that says it all."""
    reason = decision.reason
    tell = _WORDS.get(reason)
    if tell is None:
        return None
    rows = [gone.row for gone in decision.evidence.excluded if gone.reason is reason]
    return tell(decision, rows) if rows else None


def _locality(decision: Decision, rows: list[Row]) -> str:
    evidence = decision.evidence
    asked, cap = evidence.request.hints.locality, evidence.policy.spill_cap
    by = "x-pairmesh-locality"
    if cap.level < asked.level:
        by = "spill.cap in policy.toml"
    allowed = evidence.need.locality
    if allowed is not Locality.HOST and all(row.cloud for row in rows):
        return (
            "this model is only to be had outside the mesh, which takes both x-pairmesh-locality: any and "
            'spill.cap = "any" in policy.toml'
        )
    return f"no endpoint of this model is within locality {allowed.value}, which {by} allows; the others are host, mesh, any"


def _not_in_subset(decision: Decision, rows: list[Row]) -> str:
    hints = decision.evidence.request.hints
    unmet = sorted({key for row in rows for key in unmet_terms(row, hints)})
    return f"no endpoint of this model matches x-pairmesh-require: unmet are {', '.join(unmet)}"


def _capability(decision: Decision, rows: list[Row]) -> str:
    need = decision.evidence.need
    speaking = [row for row in rows if row.dialects & need.dialect]
    if not speaking:
        spoken = reduce(or_, [row.dialects for row in rows])
        paths = [
            path.decode("ascii") for path, dialect in RELAYED.items() if _names(dialect) and dialect & spoken
        ]
        told = f"; it is served on {', '.join(paths)}" if paths else ""
        return f"the engines of this model do not speak {dialect_name(need.dialect)}{told}"
    lacks = [lacking(row, need) for row in speaking]
    nowhere = capability_names(reduce(and_, lacks))
    names = nowhere or capability_names(reduce(or_, lacks))
    if not names:
        return (
            "no endpoint of this model is known to be as large as the terms params>= and bits>= of x-pairmesh-require "
            "demand"
        )
    text = f"no endpoint of this model supports {'' if nowhere else 'all of '}{', '.join(names)}"
    asked = capability_names(need.explicit & reduce(or_, lacks))
    if asked:
        text += f" (x-pairmesh-require: {', '.join(f'cap={name}' for name in asked)} must be known to hold)"
    return text


def _names(dialect: Dialect) -> bool:
    """True for a single dialect, and so for work."""
    return dialect.bit_count() == 1


def _context(decision: Decision, rows: list[Row]) -> str:
    need = decision.evidence.need
    most = _most(context_of(row, need) for row in rows)
    text = f"This model's maximum context length is {most} tokens."
    least = need.hints.ctx_least
    if need.sure > most:
        return f"{text} However, your request has at least {need.sure} tokens. Please shorten it."
    return f"{text} However, ctx>={least} is demanded by x-pairmesh-require."


def _does_not_fit(_decision: Decision, rows: list[Row]) -> str:
    least = min(row.weight_bytes for row in rows) / _GIB
    most = max(row.reach_bytes or 0.0 for row in rows) / _GIB
    return (
        f"the model's weights are {least:.1f} GiB, and the most memory that any of its endpoints can get for them is "
        f"{most:.1f} GiB: waiting is no help"
    )


def _most(sizes: Iterable[int | None]) -> int:
    return max((size for size in sizes if size is not None), default=0)


_WORDS: Final[dict[Reason, Callable[[Decision, list[Row]], str]]] = {
    Reason.LOCALITY: _locality,
    Reason.NOT_IN_SUBSET: _not_in_subset,
    Reason.CAPABILITY: _capability,
    Reason.CONTEXT_TOO_SMALL: _context,
    Reason.DOES_NOT_FIT: _does_not_fit,
}
