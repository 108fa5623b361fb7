"""One dispatch of a simulated request, and what it teaches the routers that saw it.

The client's router learns from every attempt, a serving peer's from good ones: tokens and times as an engine like
llama.cpp tells them, the crowd in the batch as the router believes it. Refuses to dispatch.
"""

from msgspec import Struct
from msgspec.structs import replace

from router_core.placement.candidates.candidate import Row
from router_core.placement.ledger import Reservation
from router_core.placement.record import Choice
from router_core.profile.outcome import Outcome, Result
from router_core.router.router import Router
from router_core.sim.placement.engine import Job
from router_core.sim.placement.fleet_world import Ask, FleetWorld


class Attempt(Struct, kw_only=True):
    """Where a request was sent, what is booked for it, and what was seen. Times are ms; those of computing are read as
    ``misread`` times as short as they were; ``untold``: the engine tells no numbers of tokens."""

    number: int
    choice: Choice
    reservation: Reservation
    sent_ms: int
    place: int
    job: Job | None = None
    ticket: int | None = None
    first_ms: int | None = None
    misread: float = 1.0
    untold: bool = False


def learn(world: FleetWorld, ask: Ask, attempt: Attempt, result: Result) -> None:
    """Fold an ended attempt into the profiles of the routers that saw it."""
    learners = {ask.arrival.router}
    if result is Result.OK:
        learners.add(attempt.place)
    for learner in sorted(learners):
        row = world.fleet(learner).row(attempt.choice.endpoint, attempt.choice.model)
        if row is not None:
            router = world.routers[learner].core
            router.profiles.learn(_outcome(router, row, ask, attempt, result, world.now))


def _outcome(router: Router, row: Row, ask: Ask, attempt: Attempt, result: Result, now: int) -> Outcome:
    choice, job, first_ms, misread = attempt.choice, attempt.job, attempt.first_ms, attempt.misread
    told = Outcome(
        key=row.profile_key,
        at_ms=now,
        result=result,
        concurrency=router.concurrency(row),
        text_bytes=ask.text_bytes,
        wait_ms=1000.0 * choice.est.wait,
        net_ms=1000.0 * choice.est.net,
    )
    if (
        result is not Result.OK
        or job is None
        or first_ms is None
        or job.started_ms is None
        or job.first_ms is None
    ):
        return told
    prompt_ms = load_ms = ttft_ms = None
    until_first_ms = float(first_ms - attempt.sent_ms)
    if choice.resident:
        prompt_ms, ttft_ms = (job.first_ms - job.started_ms) / misread, until_first_ms
    else:
        warm_ms = 1000.0 * (choice.est.wait + choice.est.net + job.computed * row.prefill_s_per_token)
        load_ms = max(0.0, until_first_ms - warm_ms)
    if attempt.untold:
        return replace(told, ttft_ms=ttft_ms, load_ms=load_ms)
    return replace(
        told,
        prompt_tokens=job.computed,
        cached_tokens=ask.arrival.prompt - job.computed,
        prompt_ms=prompt_ms,
        gen_tokens=ask.arrival.output,
        gen_ms=(now - first_ms) / misread,
        ttft_ms=ttft_ms,
        load_ms=load_ms,
    )
