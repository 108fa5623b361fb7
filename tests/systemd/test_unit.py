"""Every directive of the unit and of what is installed beside it, as a table: a change here is a decision."""

from pathlib import Path

import pytest

from agent.lifecycle import STOP_LIMIT_MS, ExitCode

FOLDER = Path(__file__).resolve().parents[2] / "systemd"

UNIT = {
    "Description": ["pairmesh: one local address for all your LLM machines"],
    "After": ["network-online.target"],
    "Wants": ["network-online.target"],
    "StartLimitIntervalSec": ["300"],
    "StartLimitBurst": ["10"],
}
LIFE = {
    "Type": ["notify"],
    "NotifyAccess": ["main"],
    "ExecStart": ["/opt/pairmesh/bin/pairmesh run"],
    "ExecReload": ['/bin/sh -c "kill -HUP $MAINPID"'],
    "WatchdogSec": ["30"],
    "Restart": ["on-failure"],
    "RestartSec": ["5"],
    "RestartPreventExitStatus": ["78"],
    "TimeoutStopSec": ["15"],
}
USER_AND_FOLDERS = {
    "User": ["pairmesh"],
    "Group": ["pairmesh"],
    "SupplementaryGroups": ["video render"],
    "UMask": ["0077"],
    "StateDirectory": ["pairmesh"],
    "StateDirectoryMode": ["0700"],
    "RuntimeDirectory": ["pairmesh"],
    "RuntimeDirectoryMode": ["0750"],
    "ConfigurationDirectory": ["pairmesh"],
    "ConfigurationDirectoryMode": ["0750"],
}
SANDBOX = {
    "CapabilityBoundingSet": [""],
    "AmbientCapabilities": [""],
    "NoNewPrivileges": ["yes"],
    "RestrictNamespaces": ["yes"],
    "RestrictRealtime": ["yes"],
    "RestrictSUIDSGID": ["yes"],
    "LockPersonality": ["yes"],
    "MemoryDenyWriteExecute": ["yes"],
    "RemoveIPC": ["yes"],
    "KeyringMode": ["private"],
    "ProtectSystem": ["strict"],
    "ProtectHome": ["yes"],
    "PrivateTmp": ["yes"],
    "PrivateMounts": ["yes"],
    "ProtectClock": ["yes"],
    "ProtectHostname": ["yes"],
    "ProtectKernelLogs": ["yes"],
    "ProtectKernelModules": ["yes"],
    "ProtectKernelTunables": ["yes"],
    "ProtectControlGroups": ["yes"],
    "ProtectProc": ["invisible"],
    "ProcSubset": ["all"],
}
DEVICES = {"DevicePolicy": ["closed"], "DeviceAllow": ["char-nvidia rw", "char-nvidia-frontend rw"]}
NETWORK = {
    "RestrictAddressFamilies": ["AF_INET AF_INET6 AF_UNIX AF_NETLINK"],
    "IPAddressDeny": ["any"],
    "IPAddressAllow": [
        "localhost 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 fc00::/7 fe80::/10 224.0.0.0/4 ff00::/8"
    ],
}
CALLS_AND_LIMITS = {
    "SystemCallArchitectures": ["native"],
    "SystemCallFilter": ["@system-service", "~@privileged @resources @obsolete"],
    "SystemCallErrorNumber": ["EPERM"],
    "LimitNOFILE": ["8192"],
    "LimitCORE": ["0"],
    "MemoryHigh": ["300M"],
    "MemoryMax": ["400M"],
    "MemorySwapMax": ["0"],
    "TasksMax": ["64"],
    "CPUWeight": ["20"],
    "IOWeight": ["20"],
    "Nice": ["5"],
    "OOMScoreAdjust": ["300"],
}
SERVICE = LIFE | USER_AND_FOLDERS | SANDBOX | DEVICES | NETWORK | CALLS_AND_LIMITS


def directives(path: Path) -> dict[str, dict[str, list[str]]]:
    """Sections of a unit file, each key with its values in order; a key may be written more than once."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and line[0] not in "#;":
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return sections


def rows(path: Path) -> list[str]:
    return [" ".join(line.split()) for line in path.read_text().splitlines() if line and line[0] != "#"]


def test_the_unit_says_what_the_table_says_and_nothing_else() -> None:
    assert directives(FOLDER / "pairmesh.service") == {
        "Unit": UNIT,
        "Service": SERVICE,
        "Install": {"WantedBy": ["multi-user.target"]},
    }


def test_the_unit_agrees_with_the_daemon_about_stopping_and_refusing() -> None:
    assert int(SERVICE["TimeoutStopSec"][0]) * 1_000 == STOP_LIMIT_MS
    assert [int(code) for code in SERVICE["RestartPreventExitStatus"]] == [ExitCode.REFUSED]


def test_the_daemon_gets_no_right_to_look_into_other_processes() -> None:
    for path in FOLDER.rglob("*"):
        assert path.is_dir() or "CAP_" not in path.read_text(), path


def test_the_user_is_a_system_user_with_the_groups_of_gpu_devices() -> None:
    assert rows(FOLDER / "sysusers.conf") == [
        "g video -",
        "g render -",
        'u pairmesh - "pairmesh daemon" /var/lib/pairmesh',
    ]


def test_settings_belong_to_root_and_are_readable_by_the_daemon_alone() -> None:
    assert rows(FOLDER / "tmpfiles.conf") == [
        "d /etc/pairmesh 0750 root pairmesh",
        "d /etc/pairmesh/endpoints 0750 root pairmesh",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attribution", {"ProtectProc": ["default"]}),
        ("credentials", {"LoadCredentialEncrypted": ["vllm-key"]}),
        ("spill-targets", {"IPAddressAllow": ["203.0.113.7 2001:db8::7"]}),
        ("wsl", {"DeviceAllow": ["/dev/dxg rw"]}),
    ],
)
def test_an_example_drop_in_changes_one_thing(name: str, expected: dict[str, list[str]]) -> None:
    assert directives(FOLDER / "drop-ins" / f"{name}.conf") == {"Service": expected}


def test_every_example_drop_in_is_tested() -> None:
    assert {path.stem for path in (FOLDER / "drop-ins").iterdir()} == {
        "attribution",
        "credentials",
        "spill-targets",
        "wsl",
    }
