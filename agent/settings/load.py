"""The one loader of ``pairmesh.toml``: defaults, then the file, then the flags of ``run``.

Either every setting is good and a frozen ``Settings`` comes back, or every fault does. Loading opens the file
and looks at the modes of it and its folder; it resolves no name and changes nothing.
"""

import re
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, Final

from agent.settings.fault import Fault, shown
from agent.settings.schema import BY_PATH, KEYS, SECTIONS, Key
from agent.settings.tuning import PressureTuning, contradictions
from agent.settings.values import WHOLE, Listen, PeerHint, Refuse, name_of_host, nearest
from router_core.ids import NodeName

FILE: Final = "pairmesh.toml"
FLAGS: Final = "flags"
FILE_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    listen: Listen
    hosts: tuple[str, ...]
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    listen: Listen
    peers: tuple[PeerHint, ...]
    allow_networks: tuple[IPv4Network | IPv6Network, ...]
    roster_max: int
    backoff_max_ms: int
    gone_min_ms: int
    gone_redial_ms: int
    audit_ms: int
    audit_far_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """``profile`` is ``auto``, ``desktop`` or ``server``, ``nvml`` is ``auto`` or ``off``."""

    profile: str
    nvml: str
    pressure: PressureTuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One setting as it is in force: the value in TOML's terms and where it came from."""

    value: object
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting in force. ``written`` keeps the text behind each key, for display."""

    name: NodeName
    router: bool
    api: ApiSettings
    mesh: MeshSettings
    ingress: Listen
    admin: Listen
    autodetect: bool
    sampling: SamplingSettings
    written: Mapping[str, Written]


def load(
    folder: Path, *, host_name: str, flags: Mapping[str, object] | None = None
) -> Settings | tuple[Fault, ...]:
    """The settings in ``folder`` with ``flags`` (by dotted key) laid over them, or every fault found."""
    faults: list[Fault] = []
    layers = [(FILE, _read(folder, faults)), (FLAGS, dict(flags or {}))]
    written: dict[str, Written] = {}
    values: dict[str, Any] = {}
    for key in KEYS:
        default = key.default if key.default is not None else name_of_host(host_name)
        written[key.path] = Written(
            value=default, source="default" if key.default is not None else "host name"
        )
        values[key.path] = key.parse(default, _reporter(key, "default", default, faults))
    for file, layer in layers:
        for path, value in layer.items():
            known = BY_PATH.get(path)
            if known is None:
                faults.append(_unknown(file, path))
                continue
            before = len(faults)
            parsed = known.parse(value, _reporter(known, file, value, faults))
            if known.later and value != known.default and len(faults) == before:
                faults.append(
                    Fault(file=file, key=path, problem="not available in this version", value=shown(value))
                )
            written[path] = Written(value=value, source=file)
            values[path] = parsed
    if not any(fault.key.startswith("sampling.") for fault in faults):
        source = written["sampling.pressure"].source
        wrong = contradictions(values["sampling.pressure"], values["sampling.profile"])
        faults += [Fault(file=source, key="sampling.pressure", problem=problem) for problem in wrong]
    return tuple(faults) if faults else _settings(values, written)


def check(folder: Path, *, host_name: str = "node") -> list[Fault]:
    """Every fault of the settings in ``folder``; empty if ``run`` would accept them."""
    loaded = load(folder, host_name=host_name)
    return [] if isinstance(loaded, Settings) else list(loaded)


def _settings(values: Mapping[str, Any], written: Mapping[str, Written]) -> Settings:
    def section(name: str) -> dict[str, Any]:
        keys = (key for key in KEYS if key.path.startswith(f"{name}.") and not key.later)
        return {key.path.split(".")[1]: values[key.path] for key in keys}

    mesh = {re.sub("_s$", "_ms", name): value for name, value in section("mesh").items()}
    return Settings(
        name=values["name"],
        router=values["router"],
        api=ApiSettings(**section("api")),
        mesh=MeshSettings(**mesh),
        ingress=values["ingress.listen"],
        admin=values["admin.listen"],
        autodetect=values["engines.autodetect"],
        sampling=SamplingSettings(**section("sampling")),
        written=written,
    )


def _read(folder: Path, faults: list[Fault]) -> dict[str, object]:
    """The file's keys by dotted path; empty if there is no file or it cannot be read."""
    path = folder / FILE
    try:
        for place in (folder, path):
            if place.stat().st_mode & stat.S_IWOTH:
                problem = f"{place} is writable by everybody; chmod o-w it"
                faults.append(Fault(file=place.name, key="", problem=problem))
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        faults.append(Fault(file=FILE, key="", problem=f"unreadable: {error.strerror}"))
        return {}
    if len(raw) > FILE_BYTES:
        faults.append(Fault(file=FILE, key="", problem=f"larger than {FILE_BYTES} bytes"))
        return {}
    try:
        tree = tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        faults.append(Fault(file=f"{FILE}:{line}", key="", problem="not UTF-8"))
        return {}
    except RecursionError:
        faults.append(Fault(file=FILE, key="", problem="nested too deeply"))
        return {}
    except ValueError as error:
        faults.append(_broken(str(error)))
        return {}
    return _flat(tree, faults)


def _broken(message: str) -> Fault:
    """The TOML reader tells the place at the end of its message only."""
    match = re.fullmatch(
        r"(?P<problem>.*) \(at (line (?P<line>\d+), column (?P<column>\d+)|(?P<end>.*))\)", message, re.S
    )
    if match is None:
        return Fault(file=FILE, key="", problem=f"not TOML: {message}")
    place = f"{FILE}:{match['line']}:{match['column']}" if match["line"] else f"{FILE}, {match['end']}"
    problem = match["problem"]
    return Fault(file=place, key="", problem=f"not TOML: {problem[:1].lower()}{problem[1:]}")


def _flat(tree: Mapping[str, object], faults: list[Fault]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        if name not in SECTIONS:
            found[name] = value
        elif isinstance(value, dict):
            found.update({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            faults.append(
                Fault(file=FILE, key=name, problem="not a table", value=shown(value), allowed=f"[{name}]")
            )
    return found


def _reporter(key: Key, file: str, written: object, faults: list[Fault]) -> Refuse:
    def refuse(
        problem: str,
        *,
        value: object = WHOLE,
        allowed: str | None = None,
        at: str = "",
        meant: str | None = None,
    ) -> None:
        offending = written if value is WHOLE else value
        faults.append(
            Fault(
                file=file,
                key=f"{key.path}.{at}" if at else key.path,
                problem=problem,
                value=None if offending is None else shown(offending),
                allowed=allowed or key.takes,
                nearest=meant,
            )
        )

    return refuse


def _unknown(file: str, path: str) -> Fault:
    return Fault(file=file, key=path, problem="unknown key", nearest=nearest(path, (*BY_PATH, *SECTIONS)))
