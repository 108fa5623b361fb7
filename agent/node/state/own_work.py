"""What of this host's load is ours: told to the sampler, so that our own work is never taken for pressure."""

from collections.abc import Callable, Sequence
from typing import Final

from agent.engines.contract import EndpointStatus, ResidencyState
from agent.sampling.loop import DEFAULT_UNITS, OwnWork
from router_core.record.state import LoadPolicy

_MOVING: Final = frozenset({ResidencyState.LOADING, ResidencyState.UNLOADING})


def own_work(
    engines: Sequence[EndpointStatus], in_flight: Callable[[str], int], *, ordering: bool = False
) -> OwnWork:
    """``engines`` are the local ones that take requests; ``in_flight`` counts our requests at one by name;
    ``ordering``: one of them was told to load or unload a model, and has not answered.

    Requests that others sent an engine directly are the engine's work, too. A request at an engine that has no
    model in memory makes it load one, if it ever does.
    """
    return OwnWork(
        in_flight=any(in_flight(engine.name) or _serves_others(engine) for engine in engines),
        units=tuple(
            engine.manifest.unit or DEFAULT_UNITS.get(engine.manifest.engine.value) for engine in engines
        ),
        loading=ordering or any(_loads(engine, in_flight(engine.name)) for engine in engines),
        residents=frozenset(
            (engine.name, model.native_id)
            for engine in engines
            for model in engine.resident
            if model.state is ResidencyState.RESIDENT
        ),
    )


def _serves_others(engine: EndpointStatus) -> bool:
    load = engine.load
    return load is not None and bool((load.running or 0) + (load.waiting or 0))


def _loads(engine: EndpointStatus, requests: int) -> bool:
    states = {model.state for model in engine.resident}
    begins = (
        requests > 0 and engine.load_policy is not LoadPolicy.FIXED and ResidencyState.RESIDENT not in states
    )
    return begins or bool(states & _MOVING)
