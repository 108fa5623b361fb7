"""When a first byte, or the next one, is so late that others had better go elsewhere. It ends nothing."""

FLOOR_MS = 10_000
_GAPS = 5.0


def overdue_ms(
    *, ttft_ms: float, load_ms: float, ect_ms: float, stream: bool, floor_ms: int = FLOOR_MS
) -> int:
    """Milliseconds without a first body byte after which an attempt counts as overdue: three times the predicted time to
    first token, its load part doubled only; of an answer that comes whole, three times the predicted completion time.
    Never below ``floor_ms``."""
    expected = 3.0 * (ttft_ms - load_ms) + 2.0 * load_ms if stream else 3.0 * ect_ms
    return max(floor_ms, round(expected))


def silence_limit_ms(gap_ms: float, floor_ms: int = FLOOR_MS) -> float:
    """Milliseconds of silence in mid-answer after which new requests had better go elsewhere; ``gap_ms`` is the
    expected time between two tokens."""
    return max(float(floor_ms), _GAPS * gap_ms)
