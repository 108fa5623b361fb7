"""The one schema of ``policy.toml``: which number of placement is which key, in what bounds.

A key stands for one field of ``PlacementPolicy`` (dotted where the field is inside another), and its default is that
field's. A new field becomes a key by one line here. Bounds are those within which a number makes sense alone; numbers that
contradict each other are the policy's own business.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, Final

from agent.settings import policy_values, removed, values
from agent.settings.policy_values import COMPARED
from agent.settings.reading import Key, Schema
from agent.settings.values import Parse
from router_core.policy.authority import AuthorityMode
from router_core.policy.exchange import Hedge
from router_core.policy.placement import PRESETS, Locality, Match, PlacementPolicy

Show = Callable[[Any], object]
BASE: Final = PRESETS["balanced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKey(Key):
    """A key of the policy. ``field`` is what it sets; ``show`` is the inverse of ``parse``."""

    field: str
    show: Show

    def of(self, policy: PlacementPolicy) -> object:
        """The value that ``policy`` has here, as it would be written."""
        return self.show(attrgetter(self.field)(policy))


def _key(
    path: str,
    field: str,
    takes: str,
    parse: Parse,
    meaning: str,
    show: Show = values.same,
    *,
    secret: bool = False,
) -> PolicyKey:
    return PolicyKey(
        path=path,
        takes=takes,
        parse=parse,
        default=show(attrgetter(field)(BASE)),
        meaning=meaning,
        field=field,
        show=show,
        secret=secret,
    )


def _number(path: str, least: float, most: float, meaning: str, field: str = "") -> PolicyKey:
    parse = partial(values.real, least=least, most=most)
    return _key(path, field or path, f"{least:g} to {most:g}", parse, meaning)


def _share(path: str, meaning: str, field: str = "") -> PolicyKey:
    return _number(path, 0, 1, meaning, field)


def _whole(path: str, least: int, most: int, meaning: str, field: str) -> PolicyKey:
    parse = partial(values.whole, least=least, most=most)
    return _key(path, field, f"whole number, {least} to {most}", parse, meaning)


def _seconds(path: str, least: float, most: float, meaning: str, field: str) -> PolicyKey:
    """Seconds in the file, milliseconds in the policy."""
    parse = partial(values.milliseconds, least_s=least, most_s=most)
    return _key(path, field, f"seconds, {least:g} to {most:g}", parse, meaning, policy_values.seconds)


def _class(name: str) -> tuple[PolicyKey, ...]:
    """The keys of one request class."""
    path, whose = f"class.{name}", f"of {name} requests"
    return (
        _number(
            f"{path}.ttft_s", 0.001, 3600, f"target {whose}: seconds to the first token", f"{name}.ttft_s"
        ),
        _key(
            f"{path}.tpot_s",
            f"{name}.tpot_s",
            'seconds, 0.001 to 60, or "none"',
            policy_values.pace,
            f"target {whose}: seconds per token",
            policy_values.shown_pace,
        ),
        _seconds(f"{path}.deadline_s", 0.001, 3600, f"when dispatching ends {whose}", f"{name}.deadline_ms"),
        _seconds(f"{path}.hold_s", 0, 3600, f"longest wait for room {whose}", f"{name}.hold_ms"),
        _number(
            f"{path}.share",
            0.01,
            1,
            f"share of an endpoint's room, and of the hold queue, {whose}",
            f"{name}.share",
        ),
    )


def _one_of(path: str, field: str, kind: type[Enum], meaning: str) -> PolicyKey:
    *names, last = (f'"{member.value}"' for member in kind)
    takes = f"{', '.join(names)} or {last}"
    parse = partial(policy_values.member, kind=kind)
    return _key(path, field, takes, parse, meaning, policy_values.shown_member)


POLICY_KEYS: tuple[PolicyKey, ...] = (
    _key(
        "preset",
        "name",
        ", ".join(f'"{name}"' for name in PRESETS),
        partial(policy_values.preset, names=tuple(PRESETS), compared=COMPARED),
        "where the other numbers start: balanced; latency, for whom only time counts; pack, which fills hosts in turn",
    ),
    _key(
        "aliases",
        "aliases",
        "table of NAME = [MODEL, ...]",
        policy_values.aliases,
        "names of models by which clients may ask, for the ones that serve, best first; an absent one is passed over",
        policy_values.shown_aliases,
    ),
    _one_of(
        "hedge",
        "hedge",
        Hedge,
        "when a second attempt is made elsewhere while the first one goes on without a byte: off; hung, where that looks "
        "like no work at all; overdue, as soon as it is later than expected",
    ),
    _share("weights.slo", "risk of missing the targets for the first token and the pace"),
    _share("weights.memory", "risk that a cold model does not fit"),
    _share("weights.switch", "harm to the models a load would evict"),
    _share("weights.pressure", "pressure on the host from outside"),
    _share("weights.spill", "price and privacy of an endpoint outside the mesh; on top of the others"),
    _share("weights.speed", "costing more time than the cheapest; on top of the others"),
    *_class("interactive"),
    *_class("batch"),
    *_class("background"),
    _share("adj.hint", "bonus of the first preferred node; the second gets half of it, and so on", "hint_bonus"),
    _share("adj.context", "most cost of a context that is probably too small", "context_most"),
    _share("adj.affinity", "most bonus of the node that has a session's prompt cached; 0: off", "affinity_bonus"),
    _seconds("adj.affinity_s", 1, 600, "how long after its last answer a session is kept", "affinity_ms"),
    _share("adj.alias_step", "cost of each further model of an alias", "alias_step"),
    _share("adj.alias_most", "most such cost", "alias_most"),
    _share("choice.veto_above", "a row with a worse factor is dropped ...", "veto_above"),
    _share("choice.veto_needs_below", "... if another has none as bad as this", "veto_needs_below"),
    _number("choice.pareto_eps", 0, 0.5, "how much better is better, when rows are compared", "pareto_eps"),
    _share("choice.tie_fixed", "scores this close to the best share the load", "tie_fixed"),
    _share("choice.tie_per_period", "more of that for a picture one period old", "tie_per_period"),
    _number("choice.pack_below", 0, 0.99, "fill the fullest of the rows with less slo risk; 0: off", "pack_below"),
    _share("explore.share", "share of requests that try a row of which little is known, where it costs nobody; 0: off", "explore_share"),
    _whole("explore.samples", 0, 1000, "answers from which on enough is known", "explore_samples"),
    _share("explore.risk", "only if neither it nor the chosen row has this much slo risk", "explore_risk"),
    _number("hold.quantum_s", 0.01, 3600, "seconds of work a caller gets before the next one's turn", "hold_quantum_s"),
    _seconds("hold.promote_s", 0.1, 3600, "wait after which a held request rises by a class", "hold_promote_ms"),
    _number("shed.above", 0.01, 100, "saturation from which background requests wait", "shed_above"),
    _number("shed.range", 0.01, 100, "how much more of it lets all of them wait", "shed_range"),
    _number("herd.floor", 1, 64, "least multiplier of own work not yet seen in a node's state", "herd_floor"),
    _number("herd.cap", 1, 64, "most of it ...", "herd_cap"),
    _number("herd.cap_crowd", 1, 64, "... with more active routers than a crowd", "herd_cap_crowd"),
    _whole("herd.crowd", 1, 1024, "active routers up to which they are no crowd", "herd_crowd"),
    _whole("estimate.image_tokens", 0, 100_000, "prompt tokens of a picture", "image_tokens"),
    _whole("estimate.audio_tokens", 0, 100_000, "prompt tokens of a piece of audio", "audio_tokens"),
    _number("estimate.prompt_slack", 1, 4, "room for a prompt that is longer than estimated", "prompt_slack"),
    _whole("estimate.output_tokens", 1, 1_000_000, "answer tokens until some are learned", "output_tokens"),
    _share("estimate.unknown_factor", "cost of memory or a pressure that is not known", "unknown_factor"),
    _number("estimate.rtt_s", 0.000001, 10, "network seconds per request; a longer way is measured", "rtt_s"),
    _number("estimate.link_bytes_per_s", 1_000, 1e12, "network speed", "link_bytes_per_s"),
    _number("estimate.debt_scale_s", 0.001, 3600, "seconds of others' loads that cost 0.63", "debt_scale_s"),
    _number("estimate.debt_horizon_s", 1, 86_400, "how far ahead an eviction is regretted", "debt_horizon_s"),
    _number("estimate.least_fit_gib", 0.001, 64, "least doubt about free memory, GiB", "least_fit_gib"),
    _key(
        "session.headers",
        "session_headers",
        "list of at most 8 header names",
        policy_values.headers,
        "headers that name a session, besides x-session-id",
        list,
    ),
    _one_of("match.cap", "match_cap", Match, "loosest match a request may ask for"),
    _number("match.min_bits", 1, 32, "least bits per weight of another quantisation", "match_min_bits"),
    _key("match.any_pool", "match_any_pool", "list of models", policy_values.models, "models that may stand in for any other", list),
    _key("match.penalties", "match_penalties", "list of three numbers, 0 to 1, rising", policy_values.penalties, "cost of a match by quant, family and any", list),
    _share("match.opens_at", "a looser match is looked at if every stricter row has more slo risk", "match_opens_at"),
    _one_of("spill.cap", "spill_cap", Locality, "how far from this node a request may be served"),
    _share("spill.on_above", "requests that may leave the mesh do if their slo risk falls by more than this ...", "spill_on_above"),
    _share("spill.off_below", "... and go on until it would by no more than this", "spill_off_below"),
    _number("spill.price", 0.000001, 1000, "price of a request that costs 0.63", "spill_price"),
    _number("spill.privacy", 0, 10, "what leaving the mesh costs besides, 0.5 being 0.39", "spill_privacy"),
    _one_of("authority.mode", "authority.mode", AuthorityMode, "what an external program's answer is worth"),
    _key("authority.url", "authority.url", '"http://LOOPBACK-IP:PORT[/PATH]" or "unix:/PATH"', values.text, "where it answers"),
    _whole("authority.budget_ms", 1, 1000, "milliseconds in which it has to, as each request waits for it", "authority.budget_ms"),
    _key("authority.credential", "authority.credential", "file name", policy_values.credential, "the file that holds its key", policy_values.shown_credential, secret=True),
    _key("realloc.enabled", "realloc_enabled", "true or false", values.switch, "load and unload models of this node's llama.cpp routers and Ollama servers by demand"),
)  # fmt: skip

POLICY_SCHEMA: Final = Schema(POLICY_KEYS, removed.POLICY)
