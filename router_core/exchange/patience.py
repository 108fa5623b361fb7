"""How long to wait for the first body byte of an attempt, and for the next one."""

FLOOR_MS = 10_000
_GAPS = 5.0


def first_byte_limit_ms(
    *,
    ttft_ms: float,
    load_ms: float,
    ect_ms: float,
    stream: bool,
    configured_ms: int = 0,
    floor_ms: int = FLOOR_MS,
) -> int:
    """Milliseconds of silence an attempt may take before its first body byte.

    ``configured_ms`` (a manifest's ``first_byte_ms``) wins unless 0. Else a streaming answer gets three times
    the predicted time to first token, its load part doubled only; one that comes whole gets three times the
    predicted completion time. Never below ``floor_ms``. The request's deadline caps it elsewhere.
    """
    if configured_ms > 0:
        return configured_ms
    expected = 3.0 * (ttft_ms - load_ms) + 2.0 * load_ms if stream else 3.0 * ect_ms
    return max(floor_ms, round(expected))


def silence_limit_ms(gap_ms: float, floor_ms: int = FLOOR_MS) -> float:
    """Milliseconds of silence in mid-answer after which new requests had better go elsewhere; ``gap_ms`` is the
    expected time between two tokens."""
    return max(float(floor_ms), _GAPS * gap_ms)
