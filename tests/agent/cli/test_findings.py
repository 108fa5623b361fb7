"""Claims about what doctor says: one sentence per fact, and what to do where something is wrong."""

import stat
from typing import Any

import pytest
from msgspec.structs import replace

from agent.admin.documents import BlockedDoc, LinkDoc, MemberDoc, RequestsDoc, StatusDoc
from agent.cli import findings
from agent.cli.findings import Finding, FolderFacts, Health
from agent.cli.floors import PACKAGES, Installed, installed, numbers_of, unmet
from agent.engines.contract import EndpointHealth as EngineHealth
from agent.engines.contract import EngineRefusal
from tests.agent.admin.documents import engine, member, status, unseen


def said(found: list[Finding], health: Health) -> str:
    return "\n".join(finding.said for finding in found if finding.health is health)


def with_members(*others: MemberDoc, **own: Any) -> StatusDoc:
    made = status()
    me = replace(made.members[0], **own)
    return replace(made, members=(me, *others))


@pytest.mark.parametrize(
    ("mode", "uid", "health"),
    [
        (0o700, 1_000, Health.GOOD),
        (0o750, 1_000, Health.BAD),
        (0o701, 1_000, Health.BAD),
        (0o700, 0, Health.BAD),
        (None, None, Health.WARNING),
    ],
)
def test_a_private_folder_is_its_owners_alone(mode: int | None, uid: int | None, health: Health) -> None:
    kind = None if mode is None else stat.S_IFDIR | mode
    fact = FolderFacts(about="folders", path="/x", mode=kind, uid=uid, forbidden=0o077)
    (found,) = findings.folders([fact], 1_000)
    assert found.health is health
    if health is Health.BAD:
        assert "chmod 0700 /x" in found.said or "chown" in found.said


def test_what_is_hidden_from_this_user_is_not_called_absent() -> None:
    fact = FolderFacts(about="identity", path="/x/key", mode=None, uid=None, forbidden=0o077, hidden=True)
    (found,) = findings.folders([fact], 1_000)
    assert (found.health, found.said) == (Health.SKIPPED, "/x/key is hidden from this user")


def test_a_service_elsewhere_on_the_host_is_named() -> None:
    found = list(findings.elsewhere("/run/user/1000/pairmesh", "/run/pairmesh", True))
    assert "set RUNTIME_DIRECTORY=/run/pairmesh" in said(found, Health.WARNING)
    assert not list(findings.elsewhere("/run/pairmesh", "/run/pairmesh", True))
    assert not list(findings.elsewhere("/run/user/1000/pairmesh", "/run/pairmesh", False))


def test_peers_that_do_not_link_say_what_to_do() -> None:
    found = list(
        findings.members(with_members(unseen("borg", "b", "wrong_mesh"), unseen("cyan", "c", "lost")))
    )
    bad = said(found, Health.BAD)
    assert "borg is in another mesh: export its member file again" in bad
    assert "cyan drops this node's connections" in bad


def test_a_peer_without_a_link_that_still_gets_requests_is_odd_not_bad() -> None:
    heard = replace(member("borg", "b", link=LinkDoc(state="backoff", fault="unreachable")), age_ms=1_500)
    found = list(findings.members(with_members(heard)))
    assert said(found, Health.BAD) == ""
    assert said(found, Health.WARNING).endswith("; requests still go there, based on state 1.5 s old")


def test_a_link_closed_for_no_fault_is_no_finding() -> None:
    fine = member("borg", "b", link=LinkDoc(state="down", fault="dup_link"))
    assert said(list(findings.members(with_members(fine))), Health.GOOD) == "borg is fresh"


def test_a_member_that_is_shunned_is_told_with_the_reason_and_the_end() -> None:
    shunned = replace(
        member("borg", "b"),
        routable=False,
        blocked_until=BlockedDoc(why="restarts", left_ms=252_000),
        flags=(),
    )
    bad = said(list(findings.members(with_members(shunned))), Health.BAD)
    assert bad.startswith("borg began anew more than three times in ten seconds without a word of leave")
    assert bad.endswith(
        "it gets no requests until it has not done so for a while, 4 min 12 s from now at the earliest"
    )


def test_members_of_one_name_are_pointed_out() -> None:
    twins = [replace(member("ubuntu", each), label=f"ubuntu~{each * 4}") for each in "bc"]
    warnings = said(list(findings.members(with_members(*twins))), Health.WARNING)
    assert warnings.startswith(
        "2 are called ubuntu, @ubuntu~bbbb, @ubuntu~cccc in full: @name in a hint means all of them"
    )
    assert "are called" not in said(list(findings.members(with_members(twins[0]))), Health.WARNING)


def test_lost_lines_of_the_log_and_what_waits_for_a_restart_are_odd() -> None:
    told = status()
    own = replace(told.own, log_lines_lost=1_200, waits_for_restart=("api.hosts",))
    warnings = said(list(findings.own_node(replace(told, own=own))), Health.WARNING)
    assert "1,200 log lines lost since it started" in warnings
    assert "api.hosts: the file says another value by now" in warnings


def test_a_node_alone_is_told_so() -> None:
    assert "serves alone" in said(list(findings.members(with_members())), Health.WARNING)


def test_engines_that_are_down_or_empty_or_missing_are_named() -> None:
    ill = with_members(engines=(engine("a", "down"), engine("b", "ready", models=()), engine("c")))
    found = list(findings.own_node(ill))
    assert said(found, Health.BAD) == "a (llamacpp) is down"
    assert said(found, Health.WARNING) == "b offers no model"
    assert "c (llamacpp) is ready with 1 model" in said(found, Health.GOOD)
    assert "none: write endpoints" in said(list(findings.own_node(with_members(engines=()))), Health.WARNING)


@pytest.mark.parametrize(
    "reason", [*EngineRefusal, *(each for each in EngineHealth if not each.takes_requests)]
)
def test_why_an_engine_takes_no_requests_is_said(reason: EngineRefusal | EngineHealth) -> None:
    if reason in (EngineRefusal.UNSUPPORTED, EngineHealth.REFUSED):
        return
    made = with_members(engines=(engine("a", "down"),))
    made = replace(made, own=replace(made.own, engine_errors={"a": reason.value}))
    bad = said(list(findings.own_node(made)), Health.BAD)
    assert bad.startswith("a (llamacpp) ")
    assert len(bad) > len("a (llamacpp) is down")


def test_models_that_nobody_is_offered_are_counted_and_what_to_do_is_said() -> None:
    made = status()
    found = list(findings.own_node(replace(made, own=replace(made.own, unfit_names={"a": 1, "b": 1_200}))))
    one, many = said(found, Health.WARNING).splitlines()
    assert one.startswith("a has 1 model whose name is unfit to be offered: give each a [[models]]")
    assert many.startswith("b has 1,200 models whose names are unfit to be offered: ")


def test_models_beyond_what_a_node_can_tell_of_are_counted() -> None:
    made = status()
    found = list(findings.own_node(replace(made, own=replace(made.own, hidden_models=6))))
    assert said(found, Health.WARNING).startswith(
        "6 models more than a node can tell of: nobody is offered those"
    )


def test_own_flags_and_faults_are_said() -> None:
    made = with_members(flags=("lonely",))
    made = replace(made, own=replace(made.own, faults=("roster_quarantined",)))
    found = list(findings.own_node(made))
    assert "has no link to any other member" in said(found, Health.WARNING)
    assert said(found, Health.BAD) == "roster_quarantined"


def test_ports_must_accept_while_the_daemon_runs_and_be_free_while_not() -> None:
    assert said(list(findings.ports({"api :1": False}, True)), Health.BAD) == "api :1 accepts no connection"
    assert said(list(findings.ports({"api :1": True}, True)), Health.GOOD) == "api :1 accepts"
    assert "is taken" in said(list(findings.ports({"api :1": True}, False)), Health.BAD)
    assert said(list(findings.ports({"api :1": False}, False)), Health.GOOD) == "api :1 is free"


def test_a_clock_far_off_is_odd_and_never_bad() -> None:
    for wall, daemon in ((0, None), (1_800_000_000_000, 1_800_000_100_000)):
        (found,) = findings.clock(wall, daemon)
        assert found.health is Health.WARNING
    (found,) = findings.clock(1_800_000_000_000, 1_800_000_000_100)
    assert found.health is Health.GOOD


# --- floors ----------------------------------------------------------------------------------------------

FIT = Installed(
    python=(3, 11), openssl=(3, 0), packages=dict(PACKAGES), http_parser_in_c=True, msgpack_in_c=True
)


@pytest.mark.threat("T47")
def test_this_very_environment_is_fit() -> None:
    assert unmet(installed()) == []
    assert unmet(FIT) == []


@pytest.mark.threat("T47")
@pytest.mark.parametrize(
    ("have", "about"),
    [
        (replace(FIT, http_parser_in_c=False), "pure-Python parser"),
        (replace(FIT, msgpack_in_c=False), "msgpack runs in pure Python"),
        (replace(FIT, python=(3, 10)), "Python 3.10: 3.11 or newer is needed"),
        (replace(FIT, openssl=(1, 1)), "OpenSSL 1.1"),
        (replace(FIT, packages={**PACKAGES, "aiohttp": (3, 14)}), "aiohttp 3.14: 3.14.1 or newer is needed"),
        (replace(FIT, packages={n: v for n, v in PACKAGES.items() if n != "uvloop"}), "uvloop is missing"),
    ],
)
def test_what_is_below_its_floor_is_named(have: Installed, about: str) -> None:
    (found,) = unmet(have)
    assert about in found


def test_versions_are_read_up_to_their_suffix() -> None:
    assert [numbers_of(text) for text in ("3.14.1rc2", "46", "x")] == [(3, 14, 1), (46,), ()]


@pytest.mark.parametrize(
    ("why", "cure"),
    [
        ("timed_out", "ufw allow 7434/tcp"),
        ("refused", "firewall-cmd --permanent --add-port=7434/tcp"),
        ("unreachable", "check routes"),
        ("identity_mismatch", "see what uses the address"),
    ],
)
def test_a_closed_port_for_requests_is_told_beside_the_link_with_the_cure(why: str, cure: str) -> None:
    closed = RequestsDoc(state="unreachable", why=why, at=("192.168.1.6", "10.0.0.6"), port=7434)
    ill = replace(member("borg", "b", link=LinkDoc(state="up", rtt_ms=1)), requests=closed, routable=False)
    found = list(findings.members(with_members(ill)))
    assert "borg is fresh" in said(found, Health.GOOD)
    assert "borg: requests: unreachable (port 7434): 192.168.1.6, 10.0.0.6" in said(found, Health.BAD)
    assert cure in said(found, Health.BAD)
    off = replace(ill, liveness="gone", link=LinkDoc(state="down", fault="timed_out"))
    assert "7434" not in said(list(findings.members(with_members(off))), Health.BAD)


def test_addresses_that_are_not_allowed_are_named_with_the_cure() -> None:
    nowhere = RequestsDoc(
        state="unreachable",
        why="no_address",
        left_out={"not_allowed": ("203.0.113.7",), "own": ("10.0.0.1",)},
    )
    ill = replace(member("borg", "b", link=LinkDoc(state="up", rtt_ms=1)), requests=nowhere, routable=False)
    cure = '203.0.113.7, outside mesh.allow_networks: add that network there, or "@borg=203.0.113.7" to mesh.peers'
    assert cure in said(list(findings.members(with_members(ill))), Health.BAD)
    unlinked = replace(ill, liveness="gone", link=LinkDoc(state="down", fault="no_address"))
    assert cure in said(list(findings.members(with_members(unlinked))), Health.BAD)
