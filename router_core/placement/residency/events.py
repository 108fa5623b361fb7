"""What the residency machine hears and asks for, as plain data.

A model of this node is named by (endpoint, published model name). Sizes are bytes, times ms on the boot clock unless
the name says otherwise. Unknown is None.
"""

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct

from router_core.record.state import Level

Key = tuple[str, str]


class ModelStage(Enum):
    """Where one model of this node stands. ``LOADING`` and ``UNLOADING`` by anybody; ``DRAINING`` by us alone."""

    PRESENT = "present"
    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"
    UNLOADING = "unloading"
    FAILED = "failed"


class EngineResidency(Enum):
    """What the engine tells of a model: not in memory, on its way in, in memory (asleep included), on its way out, or
    its last load failed."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    LEAVING = "leaving"
    FAILED = "failed"


class Trigger(Enum):
    """Why a model is loaded: it is asked for and nobody has it, or those who have it keep requests waiting."""

    PRELOAD = "preload"
    REPLICA = "replica"


class ResidencyNotice(Enum):
    """Codes of ``NotifyResidency``. The first three end a load."""

    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    LOAD_OVERDUE = "load_overdue"
    UNLOADED = "unloaded"
    UNLOAD_FAILED = "unload_failed"
    DRAIN_OVERDUE = "drain_overdue"
    GIVEN_UP = "given_up"


class Model(Struct, frozen=True, gc=False, kw_only=True):
    """One model that an engine of this node can be ordered to load, and how the mesh stands with it.

    ``need_bytes`` is what it takes in memory, None if nobody knows; ``held_bytes`` what unloading gives back. ``busy``
    counts requests in it, ours and others', ``used_ms`` is when it was last seen with one, ``is_watched`` whether its
    engine was looked at lately. ``started`` counts requests of the mesh that began here. ``rate`` is requests/s of all
    routers, ``able`` the endpoints that could serve it, ``ahead`` those elsewhere that could load it sooner, ``wait_s``
    the least wait where it is warm (None: nowhere), ``is_loading`` whether anybody loads it. ``may_load``: pressure
    leaves cold loads open. ``load_known`` tells an observed load time from a guess.
    """

    key: Key
    held: EngineResidency = EngineResidency.ABSENT
    need_bytes: int | None = None
    held_bytes: int = 0
    load_s: float = 1.0
    load_known: bool = False
    busy: int = 0
    used_ms: int | None = None
    is_watched: bool = True
    keep: bool = False
    may_load: bool = True
    started: int = 0
    rate: float = 0.0
    able: int = 1
    ahead: int = 0
    wait_s: float | None = None
    is_loading: bool = False


class HostLook(Struct, frozen=True, kw_only=True):
    """Everything one look tells. ``level`` is the highest of this host, None if unknown; ``free_bytes`` is the memory
    that a load would go to, of which ``reserve_bytes`` stay free; ``places`` are the most models that an endpoint's
    engine holds, where it tells; ``is_idle``: no request is at any engine here."""

    models: tuple[Model, ...]
    free_bytes: int | None
    reserve_bytes: int = 0
    places: Mapping[str, int] = {}
    level: int | None = Level.NONE
    is_idle: bool = True


# --- events ----------------------------------------------------------------------------------------------------


class Allowed(Struct, frozen=True, kw_only=True):
    """The operator lets this node reallocate, or no longer: then drains end and nothing new begins."""

    on: bool


class Looked(Struct, frozen=True, kw_only=True):
    """The newest picture; due at every ``deadline``, welcome whenever an engine or a level changes."""

    picture: HostLook


class Ordered(Struct, frozen=True, kw_only=True):
    """The engine answered a ``Load`` or ``Unload``; ``ok`` False if it refused or did not answer."""

    key: Key
    ok: bool


Event = Allowed | Looked | Ordered

# --- actions ---------------------------------------------------------------------------------------------------


class Drain(Struct, frozen=True, kw_only=True):
    """Take nothing new for this model and say so: it is among ``leaving`` from now on."""

    key: Key


class Unload(Struct, frozen=True, kw_only=True):
    """Have the engine unload it unless somebody uses it; answered by one ``Ordered``."""

    key: Key


class Load(Struct, frozen=True, kw_only=True):
    """Have the engine load it; answered by one ``Ordered`` within ``within_ms``."""

    key: Key
    within_ms: int


class NotifyResidency(Struct, frozen=True, kw_only=True):
    """Something ended. ``trigger`` and ``seconds`` are those of the load."""

    code: ResidencyNotice
    key: Key
    trigger: Trigger | None = None
    seconds: float | None = None


Action = Drain | Unload | Load | NotifyResidency
