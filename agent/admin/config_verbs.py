"""The verb ``config-show``: what is in force, as against what the files say by now. Changes nothing; it is asked through
the socket alone, as settings hold addresses."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from agent.admin.arguments import typed
from agent.admin.ports import Verbs
from agent.settings.fault import Fault
from agent.settings.policy import PolicyRead
from agent.settings.policy_schema import POLICY_SCHEMA
from agent.settings.reading import Schema, Written
from agent.settings.schema import SCHEMA
from agent.settings.show import is_hidden


class Change(Protocol):
    """One setting whose value in the file differs from the one in force."""

    @property
    def key(self) -> str: ...
    @property
    def in_force(self) -> Written: ...
    @property
    def written(self) -> Written: ...


class NoArguments(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a verb that takes none."""


def config_verbs(
    settings: Mapping[str, Written],
    policy: Callable[[], PolicyRead],
    waiting: Callable[[], tuple[Change, ...] | tuple[Fault, ...]],
) -> Verbs:
    """The verb. ``waiting`` reads the file, in a thread."""

    async def show(arguments: dict[str, Any]) -> dict[str, Any]:
        typed(arguments, NoArguments)
        found, read = await asyncio.to_thread(waiting), policy()
        changes = [each for each in found if not isinstance(each, Fault)]
        return {
            "settings": told(SCHEMA, settings),
            "policy": told(POLICY_SCHEMA, read.written),
            "policy_hash": read.policy.hash,
            "waiting": {
                each.key: {
                    "in_force": _told(SCHEMA, each.key, each.in_force),
                    "written": _told(SCHEMA, each.key, each.written),
                }
                for each in changes
            },
            "faults": [str(each) for each in found if isinstance(each, Fault)],
        }

    return {"config-show": show}


def told(schema: Schema, written: Mapping[str, Written]) -> dict[str, Any]:
    """Every value with its source; null for what is not shown."""
    return {key: _told(schema, key, each) for key, each in written.items()}


def _told(schema: Schema, key: str, found: Written) -> dict[str, Any]:
    hidden = is_hidden(schema.by_path[key], found)
    return {"value": None if hidden else found.value, "source": found.source}
