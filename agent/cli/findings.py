"""What ``pairmesh doctor`` looks at, one pure check each: facts in, findings out.

A finding says what is and, if it is not as it should be, what to do about it.
"""

import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct

from agent.admin.documents import MemberDoc, StatusDoc
from agent.cli.columns import count, duration, seconds
from agent.cli.nodes import takes_no_requests, unfit
from router_core import limits

WALL_LEAST_MS: Final = 1_704_067_200_000
CLOCK_DRIFT_MS: Final = 60_000
_ROUTING_FLAGS: Final = {
    "draining": "is draining: it takes no new work",
    "lonely": "has no link to any other member",
    "conflict": "sees its own id used by another process, too: stop that one. It is silent and tries again each 20 s "
    "(duplicate_identity in the log)",
    "sensor_stale": "has lost a sensor: its pressure is not fully known",
}
_LINK_FAULTS: Final = {
    "wrong_mesh": "is in another mesh: export its member file again and add it here, and the other way round",
    "lost": "drops this node's connections: it may not know this node; add this node's file there",
    "tls_failed": "does not agree with this node on certificates: export and add both member files again",
    "identity_mismatch": "is not who answers at its known address",
    "removed": "says that this node was removed",
    "refused": "has nobody listening at its known addresses: is pairmesh running there?",
    "unreachable": "cannot be reached at its known addresses",
    "timed_out": "does not answer at its known addresses",
    "no_address": "has no known address: put one into mesh.peers",
    "rejected": "answers at its address, but takes no link",
    "version": "speaks another protocol version: update the older one",
    "dup_identity": "sees this node's id in use twice",
}
"""By how a dial ended or what a BYE said; others are no fault of anybody."""

_TOO_MANY_MODELS: Final = "nobody is offered those that are neither in memory nor were used lately, the last by name; move some to another node"
_FIT_NAMES: Final = (
    "give each a [[models]] in the manifest, with upstream_name as the engine spells it and a name of at most 128 of "
    "A-Z a-z 0-9 . _ : / @ + -, starting with a letter or digit"
)


_SHARED_NAME: Final = (
    "@name in a hint means all of them; to rename one, set name in its pairmesh.toml, restart it, export its member file "
    "again and add it on the others"
)
_LOG_LOST: Final = "whoever reads its standard error stands still or is gone, or the disk is full (pairmesh_log_lines_dropped_total)"

_ENGINE_ERRORS: Final = {
    "unreachable": "does not answer at its url: is it running, and is that its port?",
    "silent": "answers nothing at all: it serves only if nobody else can. It may be busy; if it stays so, restart it",
    "deaf": "answers nothing while it works on more than it ever had when it answered: it serves only if nobody else can",
    "stuck": "answers questions, and has let every request wait for a minute: it serves only if nobody else can. If it stays "
    "so, restart it",
    "starting": "answers, but lists no models yet: it still starts, or its url leads to something else",
    "list_too_large": f"lists more models than {limits.ENGINE_LIST_BODY // limits.MIB} MiB hold: name those to offer in its "
    "manifest, a [[models]] each",
    "unauthorised": "refuses the key: see credential in its manifest",
    "self_loop": "is a pairmesh API: its url has to lead to the engine itself",
    "pair_not_adopted": "is a PAIR proxy: its url has to lead to the engine itself",
    "url_refused": "has a url that leads where it must not: a cloud name to this host or its network, or the like",
    "identity_changed": "is another engine than its manifest says: see engine there",
}
_OPEN_PORT: Final = (
    "on that host: 'ufw allow {port}/tcp', 'firewall-cmd --permanent --add-port={port}/tcp' and 'firewall-cmd --reload', "
    "or 'nft insert rule inet filter input tcp dport {port} accept'"
)
_UNREACHED: Final = {
    "timed_out": f"does not answer there, as behind a firewall that drops it: open the port {_OPEN_PORT}",
    "refused": "refuses: a firewall there rejects the port, or ingress.listen there is another address or port; open it "
    f"{_OPEN_PORT}",
    "unreachable": "has no way there from here: check routes, VPN and the network of that host",
    "identity_mismatch": "is answered by somebody else: see what uses the address and the port there",
}
"""By what connecting to a member's ingress came to."""
_BLOCKED: Final = {
    "restarts": "began anew more than three times in ten seconds without a word of leave: it crashes, or is killed, or its "
    "identity is in use in two places",
    "behind": "sends records older than what is known of it: its disk was put back, or its identity is in use in two "
    "places; it was shown the newest one and rises above it by itself, unless its own doctor says otherwise",
    "malformed": "signed a record that makes no sense: is it of another version?",
}


class Health(Enum):
    """How serious a finding of ``pairmesh doctor`` is."""

    GOOD = "ok"
    WARNING = "warning"
    BAD = "bad"
    SKIPPED = "skipped"


class Finding(Struct, frozen=True, kw_only=True):
    """One line of ``pairmesh doctor``: what it is about, what was found and how serious that is."""

    health: Health
    about: str
    said: str


class FolderFacts(Struct, frozen=True, kw_only=True):
    """One path as found; ``mode`` None if it does not exist or is ``hidden`` from this user. ``forbidden`` are the bits
    it must not have."""

    about: str
    path: str
    mode: int | None
    uid: int | None
    forbidden: int
    owned: bool = True
    hidden: bool = False


def good(about: str, said: str) -> Finding:
    """A finding that all is well."""
    return Finding(health=Health.GOOD, about=about, said=said)


def warn(about: str, said: str) -> Finding:
    """A finding that the operator should look at."""
    return Finding(health=Health.WARNING, about=about, said=said)


def bad(about: str, said: str) -> Finding:
    """A finding that makes ``pairmesh doctor`` fail."""
    return Finding(health=Health.BAD, about=about, said=said)


def folders(facts: Iterable[FolderFacts], uid: int) -> Iterator[Finding]:
    """Owner and modes. ``uid`` is the daemon's user."""
    for fact in facts:
        if fact.hidden:
            yield Finding(
                health=Health.SKIPPED, about=fact.about, said=f"{fact.path} is hidden from this user"
            )
        elif fact.mode is None:
            yield warn(fact.about, f"{fact.path} does not exist yet")
        elif fact.owned and fact.uid != uid:
            yield bad(fact.about, f"{fact.path} belongs to uid {fact.uid}, not {uid}: chown it")
        elif stat.S_IMODE(fact.mode) & fact.forbidden:
            fit = stat.S_IMODE(fact.mode) & ~fact.forbidden
            yield bad(fact.about, f"{fact.path} is open to others: chmod {fit:04o} {fact.path}")
        else:
            yield good(fact.about, f"{fact.path} ({stat.S_IMODE(fact.mode):04o})")


def settings(faults: Sequence[str], folder: str, unread: Sequence[str]) -> Iterator[Finding]:
    """``unread`` are files that somebody may have meant."""
    if not faults:
        yield good("settings", f"no fault in {folder}")
    yield from (bad("settings", fault) for fault in faults)
    yield from (warn("settings", each) for each in unread)


def floors(unmet: Sequence[str]) -> Iterator[Finding]:
    """One finding for each version that is too old; ``unmet`` says which."""
    if not unmet:
        yield good("versions", "all versions are recent enough")
    yield from (bad("versions", said) for said in unmet)


def clock(wall_ms: int, daemon_ms: int | None) -> Iterator[Finding]:
    """Wall time matters for display alone, but a wrong one confuses whoever reads a log."""
    if wall_ms < WALL_LEAST_MS:
        yield warn("clock", "the wall clock is years off; pairmesh does not mind, readers of its log will")
    elif daemon_ms is not None and abs(wall_ms - daemon_ms) > CLOCK_DRIFT_MS:
        yield warn("clock", "the daemon's wall clock and this command's differ by more than a minute")
    else:
        yield good("clock", "the wall clock is plausible")


def ports(tried: Mapping[str, bool], daemon_runs: bool) -> Iterator[Finding]:
    """Findings about ports: ``tried`` says per listener whether something accepted a connection there."""
    taken = "is taken, by another program or by a daemon that this user may not ask"
    for where, answered in tried.items():
        if daemon_runs:
            yield (
                good("ports", f"{where} accepts")
                if answered
                else bad("ports", f"{where} accepts no connection")
            )
        else:
            yield bad("ports", f"{where} {taken}") if answered else good("ports", f"{where} is free")


def own_node(status: StatusDoc) -> Iterator[Finding]:
    """Findings about the daemon of this host: faults, settings that wait for a restart, lost log lines and
    its own state."""
    own = next((member for member in status.members if member.me), None)
    yield good("daemon", f"{status.own.name} runs, version {status.own.version}, pid {status.own.pid}")
    yield from (bad("daemon", fault) for fault in status.own.faults)
    if status.own.waits_for_restart:
        keys = ", ".join(status.own.waits_for_restart)
        yield warn(
            "settings", f"{keys}: the file says another value by now, which a restart brings into force"
        )
    if status.own.log_lines_lost:
        lost = count(status.own.log_lines_lost, "log line")
        yield warn("daemon", f"{lost} lost since it started: {_LOG_LOST}")
    if own is None:
        yield warn("daemon", "it has not published its own state yet")
        return
    yield from (warn("daemon", said) for flag, said in _ROUTING_FLAGS.items() if flag in own.flags)
    if not own.engines:
        yield warn(
            "engines", "none: write endpoints/NAME.toml in the config folder, or start an engine it can find"
        )
    if status.own.hidden_models:
        hidden = count(status.own.hidden_models, "model")
        yield warn("engines", f"{hidden} more than a node can tell of: {_TOO_MANY_MODELS}")
    for name, how_many in status.own.more_models.items():
        yield warn(
            "engines",
            f"{name} lists {count(how_many, 'model')} more than the {limits.ENGINE_MODELS:,} that are looked at: nobody is "
            "offered those; shorten its list",
        )
    for name, what in status.own.withdrawn.items():
        yield warn(
            "engines", f"{name} answered as if it did not have {', '.join(what)}: not sent there for a while"
        )
    for name, how_many in status.own.unfit_names.items():
        yield warn("engines", f"{unfit(name, how_many)}: {_FIT_NAMES}")
    for engine in own.engines:
        if engine.state == "ready":
            models = f"{len(engine.models)} model{'' if len(engine.models) == 1 else 's'}"
            yield good("engines", f"{engine.name} ({engine.kind}) is ready with {models}")
            if not engine.models:
                yield warn("engines", f"{engine.name} offers no model")
        elif engine.state == "draining":
            yield warn("engines", f"{engine.name} ({engine.kind}) is draining: it takes no new work")
        else:
            error = _ENGINE_ERRORS.get(status.own.engine_errors.get(engine.name, ""), f"is {engine.state}")
            yield bad("engines", f"{engine.name} ({engine.kind}) {error}")


def elsewhere(asked: str, service: str, exists: bool) -> Iterator[Finding]:
    """The host's service has folders of its own, which a person's shell does not name."""
    if exists and asked != service:
        yield warn(
            "daemon",
            f"a systemd service runs at {service}, and {asked} was asked: set RUNTIME_DIRECTORY={service}, and "
            "STATE_DIRECTORY and CONFIGURATION_DIRECTORY as its unit does",
        )


def members(status: StatusDoc) -> Iterator[Finding]:
    """Findings about the other members: state, link, requests, and names that several of them share."""
    others = [member for member in status.members if not member.me]
    if not others:
        yield warn("members", "no other member: this node serves alone")
        return
    for member in others:
        yield _member(member)
        yield from _requests(member)
    names = Counter(member.name for member in status.members)
    for name in sorted(name for name, sharers in names.items() if sharers > 1):
        called = ", ".join(sorted(f"@{member.called}" for member in status.members if member.name == name))
        yield warn("members", f"{names[name]} are called {name}, {called} in full: {_SHARED_NAME}")


def _requests(member: MemberDoc) -> Iterator[Finding]:
    """The link and requests go over two ports: one says nothing of the other."""
    requests = member.requests
    if requests is None or not takes_no_requests(member):
        return
    where = f"{member.called}: requests: unreachable"
    if requests.why == "no_address":
        yield bad("members", f"{where}: it {_nowhere(member) or 'tells no address'}")
        return
    port, at = requests.port, ", ".join(requests.at)
    why = _UNREACHED.get(requests.why or "", "cannot be connected")
    yield bad("members", f"{where} (port {port}): {at} {why.format(port=port)}")


def _nowhere(member: MemberDoc) -> str | None:
    """What is known of a member's addresses if none of them may be dialled, and what to do about it."""
    outside = member.requests.left_out.get("not_allowed", ()) if member.requests is not None else ()
    if not outside:
        return None
    return (
        f"is at {', '.join(outside)}, outside mesh.allow_networks: add that network there, or "
        f'"@{member.called}={outside[0]}" to mesh.peers'
    )


def _old(age_ms: int | None) -> str:
    return "of unknown age" if age_ms is None else f"{seconds(age_ms / 1_000)} old"


def _member(member: MemberDoc) -> Finding:
    fault = None if member.link is None else _LINK_FAULTS.get(member.link.fault or "")
    if fault is not None:
        nowhere = _nowhere(member) if member.link is not None and member.link.fault == "no_address" else None
        said = f"{member.called} {nowhere or fault}"
        return (
            warn(
                "members",
                f"{said}; requests still go there, based on state {_old(member.age_ms)}",
            )
            if member.routable
            else bad("members", said)
        )
    if member.routable or takes_no_requests(member):
        return good("members", f"{member.called} is {member.liveness}")
    if member.blocked_until is not None:
        blocked = _BLOCKED.get(member.blocked_until.why, member.blocked_until.why)
        ends = f"until it has not done so for a while, {duration(member.blocked_until.left_ms)} from now at the earliest"
        return bad("members", f"{member.called} {blocked}: it gets no requests {ends}")
    why = next((said for flag, said in _ROUTING_FLAGS.items() if flag in member.flags), None)
    return warn("members", f"{member.called} {why or f'is {member.liveness} and gets no requests'}")
