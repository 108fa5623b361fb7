"""What a list may name: the models that a request could reach within the mesh, judged by the rows that choose."""

from collections.abc import Iterable, Iterator, Mapping

from agent.effects.clock import Clock
from agent.engines.contract import EndpointStatus, ObservedModel, OwnedModel
from agent.relay.ports import Held, Offered
from router_core.placement.candidates.candidate import Draft, Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.filters.model_match import offer_of
from router_core.record.state import Dialect, ModelState

_MIB = 1024 * 1024
_IN_MEMORY = frozenset({ModelState.RESIDENT, ModelState.LOADING})


class FleetListing:
    """Satisfies the relay's ``Listing`` for one fleet. Pressure and full queues pass, so they hide nothing.

    ``own`` are this node's endpoints by name: they tell what is not worth telling the mesh.
    """

    def __init__(self, fleet: Fleet, own: Mapping[str, EndpointStatus], clock: Clock) -> None:
        self._fleet = fleet
        self._own = own
        self._clock = clock
        self._models: dict[tuple[str, str], OwnedModel] | None = None

    @property
    def generation(self) -> int:
        return self._fleet.gen

    def offered(self) -> Iterable[Offered]:
        """Every name of every model on offer, aliases included, repetitions allowed."""
        for draft, row in self._on_offer():
            owned = self._owned(row)
            for name in row.names:
                yield _offered(name, draft, row, owned)

    def held(self) -> Iterable[Held]:
        """What is in memory, once per node, engine and model."""
        for draft, row in self._reachable():
            resident = draft.resident
            if resident is None or resident.state not in _IN_MEMORY:
                continue
            owned = self._owned(row)
            known = self._in_own_memory(row, owned)
            size = known.total_bytes if known is not None else None
            if size is None and resident.mem_mib is not None:
                size = resident.mem_mib * _MIB
            yield Held(
                offered=_offered(row.names[0], draft, row, owned),
                size_bytes=size,
                vram_share_pct=resident.vram_share_pct,
                ctx=resident.ctx,
                expires_ms=self._expires_ms(row, known),
            )

    def versions(self) -> Iterable[str]:
        """The versions of the Ollama servers."""
        return {
            draft.engine.version
            for draft, row in self._reachable()
            if row.engine == "ollama" and draft.engine.version
        }

    def aliases(self) -> Iterable[tuple[str, Dialect]]:
        """The operator's aliases that lead to a model on offer, with what it speaks."""
        fleet = self._fleet
        if not fleet.policy.aliases:
            return
        on_offer = {(row.key, row.model) for _, row in self._on_offer()}
        for alias, _ in fleet.policy.aliases:
            offer = offer_of(alias, fleet, fleet.policy)
            dialects = Dialect(0)
            for sense in offer.senses if offer is not None else ():
                for row in sense.rows:
                    dialects |= Dialect(row.dialects if (row.key, row.model) in on_offer else 0)
            if dialects:
                yield alias, dialects

    def _reachable(self) -> Iterator[tuple[Draft, Row]]:
        for part in self._fleet.parts.values():
            for draft, row in zip(part.drafts, part.rows, strict=True):
                if not (row.untrusted or row.cloud or row.draining or row.down is not None):
                    yield draft, row

    def _on_offer(self) -> Iterator[tuple[Draft, Row]]:
        return (each for each in self._reachable() if each[1].resident or each[1].loadable)

    def _owned(self, row: Row) -> OwnedModel | None:
        if not row.is_self:
            return None
        if self._models is None:
            self._models = {
                (status.name, model.name): model for status in self._own.values() for model in status.owned
            }
        return self._models.get((row.endpoint, row.model))

    def _in_own_memory(self, row: Row, owned: OwnedModel | None) -> ObservedModel | None:
        """What an own engine tells of the model in its memory."""
        if owned is None:
            return None
        return next(
            (model for model in self._own[row.endpoint].resident if model.native_id == owned.native_id), None
        )

    def _expires_ms(self, row: Row, known: ObservedModel | None) -> int | None:
        """When an own engine will let go of the model, wall clock."""
        if known is None or known.expires_s is None:
            return None
        status = self._own[row.endpoint]
        seen_ms = status.observed_ms if status.observed_ms is not None else self._clock.boot_ms()
        return self._clock.wall_ms() + 1_000 * known.expires_s - (self._clock.boot_ms() - seen_ms)


def _offered(name: str, draft: Draft, row: Row, owned: OwnedModel | None) -> Offered:
    facts = draft.model
    size = facts.size_mib * _MIB if facts.size_mib is not None else None
    return Offered(
        name=name,
        dialects=Dialect(row.dialects),
        digest=facts.digest,
        size_bytes=owned.size_bytes if owned is not None and owned.size_bytes is not None else size,
        family=facts.family,
        params_m=facts.params_m,
        quant=facts.quant,
        format=owned.format if owned is not None else None,
        modified_at=owned.modified_at if owned is not None else None,
    )
