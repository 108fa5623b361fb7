"""The pure half of pairmesh: records, mesh, view, pressure, profiles, placement, exchange.

Nothing here awaits, reads a clock, rolls dice, opens a file or logs. Time comes in as ``now`` (integer
milliseconds of the boot clock unless a name says otherwise), randomness as an injected ``random.Random``,
cryptography as small Protocols. Every protocol is a machine with two members::

    handle(event, now) -> list[Action]
    deadline           -> int | None
"""
