"""Where in a fleet's rows a name, a digest or an endpoint is found, by position.

Positions outlive the numbers in the rows: as long as no node offers anything else, one index serves every snapshot.
Refuses to know what a row is worth.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from router_core.ids import NodeId, NodeName
from router_core.placement.request import Endpoint
from router_core.placement.rows import Row

Positions = tuple[int, ...]


class Index(Struct, frozen=True, kw_only=True):
    """``by_name`` holds names of all engines but Ollama, ``by_tag`` Ollama's with their tag, ``by_key`` each row by
    endpoint and served model."""

    by_name: Mapping[str, Positions]
    by_tag: Mapping[str, Positions]
    by_digest: Mapping[bytes, Positions]
    by_key: Mapping[tuple[Endpoint, str], int]
    node_names: Mapping[NodeName, frozenset[NodeId]]
    endpoints: frozenset[tuple[NodeId, str]]


def index_of(rows: tuple[Row, ...], nodes: Iterable[tuple[NodeName, NodeId]]) -> Index:
    """The index of ``rows``; ``nodes`` are all nodes known, those without rows included."""
    by_name: dict[str, list[int]] = {}
    by_tag: dict[str, list[int]] = {}
    by_digest: dict[bytes, list[int]] = {}
    for position, row in enumerate(rows):
        named = by_tag if row.engine == "ollama" else by_name
        for name in row.names:
            named.setdefault(name, []).append(position)
        if row.digest is not None:
            by_digest.setdefault(row.digest, []).append(position)
    names: dict[NodeName, set[NodeId]] = {}
    for name, node_id in nodes:
        names.setdefault(name, set()).add(node_id)
    return Index(
        by_name={name: tuple(found) for name, found in by_name.items()},
        by_tag={name: tuple(found) for name, found in by_tag.items()},
        by_digest={digest: tuple(found) for digest, found in by_digest.items()},
        by_key={(row.key, row.model): position for position, row in enumerate(rows)},
        node_names={name: frozenset(ids) for name, ids in names.items()},
        endpoints=frozenset([(row.node_id, row.endpoint) for row in rows]),
    )
