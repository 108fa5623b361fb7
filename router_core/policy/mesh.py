"""Tuning of the mesh. All times are integer milliseconds.

Three values may be set, in seconds, by the keys of the same names under ``[mesh]``: they exist so that tests of
whole daemons need not wait for minutes. All else is constant; an impossible value is ``LocalMisuse``.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from router_core.errors import LocalMisuse

_RANGES: Final = {
    "backoff_max_s": (1, 3_600),
    "gone_min_s": (10, 3_600),
    "gone_redial_s": (1, 3_600),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPolicy:
    """Constants and three settable values of the mesh machine."""

    backoff_max_s: int = 30
    gone_min_s: int = 60
    gone_redial_s: int = 30

    # Publishing.
    publish_min_ms: ClassVar[int] = 1_000
    publish_max_ms: ClassVar[int] = 10_000
    members_per_publish_second: ClassVar[int] = 150
    publish_jitter_pct: ClassVar[int] = 10
    publish_retune_ms: ClassVar[int] = 10_000
    publish_retune_pct: ClassVar[int] = 25
    second_volatile_ms: ClassVar[int] = 1_000
    listen_first_ms: ClassVar[int] = 2_000
    urgent_per_s_m: ClassVar[int] = 2_000
    urgent_burst: ClassVar[int] = 5
    static_gap_ms: ClassVar[int] = 1_000
    static_per_s_m: ClassVar[int] = 100
    static_burst: ClassVar[int] = 5
    lost_kept_ms: ClassVar[int] = 30_000
    persist_retry_ms: ClassVar[int] = 60_000
    floors_every_ms: ClassVar[int] = 60_000

    # Identity conflicts: once the other copy has stopped, retry and calm together bring the node back within a minute.
    ratchets_most: ClassVar[int] = 3
    ratchet_window_ms: ClassVar[int] = 60_000
    conflict_retry_ms: ClassVar[int] = 20_000
    conflict_ms: ClassVar[int] = 30_000
    show_own_every_ms: ClassVar[int] = 10_000
    epoch_rises_most: ClassVar[int] = 3
    epoch_rise_window_ms: ClassVar[int] = 10_000

    # Links.
    tick_ms: ClassVar[int] = 100
    calm_tick_ms: ClassVar[int] = 500
    flush_ms: ClassVar[int] = 250
    flush_jitter_pct: ClassVar[int] = 20
    urgent_flush_ms: ClassVar[int] = 5
    flush_messages: ClassVar[int] = 4
    flush_bytes: ClassVar[int] = 64 * 1024
    opening_ms: ClassVar[int] = 5_000
    greeting_ms: ClassVar[int] = 5_000
    syncing_ms: ClassVar[int] = 10_000
    ping_ms: ClassVar[int] = 1_000
    measure_ms: ClassVar[int] = 10_000
    dead_ms: ClassVar[int] = 3_500
    slow_ms: ClassVar[int] = 10_000
    links_most: ClassVar[int] = 40
    want_every_ms: ClassVar[int] = 1_000
    want_answer_ms: ClassVar[int] = 500
    penalty_ms: ClassVar[int] = 60_000
    retry_after_most_ms: ClassVar[int] = 3_600_000
    messages_per_s_m: ClassVar[int] = 50_000
    messages_burst: ClassVar[int] = 500
    useless_per_s_m: ClassVar[int] = 20_000
    useless_burst: ClassVar[int] = 300
    disputes_per_s_m: ClassVar[int] = 4_000
    disputes_burst: ClassVar[int] = 8
    flood_penalty_most_ms: ClassVar[int] = 3_600_000

    # Dialling.
    dials_most: ClassVar[int] = 4
    backoff_min_ms: ClassVar[int] = 500
    larger_dials_after_ms: ClassVar[int] = 5_000
    link_proven_ms: ClassVar[int] = 5_000
    addresses_kept: ClassVar[int] = 8

    # Receiving.
    accept_per_s_m: ClassVar[int] = 5_000
    accept_burst: ClassVar[int] = 20
    quarantine_min_ms: ClassVar[int] = 60_000
    quarantine_max_ms: ClassVar[int] = 600_000

    # Time and liveness.
    base_bucket_ms: ClassVar[int] = 300_000
    gap_ms: ClassVar[int] = 500
    gap_grace_ms: ClassVar[int] = 2_000
    fresh_slack_ms: ClassVar[int] = 500
    suspect_slack_ms: ClassVar[int] = 1_000
    broken_grace_ms: ClassVar[int] = 3_000
    lost_reporters: ClassVar[int] = 2
    lost_hold_ms: ClassVar[int] = 1_000
    gone_kept_ms: ClassVar[int] = 900_000
    lonely_after_ms: ClassVar[int] = 3_500
    lonely_until_ms: ClassVar[int] = 2_000
    view_coalesce_ms: ClassVar[int] = 50

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise LocalMisuse(f"{name} is {value!r}, allowed {least}..{most}")

    @property
    def backoff_max_ms(self) -> int:
        return self.backoff_max_s * 1_000

    @property
    def gone_min_ms(self) -> int:
        return self.gone_min_s * 1_000

    @property
    def gone_redial_ms(self) -> int:
        return self.gone_redial_s * 1_000
