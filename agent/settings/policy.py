"""The loader of ``policy.toml``: a preset, then the file. Every fault at once, or a whole policy.

An absent file is the preset ``balanced``. Loading changes nothing.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from agent.settings.fault import Fault
from agent.settings.policy_schema import BASE, POLICY_KEYS, POLICY_SCHEMA, PolicyKey
from agent.settings.reading import Layers, Schema, Written, parse, read
from router_core.errors import LocalMisuse
from router_core.policy.placement import PRESETS, PlacementPolicy

POLICY_FILE: Final = "policy.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRead:
    """A policy, what is behind each number by key, and the keys of the file that have no effect any more."""

    policy: PlacementPolicy
    written: Mapping[str, Written]
    warnings: tuple[Fault, ...] = ()


def load_policy(folder: Path, schema: Schema = POLICY_SCHEMA) -> PolicyRead | tuple[Fault, ...]:
    """The policy of the config folder, or every fault found."""
    faults: list[Fault] = []
    return _layered(read(folder, POLICY_FILE, schema, faults), faults, schema)


def parse_policy(text: bytes, name: str = POLICY_FILE) -> PolicyRead | tuple[Fault, ...]:
    """The policy in the text of such a file, or every fault found; ``name`` is what they call a text that is no TOML."""
    faults: list[Fault] = []
    return _layered(parse(text, name, POLICY_SCHEMA, faults), faults, POLICY_SCHEMA)


def _layered(
    given: Mapping[str, object], faults: list[Fault], schema: Schema
) -> PolicyRead | tuple[Fault, ...]:
    name = given.get("preset", BASE.name)
    base = PRESETS.get(name, BASE) if isinstance(name, str) else BASE
    layers = Layers(schema, faults)
    for key in POLICY_KEYS:
        layers.default(key, key.of(base), f"preset {base.name}")
    layers.lay(POLICY_FILE, given)
    policy = _built(base, layers.values, faults)
    if faults:
        return tuple(faults)
    return PolicyRead(policy=policy, written=layers.written, warnings=tuple(layers.warnings))


def _built(base: PlacementPolicy, values: Mapping[str, Any], faults: list[Fault]) -> PlacementPolicy:
    """``base`` with ``values`` laid over it, table by table: numbers that bound each other share one."""
    policy = base
    for table, group in groupby(POLICY_KEYS, key=_table_of):
        keys = tuple(group)
        if any(_concerns(fault, key) for fault in faults for key in keys):
            continue
        try:
            policy = _with(policy, {key.field: values[key.path] for key in keys})
        except LocalMisuse as misuse:
            faults.append(Fault(file=POLICY_FILE, key=table, problem=str(misuse)))
    return policy


def _with(policy: PlacementPolicy, values: Mapping[str, Any]) -> PlacementPolicy:
    """``policy`` with ``values`` in place of its fields of these dotted names."""
    changes: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = defaultdict(dict)
    for field, value in values.items():
        part, dot, name = field.rpartition(".")
        (inner[part] if dot else changes)[name] = value
    for part, fields in inner.items():
        changes[part] = replace(getattr(policy, part), **fields)
    return replace(policy, **changes)


def _table_of(key: PolicyKey) -> str:
    return key.path.rpartition(".")[0]


def _concerns(fault: Fault, key: PolicyKey) -> bool:
    return fault.key == key.path or fault.key.startswith(f"{key.path}.")
