"""Claims about whom the admin listener answers at all."""

import pytest

from agent.admin.guard import RequestHead, RequestRefusal, hosts_for, judge

HOSTS = hosts_for("127.0.0.1", 7435, ["box.lan", "other.lan:8080"])
ORIGINS = frozenset({"https://panel.lan", "null"})


def asked(
    target: str = "/metrics",
    host: str | list[str] = "127.0.0.1:7435",
    origin: str | None = None,
    site: str = "",
) -> RequestHead:
    return RequestHead(
        target=target,
        hosts=[host] if isinstance(host, str) else host,
        origins=[] if origin is None else [origin],
        fetch_sites=[site] if site else [],
    )


@pytest.mark.threat("T35")
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:7435",
        "localhost:7435",
        "LocalHost:7435",
        "localhost.:7435",
        "box.lan:7435",
        "other.lan:8080",
    ],
)
def test_own_names_are_answered(host: str) -> None:
    assert judge(asked(host=host), HOSTS, ORIGINS) is None


@pytest.mark.threat("T35")
@pytest.mark.parametrize(
    "host",
    [
        "",
        "127.0.0.1",
        "localhost",
        "127.0.0.1:80",
        "127.0.0.1.nip.io:7435",
        "evil.example:7435",
        "other.lan:7435",
        "[::1]:7435",
        ":7435",
        " 127.0.0.1:7435",
        [],
        ["127.0.0.1:7435", "127.0.0.1:7435"],
    ],
)
def test_a_rebound_name_is_refused(host: str | list[str]) -> None:
    assert judge(asked(host=host), HOSTS, ORIGINS) is RequestRefusal.HOST


@pytest.mark.threat("T36")
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "", "https://panel.lan:8443", "HTTPS://PANEL.LAN"]
)
def test_a_foreign_origin_is_refused(origin: str) -> None:
    assert judge(asked(origin=origin), HOSTS, ORIGINS) is RequestRefusal.ORIGIN


@pytest.mark.threat("T36")
@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site"])
def test_fetch_metadata_of_another_site_is_refused_unless_its_origin_is_allowed(site: str) -> None:
    assert judge(asked(site=site), HOSTS, ORIGINS) is RequestRefusal.ORIGIN
    assert judge(asked(site=site, origin="https://panel.lan"), HOSTS, ORIGINS) is None


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_a_person_typing_the_address_is_answered(site: str) -> None:
    assert judge(asked(site=site), HOSTS, ORIGINS) is None


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:7435/metrics",
        "*",
        "127.0.0.1:7435",
        "//metrics",
        "/v1/../metrics",
        "/v1/decisions/%2F",
        "/v1/decisions/%5C",
        "/v1/decisions/a%00",
        "/v1\\status",
        "",
    ],
)
def test_targets_another_parser_could_read_differently_are_refused_before_all_else(target: str) -> None:
    assert judge(asked(target=target, host="evil"), HOSTS, ORIGINS) is RequestRefusal.TARGET


def test_an_ipv6_listener_is_known_by_its_brackets() -> None:
    assert "[::1]:7435" in hosts_for("::1", 7435)
