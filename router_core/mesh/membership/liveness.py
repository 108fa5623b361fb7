"""The local verdict on one origin, from what is held about it. A pure table; nobody can vote for another node.

Order of badness: FRESH < LATE < SUSPECT < GONE. UNCONFIRMED stands aside: not routed, but only silence ends it.
LEFT and REMOVED are entered by records and by the roster and are not decided here.
"""

from typing import Final

from msgspec import Struct

from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Liveness

_BADNESS: Final = {
    Liveness.UNCONFIRMED: 0,
    Liveness.FRESH: 1,
    Liveness.LATE: 2,
    Liveness.SUSPECT: 3,
    Liveness.GONE: 4,
}

ALIVE: Final = (Liveness.UNCONFIRMED, Liveness.FRESH, Liveness.LATE, Liveness.SUSPECT)


class LivenessEvidence(Struct, frozen=True, gc=False, kw_only=True):
    """What speaks for and against an origin now.

    ``age_ms`` is the age of its newest V less the credit for our own stalls (of the first sign of it, if there
    is no V); ``due_ms`` the promise in that V. ``broken_ms`` is the time since our link to it broke abnormally
    with no newer V since, ``refused`` that the dial right after was refused by its host, ``lost_ms`` the time for
    which enough others list it as lost at no older stamp.
    """

    age_ms: int
    due_ms: int
    confirmed: bool
    broken_ms: int | None = None
    refused: bool = False
    lost_ms: int | None = None


def judge(
    evidence: LivenessEvidence,
    was: Liveness,
    policy: MeshPolicy,
    *,
    lonely: bool = False,
    in_gap: bool = False,
) -> Liveness:
    """The next state. A lonely node lets nobody go; within an observer gap nothing worsens.

    GONE stays: only a newer V ends it, and that is a new ``was``.
    """
    verdict = _by_evidence(evidence, was, policy, lonely or in_gap)
    if in_gap and was is not Liveness.UNCONFIRMED and _BADNESS[verdict] > _BADNESS[was]:
        return was
    return verdict


def gone_after_ms(due_ms: int, policy: MeshPolicy) -> int:
    """The silence after which an origin is let go."""
    return max(10 * due_ms, policy.gone_min_ms)


def stands_ms(evidence: LivenessEvidence, policy: MeshPolicy) -> int | None:
    """How long the verdict on this evidence stands while nothing is heard; None: for ever."""
    age, due = evidence.age_ms, evidence.due_ms
    waits = [gone_after_ms(due, policy) + 1 - age]
    if evidence.confirmed:
        waits += [due + policy.fresh_slack_ms + 1 - age, 2 * due + policy.suspect_slack_ms + 1 - age]
    if evidence.broken_ms is not None:
        waits.append(policy.broken_grace_ms - evidence.broken_ms)
    if evidence.lost_ms is not None:
        waits.append(policy.lost_hold_ms - evidence.lost_ms)
    return min((wait for wait in waits if wait > 0), default=None)


def _by_evidence(evidence: LivenessEvidence, was: Liveness, policy: MeshPolicy, keep: bool) -> Liveness:
    age, due = evidence.age_ms, evidence.due_ms
    if was is Liveness.GONE or (age > gone_after_ms(due, policy) and not keep):
        return Liveness.GONE
    if not evidence.confirmed:
        return Liveness.UNCONFIRMED
    if age > 2 * due + policy.suspect_slack_ms or _is_lost(evidence, policy):
        return Liveness.SUSPECT
    if age > due + policy.fresh_slack_ms:
        return Liveness.LATE
    return Liveness.FRESH


def _is_lost(evidence: LivenessEvidence, policy: MeshPolicy) -> bool:
    if evidence.broken_ms is not None and (evidence.refused or evidence.broken_ms >= policy.broken_grace_ms):
        return True
    return evidence.lost_ms is not None and evidence.lost_ms >= policy.lost_hold_ms


class Solitude:
    """LONELY: no link up for 3.5 s although some member is alive; over 2 s after the first link is up."""

    __slots__ = ("_linked_since", "_policy", "_unlinked_since", "lonely")

    def __init__(self, policy: MeshPolicy, now: int) -> None:
        self._policy = policy
        self._unlinked_since: int | None = now
        self._linked_since: int | None = None
        self.lonely = False

    def unlinked_ms(self, now: int) -> int:
        """How long no link has been up; 0 with one."""
        return now - self._unlinked_since if self._unlinked_since is not None else 0

    def is_settled(self, links_up: int, somebody_alive: bool) -> bool:
        """Whether time alone changes nothing here."""
        return not somebody_alive or self.lonely is not bool(links_up)

    def update(self, now: int, links_up: int, somebody_alive: bool) -> bool:
        """Look again; True if ``lonely`` changed."""
        if links_up:
            self._unlinked_since = None
            if self._linked_since is None:
                self._linked_since = now
        else:
            self._linked_since = None
            if self._unlinked_since is None:
                self._unlinked_since = now
        before = self.lonely
        if not somebody_alive:
            self.lonely = False
        elif self._unlinked_since is not None:
            self.lonely = before or now - self._unlinked_since >= self._policy.lonely_after_ms
        elif self._linked_since is not None:
            self.lonely = before and now - self._linked_since < self._policy.lonely_until_ms
        return self.lonely is not before


class ObserverGap:
    """Our own stalls: a tick that comes more than 500 ms late. For 2 s after one nothing worsens.

    Ticks are 100 ms apart while anything may change soon, and at most 500 ms in a calm mesh. What was queued during
    a stall says little: peers may have given us up long before it ended, so no number of messages ends a gap early.
    """

    __slots__ = ("_policy", "_until", "next_tick_at")

    def __init__(self, policy: MeshPolicy, now: int) -> None:
        self._policy = policy
        self._until = now
        self.next_tick_at = now + policy.tick_ms

    def observe(self, now: int) -> int:
        """To be called at each event, before all else: the milliseconds just slept through, else 0."""
        late = now - self.next_tick_at
        if late <= self._policy.gap_ms:
            return 0
        self.next_tick_at = now + self._policy.tick_ms
        self._until = now + self._policy.gap_grace_ms
        return late

    def ticked(self, now: int, look_at: int) -> None:
        """A tick came; by ``look_at`` time alone may change something."""
        policy = self._policy
        self.next_tick_at = max(now + policy.tick_ms, min(look_at, now + policy.calm_tick_ms))

    def hasten(self, now: int, look_at: int = 0) -> None:
        """Something may change by ``look_at``; soon, if not given."""
        self.next_tick_at = min(self.next_tick_at, max(now + self._policy.tick_ms, look_at))

    def active(self, now: int) -> bool:
        return now < self._until
