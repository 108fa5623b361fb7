"""Where in a fleet's rows a name, a digest, a lineage or an endpoint is found, by position.

Positions outlive the numbers in the rows: as long as no node offers anything else, one index serves every snapshot.
It knows nothing of what a row is worth.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec import Struct

from router_core.ids import NodeId, NodeName
from router_core.placement.candidates.candidate import Row
from router_core.placement.request.request import Endpoint

Positions = tuple[int, ...]
_Key = TypeVar("_Key", str, bytes)


class Index(Struct, frozen=True, kw_only=True):
    """``by_name`` holds names of all engines but Ollama, ``by_tag`` Ollama's with their tag, ``by_key`` each row by
    endpoint and served model."""

    by_name: Mapping[str, Positions]
    by_tag: Mapping[str, Positions]
    by_digest: Mapping[bytes, Positions]
    by_base: Mapping[bytes, Positions]
    by_family: Mapping[str, Positions]
    by_key: Mapping[tuple[Endpoint, str], int]
    node_names: Mapping[NodeName, frozenset[NodeId]]
    endpoints: frozenset[tuple[NodeId, str]]


def index_of(rows: tuple[Row, ...], nodes: Iterable[tuple[NodeName, NodeId]]) -> Index:
    """The index of ``rows``; ``nodes`` are all nodes known, those without rows included."""
    by_name: dict[str, list[int]] = {}
    by_tag: dict[str, list[int]] = {}
    by_digest: dict[bytes, list[int]] = {}
    by_base: dict[bytes, list[int]] = {}
    by_family: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        named = by_tag if row.engine == "ollama" else by_name
        for name in row.names:
            named.setdefault(name, []).append(position)
        if row.digest is not None:
            by_digest.setdefault(row.digest, []).append(position)
        if row.base is not None:
            by_base.setdefault(row.base, []).append(position)
        if row.family is not None:
            by_family.setdefault(row.family, []).append(position)
    names: dict[NodeName, set[NodeId]] = {}
    for name, node_id in nodes:
        names.setdefault(name, set()).add(node_id)
    return Index(
        by_name=_frozen(by_name),
        by_tag=_frozen(by_tag),
        by_digest=_frozen(by_digest),
        by_base=_frozen(by_base),
        by_family=_frozen(by_family),
        by_key={(row.key, row.model): position for position, row in enumerate(rows)},
        node_names={name: frozenset(ids) for name, ids in names.items()},
        endpoints=frozenset([(row.node_id, row.endpoint) for row in rows]),
    )


def _frozen(found: dict[_Key, list[int]]) -> dict[_Key, Positions]:
    return {key: tuple(positions) for key, positions in found.items()}
