"""The one schema of ``pairmesh.toml``: every key, what it takes, its default and its meaning.

Loader, printer, check and the reference table read this table; a key that is not here does not exist.
"""

from functools import partial

from agent.settings import removed, tuning, values
from agent.settings.reading import Key, Schema


def _seconds(path: str, default: int, least: float, meaning: str) -> Key:
    return Key(
        path=path,
        takes=f"seconds, {least:g} to 3600",
        parse=partial(values.milliseconds, least_s=least, most_s=3600),
        default=default,
        meaning=meaning,
    )


def _listen(path: str, default: str, meaning: str) -> Key:
    return Key(path=path, takes=values.LISTEN, parse=values.listen, default=default, meaning=meaning)


def _loopback(path: str, default: str, meaning: str) -> Key:
    return Key(
        path=path,
        takes=values.LOOPBACK_LISTEN,
        parse=values.loopback_listen,
        default=default,
        meaning=meaning,
    )


def _switch(path: str, default: bool, meaning: str) -> Key:
    return Key(path=path, takes="true or false", parse=values.switch, default=default, meaning=meaning)


KEYS: tuple[Key, ...] = (
    Key(
        path="name",
        takes="1 to 32 of a-z 0-9 -, starting with a letter or digit",
        parse=values.node_name,
        default=None,
        meaning="name of this node, for people; the host name if not set",
    ),
    _switch("router", True, "whether this node places requests; false: it only serves those of others"),
    _loopback("api.listen", "127.0.0.1:11433", "inference API"),
    Key(
        path="api.hosts",
        takes="list of NAME or NAME:PORT",
        parse=values.host_names,
        default=[],
        meaning="further values of the Host header to accept",
    ),
    Key(
        path="api.origins",
        takes="list of SCHEME://HOST[:PORT]",
        parse=values.origins,
        default=[],
        meaning="web origins that may call the API from a browser",
    ),
    _listen("mesh.listen", ":7433", "links between nodes"),
    Key(
        path="mesh.peers",
        takes='list of "NODE-ID=IP[:PORT]", "@NAME=IP[:PORT]" or "@NAME~XXXX=IP[:PORT]"',
        parse=values.peers,
        default=[],
        meaning="where to dial members that discovery does not find; a hint, never trust",
    ),
    Key(
        path="mesh.allow_networks",
        takes="list of networks as IP/BITS",
        parse=values.networks,
        default=["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"],
        meaning="networks a member's addresses must lie in to be dialled, those of mesh.peers and of links aside",
    ),
    Key(
        path="mesh.roster_max",
        takes="1 to 1024",
        parse=partial(values.whole, least=1, most=1024),
        default=64,
        meaning="most members",
    ),
    _seconds("mesh.backoff_max_s", 30, 1, "longest wait between dials of one peer; for tests"),
    _seconds("mesh.gone_min_s", 60, 10, "least silence before a peer counts as gone; for tests"),
    _seconds("mesh.gone_redial_s", 30, 1, "time between dials of a peer that is gone; for tests"),
    _listen("ingress.listen", ":7434", "requests that peers place here"),
    _loopback("admin.listen", "127.0.0.1:7435", "metrics and read-only views"),
    _switch("engines.autodetect", True, "look for engines on the well-known ports of loopback"),
    Key(
        path="sampling.profile",
        takes='"auto", "desktop" or "server"',
        parse=partial(values.choice, names=("auto", "desktop", "server")),
        default="auto",
        meaning="table of pressure thresholds; auto: desktop with a laptop case, a battery or a display",
    ),
    Key(
        path="sampling.nvml",
        takes='"auto" or "off"',
        parse=partial(values.choice, names=("auto", "off")),
        default="auto",
        meaning="read NVIDIA GPUs; auto: where there is a driver",
    ),
    Key(
        path="sampling.pressure",
        takes='tables SIGNAL.LEVEL of enter, hold_in_s, exit, hold_out_s; or SIGNAL = "off"',
        parse=tuning.pressure,
        default={},
        meaning="own thresholds, laid over the profile's table",
    ),
)

SCHEMA = Schema(KEYS, removed.SETTINGS)
