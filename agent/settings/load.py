"""The one loader of ``pairmesh.toml``: defaults, then the file, then the flags of ``run``.

Either every setting is good and a frozen ``Settings`` comes back, or every fault does. Loading opens the file
and looks at the modes of it and its folder; it resolves no name and changes nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any, Final

from agent.settings.fault import Fault
from agent.settings.planes import disagreements
from agent.settings.reading import Layers, Written, read
from agent.settings.schema import KEYS, SCHEMA
from agent.settings.tuning import PressureTuning, contradictions
from agent.settings.values import Listen, PeerHint, name_of_host
from router_core.ids import NodeName

FILE: Final = "pairmesh.toml"
FLAGS: Final = "flags"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Where the local inference API listens, and which hosts and origins it accepts."""

    listen: Listen
    hosts: tuple[str, ...]
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """Where the mesh listens, its configured peers, and its limits."""

    listen: Listen
    peers: tuple[PeerHint, ...]
    allow_networks: tuple[IPv4Network | IPv6Network, ...]
    roster_max: int
    backoff_max_ms: int
    gone_min_ms: int
    gone_redial_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """``profile`` is ``auto``, ``desktop`` or ``server``, ``nvml`` is ``auto`` or ``off``."""

    profile: str
    nvml: str
    pressure: PressureTuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting in force. ``written`` keeps the text behind each key, for display; ``warnings`` are the keys of the
    file that have no effect any more."""

    name: NodeName
    router: bool
    api: ApiSettings
    mesh: MeshSettings
    ingress: Listen
    admin: Listen
    autodetect: bool
    sampling: SamplingSettings
    written: Mapping[str, Written]
    warnings: tuple[Fault, ...] = ()


def load(
    folder: Path, *, host_name: str, flags: Mapping[str, object] | None = None
) -> Settings | tuple[Fault, ...]:
    """The settings in ``folder`` with ``flags`` (by dotted key) laid over them, or every fault found."""
    faults: list[Fault] = []
    layers = Layers(SCHEMA, faults)
    written = read(folder, FILE, SCHEMA, faults)
    for key in KEYS:
        if key.default is None:
            layers.default(key, name_of_host(host_name), "host name")
        else:
            layers.default(key, key.default, "default")
    layers.lay(FILE, written)
    layers.lay(FLAGS, flags or {})
    if not any(fault.key.startswith("sampling.") for fault in faults):
        source = layers.written["sampling.pressure"].source
        wrong = contradictions(layers.values["sampling.pressure"], layers.values["sampling.profile"])
        faults += [Fault(file=source, key="sampling.pressure", problem=problem) for problem in wrong]
    if not any(fault.key.endswith(".listen") for fault in faults):
        for path, problem in disagreements(layers.values["mesh.listen"], layers.values["ingress.listen"]):
            faults.append(Fault(file=layers.written[path].source, key=path, problem=problem))
    return tuple(faults) if faults else _settings(layers)


def check(folder: Path, *, host_name: str = "node") -> list[Fault]:
    """Every fault of the settings in ``folder``; empty if ``run`` would accept them."""
    loaded = load(folder, host_name=host_name)
    return [] if isinstance(loaded, Settings) else list(loaded)


def _settings(layers: Layers) -> Settings:
    values = layers.values

    def section(name: str) -> dict[str, Any]:
        keys = (key for key in KEYS if key.path.startswith(f"{name}."))
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
        written=layers.written,
        warnings=tuple(layers.warnings),
    )
