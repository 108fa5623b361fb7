"""What went over the links, counted. One mutable tally, read as a frozen snapshot by metrics and status."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficCounts:
    """Totals since start. Bytes are those of link messages, without WebSocket, TLS and TCP framing.

    ``refused`` counts what was turned away before the machine saw it, by reason; ``dials`` counts outcomes.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    accepted: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    dials: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Traffic:
    """The tally itself; links and dials write it, nobody else."""

    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    dials: Counter[str] = field(default_factory=Counter)

    def received(self, size: int) -> None:
        self.bytes_in += size
        self.messages_in += 1

    def sent(self, size: int) -> None:
        self.bytes_out += size
        self.messages_out += 1

    def snapshot(self) -> TrafficCounts:
        return TrafficCounts(
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            messages_in=self.messages_in,
            messages_out=self.messages_out,
            accepted=self.accepted,
            refused=dict(self.refused),
            dials=dict(self.dials),
        )
