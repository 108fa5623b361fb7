"""Loading, checking and printing ``pairmesh.toml``."""

import json
import tomllib
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.settings.fault import Fault, toml
from agent.settings.load import FILE, Settings, check, load
from agent.settings.policy_schema import POLICY_SCHEMA
from agent.settings.reading import toml_of
from agent.settings.schema import KEYS, SCHEMA
from agent.settings.show import reference, show
from agent.settings.values import name_of_host
from router_core.policy.pressure import SERVER, with_overrides

NODE_ID = "a" * 52


def write(folder: Path, text: str) -> Path:
    (folder / FILE).write_text(text, encoding="utf-8")
    return folder


def loaded(folder: Path, **flags: object) -> Settings:
    found = load(
        folder, host_name="box.lan", flags={key.replace("__", "."): value for key, value in flags.items()}
    )
    assert isinstance(found, Settings), found
    return found


def faults(folder: Path, text: str) -> dict[str, Fault]:
    return {fault.key: fault for fault in check(write(folder, text))}


def test_an_empty_folder_gives_the_documented_defaults(tmp_path: Path) -> None:
    found = loaded(tmp_path)
    assert (found.name, found.router, found.autodetect) == ("box", True, True)
    assert str(found.api.listen) == "127.0.0.1:11433"
    assert (str(found.mesh.listen), str(found.ingress), str(found.admin)) == (
        ":7433",
        ":7434",
        "127.0.0.1:7435",
    )
    assert found.mesh.roster_max == 64
    assert (found.mesh.backoff_max_ms, found.mesh.gone_min_ms, found.mesh.gone_redial_ms) == (
        30_000,
        60_000,
        30_000,
    )
    assert ip_network("fc00::/7") in found.mesh.allow_networks
    assert not any(
        network.overlaps(ip_network("127.0.0.0/8"))
        for network in found.mesh.allow_networks
        if network.version == 4
    )
    assert found.sampling.profile == "auto"


def test_a_missing_folder_is_an_empty_one(tmp_path: Path) -> None:
    assert loaded(tmp_path / "absent").name == "box"


def test_flags_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    write(tmp_path, 'name = "filed"\n[mesh]\nroster_max = 7\n[ingress]\nlisten = "127.0.0.1:0"\n')
    found = loaded(tmp_path, mesh__roster_max=9)
    assert (found.name, found.mesh.roster_max, found.ingress.port) == ("filed", 9, 0)
    sources = {path: written.source for path, written in found.written.items()}
    assert (sources["name"], sources["mesh.roster_max"], sources["router"]) == (FILE, "flags", "default")


def test_every_fault_is_reported_at_once_with_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    found = faults(
        tmp_path,
        """
        nmae = "x"
        name = "Bad Name"
        router = 1
        [api]
        listen = "0.0.0.0:11433"
        origins = ["null"]
        [mesh]
        roster_max = 5000
        backoff_max_s = "3"
        allow_networks = ["10.0.0.1/8"]
        [sampling]
        profile = "laptop"
        """,
    )
    assert found.keys() == {
        "nmae", "name", "router", "api.listen", "api.origins", "mesh.roster_max", "mesh.backoff_max_s",
        "mesh.allow_networks", "sampling.profile",
    }  # fmt: skip
    assert found["nmae"].nearest == "name"
    assert found["name"].value == '"Bad Name"'
    assert found["mesh.roster_max"].allowed == "1 to 1024"
    assert "beyond loopback" in found["api.listen"].problem
    assert str(found["router"]) == "pairmesh.toml: router: not a boolean: 1; allowed: true or false"


def test_several_bad_entries_of_one_list_are_all_named(tmp_path: Path) -> None:
    text = f'[mesh]\npeers = ["@a=10.0.0.1", "nobody=10.0.0.2", "{NODE_ID}=host.lan", "@a=10.0.0.1:0"]'
    values = [fault.value for fault in check(write(tmp_path, text))]
    assert values == ['"nobody=10.0.0.2"', f'"{NODE_ID}=host.lan"'[:57] + "...", '"@a=10.0.0.1:0"']


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("api.local_token", "true"),
        ("api.local_token", "0"),
        ("api.tls_cert", '"cert.pem"'),
        ("api.tls_key", '"key.pem"'),
        ("api.engine_admin", "true"),
    ],
)
def test_what_a_removed_key_asked_for_is_refused_and_its_default_is_a_warning(
    tmp_path: Path, key: str, value: str
) -> None:
    assert "removed in 0.1.0: " in faults(tmp_path, f"{key} = {value}")[key].problem
    found = loaded(write(tmp_path, f"{key} = {toml(SCHEMA.removed[key].harmless)}\nrouter = false"))
    assert [warning.key for warning in found.warnings] == [key]
    assert (found.router, key in found.written) == (False, False)


def test_no_key_is_both_known_and_removed() -> None:
    for schema in (SCHEMA, POLICY_SCHEMA):
        assert not schema.by_path.keys() & schema.removed.keys()


def test_a_long_list_may_stand_in_one_line(tmp_path: Path) -> None:
    peers = [f"@node-{number}=10.0.0.{number}" for number in range(200)]
    text = f"[mesh]\npeers = {json.dumps(peers)} # ... and no more\n"
    assert len(loaded(write(tmp_path, text)).mesh.peers) == 200


@pytest.mark.parametrize(
    "text",
    [
        f"x = [{', '.join(['1.5'] * 300)}]",
        'x = """\n' + "." * 300 + '"""""\n# ' + "." * 300,
        "x = '''" + "." * 300 + "''''",
        ". ".join(["a"] * 16) + " = 1",
    ],
)
def test_dots_that_open_no_table_are_as_many_as_they_like(text: str) -> None:
    assert len(toml_of(text.encode())) == 1


@pytest.mark.parametrize(
    "text",
    [
        "KEY = 1",
        "\"k\".KEY.'k' = 1",
        "x = ['\"', {KEY = '\"'}]",
        'x = ["\\"", {KEY = "1"}]',
        'x = ["""\n""", {KEY = "1"}]',
        'x = ["""a"""", {KEY = "1"}]',
    ],
)
def test_no_string_hides_the_dots_of_a_key(tmp_path: Path, text: str) -> None:
    """Read, they take a time that grows with their square: nobody is to wait for what is refused anyway."""
    for key in ("a." * 16 + "b", "a . " * 40_000 + "b"):
        (fault,) = check(write(tmp_path, text.replace("KEY", key)))
        assert fault.problem == "not TOML: nested too deeply"


def test_broken_toml_gives_line_and_column(tmp_path: Path) -> None:
    (fault,) = check(write(tmp_path, "router = true\nname = \n"))
    assert (fault.file, fault.problem) == ("pairmesh.toml:2:8", "not TOML: invalid value")


def test_a_file_that_is_not_utf8_gives_its_line(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'router = true\nname = "\xff"\n')
    (fault,) = check(tmp_path)
    assert (fault.file, fault.problem) == ("pairmesh.toml:2", "not UTF-8")


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5_000 + "]" * 5_000,
        "x = " + "9" * 5_000,
        "#" * 1_100_000,
        "router = 0o" + "7" * 9_000,
        "a." * 100_000 + "b = 1",
    ],
)
def test_an_absurd_file_is_a_fault_not_a_crash(tmp_path: Path, text: str) -> None:
    (fault,) = check(write(tmp_path, text))
    assert fault.file.startswith(FILE)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_world_writable_place_is_refused(tmp_path: Path, what: str) -> None:
    write(tmp_path, 'name = "a"')
    place = tmp_path if what == "folder" else tmp_path / FILE
    place.chmod(0o777)
    (fault,) = check(tmp_path)
    assert "writable by everybody" in fault.problem
    place.chmod(0o755)
    assert check(tmp_path) == []


def test_a_section_that_is_no_table_is_a_fault(tmp_path: Path) -> None:
    assert faults(tmp_path, "mesh = 3")["mesh"].allowed == "[mesh]"


@pytest.mark.parametrize(
    ("text", "hosts", "source", "loopback"),
    [
        (":7433", ("0.0.0.0", "::"), None, False),
        ("0.0.0.0:7433", ("0.0.0.0",), None, False),
        ("[::]:0", ("::",), None, False),
        ("127.0.0.1:1024", ("127.0.0.1",), "127.0.0.1", True),
        ("[::1]:65535", ("::1",), "::1", True),
        ("192.168.0.4:1029", ("192.168.0.4",), "192.168.0.4", False),
    ],
)
def test_a_listening_address_says_what_to_bind(
    tmp_path: Path, text: str, hosts: tuple[str, ...], source: str | None, loopback: bool
) -> None:
    alike = text.rpartition(":")[0] + ":7434"
    listen = loaded(write(tmp_path, f'[mesh]\nlisten = "{text}"\n[ingress]\nlisten = "{alike}"')).mesh.listen
    assert (listen.hosts, listen.source, listen.loopback, str(listen)) == (hosts, source, loopback, text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7433",
        "::1:7433",
        "localhost:7433",
        "1.2.3.4:65536",
        "1.2.3.4:-1",
        "[1.2.3.4]:5",
        "[fe80::1%lo]:5",
    ],
)
def test_a_malformed_listening_address_is_refused(tmp_path: Path, text: str) -> None:
    assert faults(tmp_path, f'[ingress]\nlisten = "{text}"')["ingress.listen"].value == f'"{text}"'


def test_peers_are_a_node_id_or_a_name_and_an_address(tmp_path: Path) -> None:
    text = f'[mesh]\npeers = ["{NODE_ID}=[fd00::2]:9", "@box-b=192.168.0.3"]'
    first, second = loaded(write(tmp_path, text)).mesh.peers
    assert (first.ref, first.named, first.ip, first.port) == (NODE_ID, False, ip_address("fd00::2"), 9)
    assert (second.ref, second.named, second.ip, second.port) == (
        "box-b",
        True,
        ip_address("192.168.0.3"),
        7433,
    )


def test_a_peer_of_a_shared_name_is_told_by_how_its_id_begins(tmp_path: Path) -> None:
    (peer,) = loaded(write(tmp_path, '[mesh]\npeers = ["@ubuntu~k3fz=10.0.0.3"]')).mesh.peers
    assert (peer.ref, peer.named, peer.mark) == ("ubuntu", True, "k3fz")
    for wrong in ("@ubuntu~=10.0.0.3", "@ubuntu~k3=10.0.0.3", "@ubuntu~K3FZ=10.0.0.3"):
        assert "mesh.peers" in faults(tmp_path, f'[mesh]\npeers = ["{wrong}"]')


def test_hosts_and_origins_are_kept_as_they_are_compared(tmp_path: Path) -> None:
    text = '[api]\nhosts = ["Box.LAN:8080", "[::1]"]\norigins = ["http://box.lan:3000"]'
    api = loaded(write(tmp_path, text)).api
    assert (api.hosts, api.origins) == (("box.lan:8080", "[::1]"), ("http://box.lan:3000",))


@pytest.mark.parametrize(
    ("host", "name"),
    [("Box_7.example.org", "box-7"), ("", "node"), ("---", "node"), ("x" * 40, "x" * 32), ("Ünder", "nder")],
)
def test_a_host_name_becomes_a_node_name(host: str, name: str) -> None:
    assert name_of_host(host) == name


def test_pressure_signals_are_tuned_or_switched_off(tmp_path: Path) -> None:
    tuning = loaded(
        write(
            tmp_path,
            """
            [sampling.pressure]
            "memory.full" = "off"
            memory.some = "off"
            cpu.some = "off"
            [sampling.pressure.swap.rate.elevated]
            enter = 8
            hold_in_s = 2.5
            """,
        )
    ).sampling.pressure
    assert sorted(tuning.off) == ["cpu.some", "memory.full", "memory.some"]
    table = with_overrides(SERVER, tuning.overrides, tuning.off)
    kept = [row.signal for row in table.rows]
    assert kept == [row.signal for row in SERVER.rows if row.signal not in tuning.off]
    swap = table.row("swap.rate")
    assert swap is not None
    rule = swap.rules[0]
    assert (rule.enter.floor, rule.hold_in_ms, rule.exit.floor, rule.hold_out_ms) == (8, 2_500, 0.4, 30_000)


def test_faults_of_pressure_name_the_place_below_the_key(tmp_path: Path) -> None:
    found = faults(
        tmp_path,
        """
        [sampling.pressure]
        memory.sum = "off"
        steal.pct.high = { enter = 3 }
        vram.free.high = { enter = "4%", exit = "8%" }
        memory.full.critcal = { enter = 4 }
        memory.some.high = { enter = -1, hold_in_s = 601, hold_uot_s = 3 }
        swap = 3
        """,
    )
    assert found.keys() == {
        f"sampling.pressure.{at}"
        for at in (
            "memory.sum", "steal.pct", "memory.full.critcal", "memory.some.high.enter", "memory.some.high.hold_in_s",
            "memory.some.high.hold_uot_s", "swap",
        )
    }  # fmt: skip
    assert found["sampling.pressure.memory.full.critcal"].nearest == "critical"
    assert found["sampling.pressure.memory.some.high.hold_uot_s"].nearest == "hold_out_s"
    assert found["sampling.pressure.steal.pct"].allowed == '"off"'


def test_an_exit_that_is_not_milder_than_its_enter_is_refused(tmp_path: Path) -> None:
    text = '[sampling.pressure]\nmemory.avail.high = { enter = "10%", exit = "10%" }\nswap.rate.high = { enter = 4 }'
    problems = [fault.problem for fault in check(write(tmp_path, text))]
    assert len(problems) == 2
    assert problems[0].startswith("memory.avail.high: exit must be strictly milder")
    assert problems[1].startswith("swap.rate: enter of elevated must be strictly milder")


def test_a_level_that_a_row_lacks_needs_all_four_numbers(tmp_path: Path) -> None:
    text = "[sampling.pressure]\nmemory.full.high = { enter = 2 }"
    assert "needs all four numbers" in faults(tmp_path, text)["sampling.pressure"].problem
    whole = "[sampling.pressure]\nmemory.full.high = { enter = 2, hold_in_s = 0, exit = 0.5, hold_out_s = 9 }"
    assert check(write(tmp_path, whole)) == []


def test_shown_settings_load_to_the_same_settings(tmp_path: Path) -> None:
    text = f'name = "a-b"\n[mesh]\npeers = ["{NODE_ID}=10.0.0.1"]\n[sampling.pressure]\nmemory.some.high = {{ enter = 12 }}\n'
    found = loaded(write(tmp_path, text), router=False)
    printed = show(SCHEMA, found.written)
    assert 'name = "a-b"  # pairmesh.toml' in printed
    assert "router = false  # flags" in printed
    again = loaded(write(tmp_path, printed))
    assert (again.name, again.router, again.api, again.mesh, again.sampling) == (
        found.name, found.router, found.api, found.mesh, found.sampling,
    )  # fmt: skip


@settings(max_examples=80)
@given(
    st.recursive(
        st.one_of(st.text(), st.booleans(), st.integers(-(2**63), 2**63 - 1)),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_a_printed_value_reads_back_as_itself(value: object) -> None:
    assert tomllib.loads(f"x = {toml(value)}") == {"x": value}


LEAVES = (
    st.none() | st.text() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | st.just("off")
)
WRITTEN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["memory", "avail", "swap.rate", "high", "enter", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(flags=st.dictionaries(st.sampled_from([key.path for key in KEYS]), WRITTEN, max_size=6))
def test_whatever_is_written_is_either_accepted_or_a_fault_with_a_key(flags: dict[str, object]) -> None:
    found = load(Path("/nonexistent"), host_name="x", flags=flags)
    if isinstance(found, Settings):
        assert all(found.written[path].value == value for path, value in flags.items())
    else:
        assert all(any(fault.key.startswith(path) for path in flags) for fault in found)
        assert all(str(fault).isprintable() for fault in found)


def test_the_reference_lists_every_key_once() -> None:
    lines = reference(SCHEMA).splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == [key.path for key in KEYS]
    assert all(line.count("|") == 5 for line in lines)


@pytest.mark.parametrize(
    ("mesh", "ingress", "problem"),
    [
        ("10.0.0.5:7433", "10.0.1.5:7434", "reached at no address of mesh.listen, 10.0.0.5:7433"),
        ("127.0.0.1:7433", "10.0.0.5:7434", "give both the same address"),
        ("0.0.0.0:7433", "[::]:7434", "reached at no address"),
        ("0.0.0.0:7433", "[fd00::5]:7434", "reached at no address"),
        (":7433", ":7433", "has the port of mesh.listen"),
        (":7433", ":443", "members dial no port below 1024, as :443 is"),
        (":80", ":7434", "members dial no port below 1024, as :80 is"),
    ],
)
def test_listeners_that_no_member_could_reach_both_are_refused(
    tmp_path: Path, mesh: str, ingress: str, problem: str
) -> None:
    found = faults(tmp_path, f'[mesh]\nlisten = "{mesh}"\n[ingress]\nlisten = "{ingress}"')
    assert problem in str(next(iter(found.values())))


@pytest.mark.parametrize(
    ("mesh", "ingress"),
    [
        (":7433", "10.0.0.5:7434"),
        ("10.0.0.5:7433", ":7434"),
        ("0.0.0.0:7433", "10.0.0.5:7434"),
        ("10.0.0.5:0", "10.0.0.5:0"),
        ("[::]:7433", ":7434"),
    ],
)
def test_listeners_that_meet_somewhere_are_fine(tmp_path: Path, mesh: str, ingress: str) -> None:
    write(tmp_path, f'[mesh]\nlisten = "{mesh}"\n[ingress]\nlisten = "{ingress}"')
    assert str(loaded(tmp_path).ingress) == ingress


@pytest.mark.parametrize("ip", ["169.254.7.7", "[fe80::1]"])
def test_a_link_local_peer_is_refused_by_name(tmp_path: Path, ip: str) -> None:
    found = faults(tmp_path, f'[mesh]\npeers = ["@borg={ip}"]')["mesh.peers"]
    assert "link-local" in str(found)
    assert ip in str(found)
