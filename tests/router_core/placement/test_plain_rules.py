"""What is decided fast is what the rules say: ``decide`` beside a plain, slow writing of the same rules."""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet, Live
from router_core.placement.request.request import Hints, Pin, PlacementRequest
from router_core.placement.selection.choose import seed_of
from router_core.policy.placement import PlacementPolicy
from router_core.record.state import Capability, Dialect
from tests.router_core.placement.plain_rules import drawn, plainly, tried_instead
from tests.support.fleets import (
    GIB,
    NOW,
    POLICY,
    Broken,
    a_choice,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    decided,
    parsed_hints,
)

ALIASED = PlacementPolicy(aliases=(("tiny-or-other", ("tiny", "other")),))
CURIOUS = PlacementPolicy(explore_share=0.7, explore_samples=31, explore_risk=0.7)
HINTS = (
    {"prefer": "@n1,@n2"},
    {"require": "!node=@n0"},
    {"require": "cap=tools"},
    {"require": "ctx>=16000,bits>=4"},
    {"locality": "host"},
    {"class": "batch", "slo_tpot_ms": "20"},
    {"slo_ttft_ms": "300", "deadline_ms": "4000"},
    {"expect_tokens": "0"},
)


def a_chance_row(rng: Random, number: int, odd: int = 1) -> Row:
    """Any row: mostly fit, sometimes excluded by one filter or another, loads and ages mixed. The larger ``odd``, the
    rarer is anything out of the ordinary."""

    def rarely(value: Any, usual: Any, one_in: int = 20) -> Any:
        return value if rng.randrange(one_in * odd) == 0 else usual

    resident = rng.random() < 0.8
    speed = 5 * 40 ** rng.random()
    engine = rarely("ollama", "llamacpp", 4)
    return a_row(
        f"n{number}",
        engine=engine,
        model=rarely("other", "tiny", 4),
        digest=rarely(b"\x02" * 32, rng.choice((None, b"\x01" * 32)), 6),
        pp=rng.uniform(10, 60) * speed,
        tg=speed,
        slots=rng.randint(1, 8),
        in_flight=rng.randint(0, 6),
        queued=rarely(rng.randint(0, 14), 0, 4),
        taken_ms=NOW - rarely(rng.randint(0, 30_000), rng.randint(-50, 1_500), 3),
        period_ms=rng.choice((1_000, 2_000, rng.randint(200, 10_000))),
        resident=resident,
        resident_ctx=rng.choice((8_192, 4_096)) if resident else None,
        loading=rarely(True, False),
        load_s=0.0 if resident else rng.uniform(0, 30),
        loadable=rarely(False, True),
        gate=rarely(rng.choice((Gate.SOFT, Gate.SHUT)), Gate.OPEN, 3),
        loads=rarely(False, True, 6),
        beta=rng.uniform(0, 0.4),
        s_speed=rng.uniform(0.1, 0.7),
        s_gen=rng.uniform(0.1, 0.7),
        success=rng.choice((1.0, 1.0, rng.uniform(0.5, 1))),
        samples=rng.choice((0, 30, 60)),
        pressure=rng.uniform(0, 0.3) if rng.random() < 0.9 else rng.random(),
        memory=0.0 if resident else rng.random(),
        switch=0.0 if resident else rng.random(),
        ctx=rarely(rng.randint(1_000, 3_000), 8_192, 8),
        bits=rng.choice((None, 4.9, 8.5)),
        room_bytes=rarely(1.0 * GIB, 16.0 * GIB),
        need_bytes=rng.choice((0, 4 * GIB)),
        weight_bytes=rarely(5 * GIB, 3 * GIB),
        reach_bytes=rng.choice((None, 4.0 * GIB)),
        down=rarely("engine", None),
        draining=rarely(True, False),
        untrusted=rarely(True, False),
        cloud=rarely(True, False),
        cap_no=rarely(int(Capability.VISION), 0),
        cap_yes=int(rng.choice((Capability.TOOLS, Capability.STREAMING))),
        dialects=rarely(int(Dialect.EMBED), int(Dialect.CHAT | Dialect.EMBED)),
        backup=rarely("failing", None),
        is_self=number == 3,
        foreign=rng.randint(0, 2),
    )


def a_chance_view(rng: Random, count: int, odd: int = 1) -> Fleet:
    """Any fleet of ``count`` rows, with own work under way, sometimes with breakers and stalled streams."""
    rows = [a_chance_row(rng, number, odd) for number in range(count)]
    if count > 1 and rng.random() < 0.3:
        rows[0] = a_row("n0")
        rows[1] = a_row("n1")
    states: dict[str, Any] = {
        f"n{number}": rng.choice((1, 2, 2)) for number in range(count) if rng.random() < 0.3
    }
    breakers = Broken(**states)
    suspects = frozenset(row.key for row in rows if rng.random() < 0.1)
    live = Live(ledger=a_ledger())
    if rng.random() < 0.3:
        live = Live(ledger=a_ledger(), breakers=breakers, suspects=suspects)
    for row in rows:
        if rng.random() < 0.2:
            live.ledger.reserve(
                a_choice(
                    a_row(row.node_name, is_self=row.is_self),
                    prefill_s=rng.random(),
                    decode_s=5 * rng.random(),
                ),
                NOW,
            )
    return a_fleet(*rows, m_r=rng.choice((1.0, 3.0, 8.0)), live=live)


def a_chance_request(rng: Random, fleet: Fleet) -> PlacementRequest:
    keys = [row.key for row in fleet.rows]
    pin = None
    if keys and rng.random() < 0.3:
        row = rng.choice(fleet.rows)
        pin = Pin(
            endpoint=row.key,
            model=row.model,
            tokens=rng.randint(1, 3_000),
            at_ms=NOW - rng.randint(0, 700_000),
        )
    some = frozenset(key for key in keys if rng.random() < 0.1)
    again = rng.random() < 0.2
    hints: Hints = parsed_hints(**rng.choice(HINTS)) if rng.random() < 0.5 else a_request().hints
    return a_request(
        request_id=f"r{rng.randrange(10**6)}",
        model=rng.choice(("tiny", "tiny", "tiny", "tiny", "tiny:latest", "tiny-or-other", "other")),
        text_bytes=rng.choice((40, 4_320, rng.randint(0, 30_000))),
        body_bytes=rng.randint(0, 10**6),
        sure_tokens=rng.choice((0, 0, 2_000)),
        output_cap=rng.choice((None, None, 10, 0)),
        num_ctx=rng.choice((None, None, None, None, 4_096)),
        requires=rng.choice((Capability(0), Capability(0), Capability.VISION)),
        arrival_ms=NOW - rng.choice((0, 0, rng.randint(0, 3_000))),
        hints=hints,
        pin=pin,
        attempt=2 if again else 1,
        tried=some if again else frozenset(),
        refused=some if again and rng.random() < 0.5 else frozenset(),
    )


def differs(request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int = NOW) -> str | None:
    """What a decision and its record tell that the plain rules do not; None if they agree."""
    decision = decided(request, fleet, policy, now)
    record, plain = decision.record, plainly(request, fleet, policy, now)
    counts: dict[str, int] = {}
    for reason in plain.excluded.values():
        counts[reason.value] = counts.get(reason.value, 0) + 1
    if record.excluded_counts != counts:
        return f"excluded {record.excluded_counts}, by rule {counts}"
    excluded = sorted((gone.row, gone.code.value) for gone in record.excluded)
    if (
        excluded
        != sorted((key, reason.value) for (key, _), reason in plain.excluded.items())[: len(excluded)]
    ):
        return "other rows are excluded"
    if decision.degraded != tuple(plain.degraded):
        return f"degraded {decision.degraded}, by rule {plain.degraded}"
    if decision.chosen is None or not plain.tied:
        return None if decision.chosen is None and not plain.tied else "one of them chose nothing"
    seed = seed_of(request.request_id, request.attempt)
    chance = int.from_bytes(seed) / 2**64
    lot = int.from_bytes(seed[4:]) / 2**32
    wanted = tried_instead(plain, drawn(plain.tied, chance), lot, request.attempt, policy)
    wanted.out = None
    if (decision.chosen.endpoint, decision.chosen.model) != wanted.name:
        return f"chosen {decision.chosen.endpoint}, by rule {wanted.row.key}"
    rules = {judged.name: judged for judged in (*plain.main, *plain.reserves)}
    for told in record.candidates:
        rule = rules[told.row, told.model]
        ours = (
            told.score,
            told.adj,
            told.f.slo,
            told.f.speed,
            told.est.wait,
            told.est.ttft,
            told.est.ect,
            told.est.sd,
        )
        theirs = (rule.score, rule.adj, rule.slo, rule.speed, rule.wait, rule.ttft, rule.ect, rule.sd)
        if ours != pytest.approx(theirs, abs=1e-9, rel=1e-9):
            return f"{told.row}: {ours}, by rule {theirs}"
        if (told.free, told.resident, told.age_ms) != (rule.free, rule.resident, rule.age_ms):
            return f"{told.row} is seen otherwise"
    if not record.full:
        return None
    if len(record.candidates) != len(rules):
        return f"{len(record.candidates)} candidates, by rule {len(rules)}"
    for told in record.candidates:
        rule = rules[told.row, told.model]
        out = "backup" if rule in plain.reserves or rule.reserve is not None else rule.out
        if (told.out or "").partition(":")[0] != (out or ""):
            return f"{told.row} is out for {told.out}, by rule {out}"
    rest = sorted(judged.score for judged in rules.values() if judged is not wanted)
    margin = rest[0] - wanted.score if rest else None
    if record.margin != (pytest.approx(margin, abs=1e-9) if margin is not None else None):
        return f"margin {record.margin}, by rule {margin}"
    return None


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 12))
def test_any_decision_is_what_the_plain_rules_say(seed: int, count: int) -> None:
    rng = Random(seed)
    policy = rng.choice((POLICY, ALIASED, CURIOUS))
    fleet = a_chance_view(rng, count)
    for _ in range(3):
        assert differs(a_chance_request(rng, fleet), fleet, policy) is None


@pytest.mark.parametrize("seed", range(12))
def test_so_is_one_in_a_large_fleet(seed: int) -> None:
    rng = Random(seed)
    fleet = a_chance_view(rng, 60)
    for turn in range(4):
        assert differs(a_chance_request(rng, fleet), fleet, POLICY, NOW + 100 * turn) is None
