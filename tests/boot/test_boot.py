"""The shipped unit under a systemd that booted, installed as the pages say: what no other test can show.

One container runs what this tree is, another one the commit before, upgraded. Neither reaches any network.
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.boot.container import Container, look_for_tools, opened
from tests.boot.tree import NotHere, checkout, commit_before, tree, wheels

pytestmark = [pytest.mark.boot, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
UNIT = "pairmesh.service"
INSTALL, UPGRADE = ("install", 0), ("upgrade", 0)
REMOVE, REMOVE_REST = ("uninstall", 1), ("uninstall", 2)
"""Blocks of commands: the page that has them, and which of its blocks they are."""
SUPPORT = "/mnt/boot"
NAMED = ("env", "RUNTIME_DIRECTORY=/run/pairmesh", "/opt/pairmesh/bin/pairmesh")
"""A command line that need not find the service by itself, as an older one may not."""
MEMBER = "alice"
STRANGER = "mallory"
QUICK = "[Service]\nWatchdogSec=3\nRestartSec=300ms\n"
OWN_PORTS = {"api": 21_433, "mesh": 17_433, "ingress": 17_434, "admin": 17_435}
STRICT = "[Service]\nSystemCallErrorNumber=kill\n"


def commands(block: tuple[str, int]) -> str:
    page, number = block
    text = (ROOT / f"docs/howto/{page}.md").read_text()
    return str(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[number])


def shell(container: Container, script: str, folder: str) -> "subprocess.CompletedProcess[str]":
    return container.run("bash", "-euxo", "pipefail", "-c", f"cd {folder}\n{script}", timeout=240)


def a_container(base: Path, source: Path, before: Path | None = None) -> Container:
    """Not yet open. It has the tree that is to be installed, the wheels that pip is to take, and an engine."""
    try:
        look_for_tools()
        of = tree()
        binds = {"/src": source, "/mnt/wheels": wheels(of), SUPPORT: Path(__file__).parent}
    except NotHere as why:
        not_here(str(why))
    if before is not None:
        binds["/before"] = before
    return Container(tree=of, base=base, binds=binds)


def not_here(why: str) -> NoReturn:
    """Where CI has seen that it must work, a container that does not boot is a failure."""
    if "nspawn" in os.environ.get("PAIRMESH_CHAOS_REQUIRE", "").split(","):
        pytest.fail(why)
    pytest.skip(why)


def prepare(container: Container) -> None:
    container.run("sh", "-c", 'echo "127.0.0.1 localhost $(uname -n)" >/etc/hosts')
    container.write("/etc/pip.conf", "[global]\nno-index = true\nfind-links = /mnt/wheels\n")
    container.write(
        "/etc/pairmesh/endpoints/engine.toml", 'engine = "openai"\nurl = "http://127.0.0.1:8000"\n'
    )
    container.run("systemd-run", "--unit=engine", "python3", f"{SUPPORT}/engine.py")


def open_or_say(container: Container) -> Iterator[Container]:
    try:
        with opened(container) as booted:
            prepare(booted)
            yield booted
    except NotHere as why:
        not_here(str(why))


def users(container: Container) -> None:
    """Two people, one of them in the service's group."""
    for user in (MEMBER, STRANGER):
        container.run("useradd", "--create-home", "--shell", "/bin/bash", user)
    container.run("usermod", "-aG", "pairmesh", MEMBER)


def start_own(container: Container) -> None:
    """A daemon of the member's own, beside the service."""
    ports = "\n".join(f'[{name}]\nlisten = "127.0.0.1:{port}"' for name, port in OWN_PORTS.items())
    container.write(f"/home/{MEMBER}/.config/pairmesh/pairmesh.toml", f'name = "own"\n{ports}\n')
    container.run("chown", "-R", f"{MEMBER}:", f"/home/{MEMBER}/.config")
    told = (
        f"--uid={MEMBER}",
        f"--setenv=HOME=/home/{MEMBER}",
        "--service-type=notify",
        "--property=NotifyAccess=main",
    )
    container.run("systemd-run", "--unit=own", *told, "/opt/pairmesh/bin/pairmesh", "run")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A machine with the service as the pages install it, and two users of whom one is in its group."""
    base = tmp_path_factory.mktemp("boot")
    for container in open_or_say(a_container(base / "new", checkout(base / "src"))):
        shell(container, commands(INSTALL), "/src")
        users(container)
        yield container


@pytest.fixture
def machine(installed: Container) -> Iterator[Container]:
    """With the unit as shipped, active."""
    yield installed
    found = show(installed, "ActiveState", "DropInPaths")
    if found != {"ActiveState": "active", "DropInPaths": ""}:
        drop_in(installed, None)
        installed.run("systemctl", "reset-failed", UNIT, check=False)
        installed.run("systemctl", "restart", UNIT)


def drop_in(container: Container, text: str | None) -> None:
    """Lay ``text`` over the unit, until the next boot at most."""
    path = f"/run/systemd/system/{UNIT}.d/test.conf"
    if text is None:
        container.run("rm", "-f", path)
    else:
        container.write(path, text)
    container.run("systemctl", "daemon-reload")


def show(container: Container, *names: str) -> dict[str, str]:
    said = container.run("systemctl", "show", UNIT, f"--property={','.join(names)}").stdout
    return dict(line.split("=", 1) for line in said.splitlines())


def status(container: Container) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(container.run("pairmesh", "status", "--json").stdout)
    return found


def own(container: Container) -> dict[str, Any]:
    return dict(status(container)["own"])


def journal(container: Container) -> str:
    return container.run("journalctl", "--unit", UNIT, "--output=cat", "--no-pager").stdout


def until(check: Any, within_s: float, what: str) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.05)
    return found


def offers(container: Container) -> bool:
    done = container.run(*NAMED, "status", "--json", check=False)
    return done.returncode == 0 and any(
        "short" in engine["models"]
        for member in json.loads(done.stdout)["members"]
        for engine in member["engines"]
    )


def chats(container: Container) -> "subprocess.CompletedProcess[str]":
    until(lambda: offers(container), 15, "the engine's models are offered")
    return container.run("python3", f"{SUPPORT}/client.py", "short")


def test_it_is_active_within_ten_seconds_as_its_own_user_in_its_sandbox(machine: Container) -> None:
    found = show(
        machine,
        "ActiveState",
        "NRestarts",
        "MainPID",
        "InactiveExitTimestampMonotonic",
        "ActiveEnterTimestampMonotonic",
    )
    assert (found["ActiveState"], found["NRestarts"]) == ("active", "0")
    took_us = int(found["ActiveEnterTimestampMonotonic"]) - int(found["InactiveExitTimestampMonotonic"])
    assert 0 < took_us < 10_000_000
    facts = machine.run("cat", f"/proc/{found['MainPID']}/status").stdout
    of = {key: value.split() for key, value in (line.split(":", 1) for line in facts.splitlines())}
    uid = machine.run("id", "-u", "pairmesh").stdout.strip()
    assert of["Uid"] == [uid] * 4
    assert uid != "0"
    assert int(of["CapEff"][0], 16) == int(of["CapBnd"][0], 16) == 0
    assert (of["NoNewPrivs"], of["Seccomp"]) == (["1"], ["2"])
    assert "SERVING" in machine.run("systemctl", "status", UNIT).stdout.upper()
    assert chats(machine).stdout.startswith("200\n")


def test_the_socket_is_for_its_group_and_the_keys_for_nobody_else(machine: Container) -> None:
    stat = machine.run(
        "stat",
        "--format=%U:%G %a",
        "/run/pairmesh/admin.sock",
        "/run/pairmesh",
        "/var/lib/pairmesh",
        "/etc/pairmesh",
    )
    assert stat.stdout.splitlines() == [
        "pairmesh:pairmesh 660",
        "pairmesh:pairmesh 750",
        "pairmesh:pairmesh 700",
        "root:pairmesh 750",
    ]


@pytest.mark.parametrize("verb", ["status", "doctor", "config check", "trust list", "explain --model short"])
def test_root_and_members_of_the_group_need_no_variable(machine: Container, verb: str) -> None:
    until(lambda: offers(machine), 15, "the engine's models are offered")
    machine.run("env", "-i", "sh", "-c", f"/usr/local/bin/pairmesh {verb}")
    said = machine.login(MEMBER, f"pairmesh {verb}").stdout
    assert "exist" not in said, said


def test_who_is_not_in_the_group_is_told_to_join_it(machine: Container) -> None:
    done = machine.login(STRANGER, "pairmesh status", check=False)
    assert done.returncode == 69
    assert f"usermod -aG pairmesh {STRANGER}" in done.stderr


def test_a_daemon_of_ones_own_comes_before_the_service(machine: Container) -> None:
    def name() -> str:
        return str(json.loads(machine.login(MEMBER, "pairmesh status --json").stdout)["own"]["name"])

    service = own(machine)["name"]
    assert name() == service
    start_own(machine)
    try:
        until(lambda: name() == "own", 15, "a daemon of the user's own is asked")
        assert own(machine)["name"] == service
    finally:
        machine.run("systemctl", "stop", "own")
    assert name() == service


def test_reload_needs_nothing_that_a_minimal_system_lacks(machine: Container) -> None:
    assert machine.run("sh", "-c", "test ! -e /bin/kill && test ! -e /usr/bin/kill").returncode == 0
    pid, before = show(machine, "MainPID"), journal(machine).count("config.reloaded")
    machine.write("/etc/pairmesh/policy.toml", 'preset = "latency"\n')
    machine.run("systemctl", "reload", UNIT)
    until(lambda: journal(machine).count("config.reloaded") > before, 10, "the log tells of it")
    assert own(machine)["policy"]["preset"] == "latency"
    assert show(machine, "MainPID") == pid
    assert show(machine, "ActiveState", "Result") == {"ActiveState": "active", "Result": "success"}


def test_no_call_that_the_unit_denies_is_made_from_start_to_end(machine: Container) -> None:
    """A call that is shrugged off in one release of a library is fatal in the next."""
    drop_in(machine, STRICT)
    machine.run("systemctl", "restart", UNIT)
    assert chats(machine).stdout.startswith("200\n")
    machine.login(MEMBER, "pairmesh trust export >member.trust && pairmesh drain && pairmesh drain --undo")
    machine.run("systemctl", "reload", UNIT)
    machine.run("systemctl", "stop", UNIT)
    assert show(machine, "Result", "ExecMainStatus", "NRestarts") == {
        "Result": "success",
        "ExecMainStatus": "0",
        "NRestarts": "0",
    }


def test_it_starts_with_every_drop_in_that_is_shipped(machine: Container) -> None:
    text = {path.name: path.read_text() for path in (ROOT / "systemd" / "drop-ins").iterdir()}
    (encrypt,) = re.findall(r"^# +(systemd-creds encrypt .*)$", text["credentials.conf"], re.MULTILINE)
    machine.run("sh", "-c", f"mkdir -p /etc/credstore.encrypted && echo secret | {encrypt}")
    for name, lines in text.items():
        machine.write(f"/run/systemd/system/{UNIT}.d/{name}", lines)
    try:
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "restart", UNIT)
        assert len(show(machine, "DropInPaths")["DropInPaths"].split()) == len(text)
        pid = show(machine, "MainPID")["MainPID"]
        given = machine.run(
            "sh", "-c", f"tr '\\0' '\\n' </proc/{pid}/environ | sed -n s/^CREDENTIALS_DIRECTORY=//p"
        ).stdout.strip()
        assert machine.run("cat", f"{given}/vllm-key").stdout == "secret\n"
        assert chats(machine).stdout.startswith("200\n")
    finally:
        machine.run(
            "sh",
            "-c",
            f"rm /run/systemd/system/{UNIT}.d/*; systemctl daemon-reload; systemctl restart {UNIT}",
        )


def test_the_watchdog_restarts_a_daemon_that_stands_still(machine: Container) -> None:
    """With a tenth of the unit's times, which make 35 s and a start."""
    drop_in(machine, QUICK)
    machine.run("systemctl", "restart", UNIT)
    before, pid = own(machine), show(machine, "MainPID")["MainPID"]
    machine.run("sh", "-c", f"kill -STOP {pid}")
    until(
        lambda: show(machine, "NRestarts", "ActiveState") == {"NRestarts": "1", "ActiveState": "active"},
        20,
        "it is restarted",
    )
    assert "watchdog" in machine.run("journalctl", "--unit", UNIT, "--no-pager").stdout.lower()
    after = own(machine)
    assert after["id"] == before["id"]
    assert after["epoch"] > before["epoch"]
    assert chats(machine).stdout.startswith("200\n")


def test_a_daemon_that_was_killed_is_back(machine: Container) -> None:
    drop_in(machine, QUICK)
    machine.run("systemctl", "restart", UNIT)
    machine.run("systemctl", "kill", "--signal=KILL", UNIT)
    until(
        lambda: show(machine, "NRestarts", "ActiveState") == {"NRestarts": "1", "ActiveState": "active"},
        15,
        "it is restarted",
    )
    assert chats(machine).stdout.startswith("200\n")


def test_settings_that_cannot_be_are_not_tried_again(machine: Container) -> None:
    machine.write("/etc/pairmesh/pairmesh.toml", 'nmae = "x"\n')
    try:
        assert machine.run("systemctl", "restart", UNIT, check=False).returncode != 0
        assert show(machine, "ActiveState", "ExecMainStatus", "NRestarts") == {
            "ActiveState": "failed",
            "ExecMainStatus": "78",
            "NRestarts": "0",
        }
        assert "nmae" in journal(machine)
        done = machine.run("pairmesh", "status", check=False)
        assert done.returncode == 69
        assert "systemctl status pairmesh" in done.stderr
    finally:
        machine.run("rm", "/etc/pairmesh/pairmesh.toml")


def test_a_stop_under_load_lets_end_what_can_and_tells_the_rest(machine: Container) -> None:
    until(lambda: offers(machine), 15, "the engine's models are offered")
    streams = {
        model: machine.start("python3", f"{SUPPORT}/client.py", model, "stream")
        for model in ("short", "endless")
    }
    for stream in streams.values():
        assert stream.stdout is not None
        assert stream.stdout.readline() == "200\n"
        assert stream.stdout.readline().startswith("data: ")
    began = time.monotonic()
    machine.run("systemctl", "stop", UNIT)
    took_s = time.monotonic() - began
    said = {model: stream.communicate(timeout=10)[0] for model, stream in streams.items()}
    assert took_s < 15
    assert show(machine, "Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert said["short"].count('"delta"') == 11
    assert said["short"].rstrip().endswith("data: [DONE]")
    assert '"error"' in said["endless"]
    assert "[DONE]" not in said["endless"]


def test_it_starts_at_boot_with_all_that_it_knew(machine: Container) -> None:
    before = own(machine)
    machine.power_off()
    machine.boot()
    assert show(machine, "ActiveState", "Result") == {"ActiveState": "active", "Result": "success"}
    machine.run("systemd-run", "--unit=engine", "python3", f"{SUPPORT}/engine.py")
    after = own(machine)
    assert after["id"] == before["id"]
    assert after["epoch"] > before["epoch"]
    assert chats(machine).stdout.startswith("200\n")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a node knows of itself, of others and of the past."""

    id: str
    epoch: int
    members: str
    decision: str
    chosen: str


def known(container: Container, decision: str = "") -> Known:
    """``decision``: one that is looked for; else the newest."""

    def told(*words: str) -> str:
        return container.run(*NAMED, *words).stdout

    me = json.loads(told("status", "--json"))["own"]
    record = json.loads(told("explain", *filter(None, [decision]), "--json"))
    members = "\n".join(sorted(told("trust", "list").splitlines()[1:]))
    return Known(
        id=me["id"],
        epoch=me["epoch"],
        members=members,
        decision=record["id"],
        chosen=record["chosen"],
    )


@dataclass(frozen=True, kw_only=True)
class Course:
    """One installation from the commit before to its end."""

    before: Known
    after: Known
    unit: str
    version_of_unit: str
    left: str
    rest: str


LEFT = """
find /proc -maxdepth 1 -user pairmesh
systemctl list-units --state=active,activating,failed --plain --no-legend 'pairmesh*'
systemctl list-unit-files --no-legend 'pairmesh*'
find / -xdev -maxdepth 4 -name '*pairmesh*' -not -path '/proc/*' -not -path '/home/*' | sort
getent passwd pairmesh | cut -d: -f1
getent group pairmesh | cut -d: -f1
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    """The commit before installed, used, upgraded to this tree, and removed, all as the pages say."""
    base = tmp_path_factory.mktemp("boot")
    before = commit_before(base / "before")
    if before is None:
        pytest.skip("this clone does not hold the commit before")
    for container in open_or_say(a_container(base / "old", checkout(base / "src"), before)):
        steps = commands(INSTALL).splitlines()
        shell(container, "\n".join(step for step in steps if "doctor" not in step), "/before")
        users(container)
        start_own(container)
        file = container.run("su", "-", MEMBER, "-c", "pairmesh trust export").stdout
        container.write("/var/tmp/own.trust", file)
        member = re.search(r"[a-z2-7]{52}", container.login(MEMBER, "pairmesh status --json").stdout)
        assert member
        container.run(*NAMED, "trust", "add", "/var/tmp/own.trust", "--id", member.group())
        container.run("systemctl", "stop", "own")
        assert chats(container).stdout.startswith("200\n")
        was = known(container)
        shell(container, commands(UPGRADE), "/src")
        now = known(container, was.decision)
        unit = container.run("cat", "/etc/systemd/system/pairmesh.service").stdout
        loaded = container.run("systemctl", "show", UNIT, "--property=NeedDaemonReload,ActiveState").stdout
        assert chats(container).stdout.startswith("200\n")
        shell(container, commands(REMOVE), "/")
        left = container.run("sh", "-c", LEFT).stdout
        shell(container, commands(REMOVE_REST), "/")
        rest = container.run("sh", "-c", LEFT).stdout
        yield Course(before=was, after=now, unit=unit, version_of_unit=loaded, left=left, rest=rest)


def test_an_upgrade_from_the_commit_before_keeps_all_that_the_node_knew(course: Course) -> None:
    assert course.after.id == course.before.id
    assert course.after.epoch > course.before.epoch
    assert course.before.members.count("member") == 1
    assert course.after.members == course.before.members
    assert course.before.chosen.endswith("/engine")
    assert (course.after.decision, course.after.chosen) == (course.before.decision, course.before.chosen)


def test_an_upgrade_brings_the_new_unit_into_force(course: Course) -> None:
    assert course.unit == (ROOT / "systemd" / UNIT).read_text()
    assert sorted(course.version_of_unit.split()) == ["ActiveState=active", "NeedDaemonReload=no"]


def test_a_removal_leaves_what_the_readme_says_and_nothing_that_runs(course: Course) -> None:
    assert course.left.split() == ["/etc/pairmesh", "/var/lib/pairmesh", "pairmesh", "pairmesh"]
    assert course.rest.split() == []
