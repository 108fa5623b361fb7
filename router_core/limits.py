"""Every ceiling on something a stranger can fill, in one table, with the relations between them asserted.

Sizes are bytes, times milliseconds, unless the name says otherwise.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# Link messages and records.
LINK_MESSAGE: Final = 65_535
LINK_MESSAGE_SENT: Final = 61_440
LINK_MESSAGE_SOFT: Final = 16 * KIB
WEBSOCKET_MAX: Final = 65_536
V_SIGNED: Final = 2_048
S_SIGNED: Final = 32_768
L_SIGNED: Final = 256
E_SIGNED: Final = 2_048
X_SIGNED: Final = 512
RECORD_HEADER: Final = 36_864
RECORD_HEADER_BIN: Final = 32_768
RECORDS_PER_MESSAGE: Final = 64
HAVE_PER_CHUNK: Final = 256
WANTS_PER_MESSAGE: Final = 64
LINK_BYTES_PER_S: Final = 2 * MIB
LINK_BYTES_BURST: Final = 4 * MIB
VERIFICATIONS_PER_STEP: Final = 16

# Bodies of records.
GPUS: Final = 16
ENGINES: Final = 16
MODELS: Final = 64
RESIDENTS: Final = 48
RESOURCES: Final = 16
SEEN: Final = 16
LOST: Final = 8
UNLINKED: Final = 8
DEMAND: Final = 8
ADDRESSES: Final = 8
PROFILES: Final = 64
ALIASES: Final = 8
LABELS: Final = 16
MODEL_NAME: Final = 128

# Members.
ROSTER_DEFAULT: Final = 64
ROSTER_MAX: Final = 1_024
CERTIFICATE: Final = 1_024

# TLS and connections.
TLS_HANDSHAKE: Final = 5_000
UNAUTHENTICATED_PER_IP: Final = 8
UNAUTHENTICATED: Final = 32
HANDSHAKES_TO_PEER: Final = 6
LINKS_PER_ID: Final = 4
INGRESS_PER_ID: Final = 64
INGRESS_CONNECTIONS: Final = 512
API_CONNECTIONS: Final = 1_024
ACCEPT_PAUSE: Final = 1_000

# Requests.
REQUEST_TARGET: Final = 8 * KIB
REQUEST_HEAD: Final = 32 * KIB
REQUEST_HEADERS: Final = 100
REQUEST_HEAD_TIME: Final = 10_000
REQUEST_BODY: Final = 32 * MIB
BODIES_BUFFERED: Final = 128 * MIB
BODY_PACE_PER_S: Final = 8 * KIB
BODY_PACE_GRACE: Final = 5_000
REQUESTS_IN_FLIGHT: Final = 1_024
RESPONSE_HEAD: Final = 64 * KIB
RESPONSE_HEADERS: Final = 200
INTERIM_RESPONSES: Final = 8
HINT_HEADERS: Final = 4 * KIB
PREFER_REFS: Final = 8
REQUIRE_TERMS: Final = 16
ROUTE_STATE_HEADER: Final = 3 * KIB
WRITE_HIGH: Final = 256 * KIB
WRITE_LOW: Final = 64 * KIB
WRITE_STALL: Final = 30_000
KEEP_ALIVE_IDLE: Final = 90_000

# Engines.
ENGINE_BODY: Final = 4 * MIB
ENGINE_HEALTH_BODY: Final = 64 * KIB

# Administration.
ADMIN_BODY: Final = 256 * KIB
ADMIN_DECISIONS: Final = 1_000
ADMIN_CONNECTIONS: Final = 64

# Journal and telemetry.
JOURNAL_QUEUE: Final = 4_096
JOURNAL_RING: Final = 1_000
JOURNAL_FILE: Final = 100 * MIB
LABEL_VALUES: Final = 64
LOG_TEXT: Final = 128
EQUAL_LOG_LINES_PER_MIN: Final = 10

assert L_SIGNED < X_SIGNED < V_SIGNED < S_SIGNED < LINK_MESSAGE_SENT < LINK_MESSAGE < WEBSOCKET_MAX
assert S_SIGNED <= RECORD_HEADER_BIN < RECORD_HEADER < LINK_MESSAGE_SENT
assert UNAUTHENTICATED_PER_IP < UNAUTHENTICATED
assert HANDSHAKES_TO_PEER < UNAUTHENTICATED_PER_IP, (
    "a burst of requests must not look like a flood of strangers"
)
assert INGRESS_PER_ID < INGRESS_CONNECTIONS
assert WRITE_LOW < WRITE_HIGH
assert REQUEST_TARGET < REQUEST_HEAD
assert ROSTER_DEFAULT <= ROSTER_MAX
