"""Endpoint manifests, ``endpoints/NAME.toml``: what the operator says about one upstream.

A manifest is parsed whole: every fault is reported at once, unknown keys are refused, and a file with any
fault yields no manifest. A fact that is not written is ``None``. The URL and the credential's file name stay
on this host. Nothing here opens a connection or resolves a name.
"""

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from agent.settings.reading import open_to_all, regular, toml_of
from agent.settings.toml_table import Table
from router_core import limits
from router_core.record.spelling import CAPABILITIES, DIALECTS
from router_core.record.state import U32_MAX, Capability, Dialect

NAME_PATTERN = r"[a-z0-9][a-z0-9-]{0,31}"
MODEL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"
LABEL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,31}"
PATH_PATTERN = r"(?=.{1,128}\Z)(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*){1,8}"
HEADER_PATTERN = r"[A-Za-z0-9-]{1,64}\*?"
CONNECT_MS = 2_000
IDLE_MS = 300_000
MANIFEST_BYTES = 256 * limits.KIB


class EngineKind(StrEnum):
    """Engines by the name under which they are published."""

    OLLAMA = "ollama"
    LLAMACPP = "llamacpp"
    VLLM = "vllm"
    LMSTUDIO = "lmstudio"
    SGLANG = "sglang"
    OPENAI = "openai"


LATER: Final = {
    EngineKind.VLLM: "vLLM",
    EngineKind.LMSTUDIO: "LM Studio",
    EngineKind.SGLANG: "SGLang",
}
"""Engines that have no adapter of their own yet: their OpenAI API is all that is used of them."""
_AT_ROOT: Final = frozenset({EngineKind.OLLAMA, EngineKind.LLAMACPP})
"""Engines of whom more is used than an API that may lie below a path."""


class Caps(Struct, frozen=True, gc=False, kw_only=True):
    """Capabilities as far as they are known; ``has`` counts only where ``known``."""

    known: Capability = Capability(0)
    has: Capability = Capability(0)

    def overruled_by(self, other: "Caps") -> "Caps":
        """These capabilities where ``other`` knows nothing, else ``other``'s."""
        return Caps(known=self.known | other.known, has=(self.has & ~other.known) | (other.has & other.known))


DEFAULT_PORTS: Final = {"http": 80, "https": 443}
API_PATH: Final = "/v1"


class EngineUrl(Struct, frozen=True, gc=False, kw_only=True):
    """Scheme, host and port of an engine, and the ``path`` that its API has instead of ``/v1``, as the base URL of OpenAI
    clients tells it. ``host`` is an IP literal, except for ``cloud`` endpoints."""

    scheme: str
    host: str
    port: int
    path: str = API_PATH

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def authority(self) -> str:
        """Host and port, as the ``Host`` header tells them: without the port that the scheme implies."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def path_of(self, path: str) -> str:
        """The engine's own path for ``path``, which is one of an engine whose API lies at ``/v1``."""
        return self.path + path[len(API_PATH) :] if path.startswith(f"{API_PATH}/") else path


class DeclaredModel(Struct, frozen=True, gc=False, kw_only=True):
    """Facts about one model that beat the engine's report. ``upstream_name`` is the engine's spelling.
    ``params_b`` and ``active_b`` are in 10^9, sizes in bytes, ``ctx_max`` in tokens."""

    name: str
    upstream_name: str | None = None
    aliases: tuple[str, ...] = ()
    digest: bytes | None = None
    base: str | None = None
    family: str | None = None
    params_b: float | None = None
    active_b: float | None = None
    quant: str | None = None
    ctx_max: int | None = None
    size_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    caps: Caps = Caps()
    keep: bool = False


class Manifest(Struct, frozen=True, kw_only=True):
    """One endpoint. Prices are per 10^6 tokens; ``first_byte_ms`` 0 means no limit but the request's deadline; ``jit_load`` None means
    by kind of engine; ``reserve_vram_mib`` None means the default share."""

    name: str
    url: EngineUrl
    engine: EngineKind
    credential: str | None = None
    dialects: Dialect | None = None
    remote_host: bool = False
    cloud: bool = False
    price_in: float = 0.0
    price_out: float = 0.0
    pass_headers: tuple[str, ...] = ()
    unit: str | None = None
    models: tuple[DeclaredModel, ...] = ()
    slots: int | None = None
    max_queue: int | None = None
    jit_load: bool | None = None
    allow_offload: bool = False
    reserve_vram_mib: int | None = None
    connect_ms: int = CONNECT_MS
    first_byte_ms: int = 0
    idle_ms: int = IDLE_MS
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFault:
    """One thing wrong with one file. ``key`` is the dotted place inside it, empty for the file itself."""

    file: str
    key: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: {self.problem}" if self.key else f"{self.file}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestsRead:
    """The good manifests of a folder and everything wrong with the others. ``listed`` is False if nobody can tell which
    there are."""

    manifests: tuple[Manifest, ...]
    faults: tuple[ManifestFault, ...]
    listed: bool = True


def read_manifests(folder: Path) -> ManifestsRead:
    """Parse every ``*.toml`` of ``folder`` (a missing folder holds none), in the order of file names."""
    manifests: dict[str, Manifest] = {}
    faults: list[ManifestFault] = []
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".toml")
    except FileNotFoundError:
        paths = []
    except OSError as error:
        fault = ManifestFault(file="", key="", problem=f"unreadable folder: {error.strerror}")
        return ManifestsRead(manifests=(), faults=(fault,), listed=False)
    for path in paths:
        shown = os.fsencode(path.name).decode("utf-8", "replace")
        try:
            if problems := open_to_all(folder, path):
                faults += [ManifestFault(file=shown, key="", problem=problem) for problem in problems]
                continue
            raw = regular(path, MANIFEST_BYTES + 1)
        except OSError as error:
            faults.append(ManifestFault(file=shown, key="", problem=f"unreadable: {error.strerror}"))
            continue
        manifest, found = parse_manifest(raw, shown)
        faults.extend(found)
        if manifest is None:
            continue
        if manifest.name in manifests:
            problem = f"{manifest.name!r} is taken by another manifest of this folder"
            faults.append(ManifestFault(file=shown, key="name", problem=problem))
            continue
        manifests[manifest.name] = manifest
    return ManifestsRead(manifests=tuple(manifests.values()), faults=tuple(faults))


def too_many(manifest: Manifest) -> str:
    """In words, why ``manifest`` is not followed: a node tells of so many endpoints and no more."""
    return f"endpoints: {manifest.name}: more than {limits.ENGINES} endpoints"


def parse_manifest(raw: bytes, file: str) -> tuple[Manifest | None, tuple[ManifestFault, ...]]:
    """The manifest in ``raw``, or None and every fault in it. ``file`` (``NAME.toml``) gives the default name."""
    if len(raw) > MANIFEST_BYTES:
        problem = f"larger than {MANIFEST_BYTES} bytes"
        return None, (ManifestFault(file=file, key="", problem=problem),)
    try:
        tree = toml_of(raw)
    except ValueError as error:
        return None, (ManifestFault(file=file, key="", problem=f"not TOML: {error}"),)
    top = Table(tree)
    manifest = _manifest(top, file.removesuffix(".toml"))
    if top.faults:
        return None, tuple(ManifestFault(file=file, key=key, problem=problem) for key, problem in top.faults)
    return manifest, ()


def _manifest(top: Table, stem: str) -> Manifest:
    cloud = top.flag("cloud") or False
    remote = top.flag("remote_host") or cloud
    engine = _engine(top)
    if not top.has("engine"):
        top.fault("engine", "is missing")
    connect_ms = top.whole("connect_ms", least=1, most=60_000)
    idle_ms = top.whole("idle_ms", least=1_000, most=86_400_000)
    manifest = Manifest(
        name=_name(top, stem),
        url=_url(top, remote=remote, cloud=cloud, based=engine not in _AT_ROOT),
        engine=EngineKind(engine or EngineKind.OPENAI),
        credential=top.file_name("credential"),
        dialects=_dialects(top),
        remote_host=remote,
        cloud=cloud,
        price_in=top.number("price_in") or 0.0,
        price_out=top.number("price_out") or 0.0,
        pass_headers=_headers(top),
        unit=top.text("unit", r"[^\s\0]{1,256}"),
        models=_models(top),
        slots=top.whole("slots", least=1, most=65_535),
        max_queue=top.whole("max_queue", least=0, most=65_535),
        jit_load=top.flag("jit_load"),
        allow_offload=top.flag("allow_offload") or False,
        reserve_vram_mib=top.whole("reserve_vram_mib", least=0, most=2**31),
        connect_ms=CONNECT_MS if connect_ms is None else connect_ms,
        first_byte_ms=top.whole("first_byte_ms", least=0, most=86_400_000) or 0,
        idle_ms=IDLE_MS if idle_ms is None else idle_ms,
        labels=_labels(top),
    )
    top.refuse_unknown()
    return manifest


def _engine(top: Table) -> str | None:
    engine = top.choice("engine", tuple(kind for kind in EngineKind if kind not in LATER), others=LATER)
    if engine in LATER:
        top.fault("engine", f'use engine = "openai" for {LATER[EngineKind(engine)]}')
    return engine


def _name(top: Table, stem: str) -> str:
    if top.has("name"):
        return top.text("name", NAME_PATTERN) or ""
    if not re.fullmatch(NAME_PATTERN, stem):
        top.fault("name", f"is missing and the file name {stem!r} does not match {NAME_PATTERN}")
    return stem


def _url(top: Table, *, remote: bool, cloud: bool, based: bool) -> EngineUrl:
    """``based``: a path may stand for ``/v1``."""
    nowhere = EngineUrl(scheme="http", host="", port=0)
    text = top.text("url")
    if text is None:
        if not top.has("url"):
            top.fault("url", "is missing")
        return nowhere
    if not text.isprintable():
        top.fault("url", "holds a tab, an end of a line or the like")
        return nowhere
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        top.fault("url", "not a URL")
        return nowhere
    allowed = ("http", "https") if cloud else ("http",)
    if not text.lower().startswith(tuple(f"{scheme}://" for scheme in allowed)):
        top.fault("url", f"must begin with {' or '.join(f'{scheme}://' for scheme in allowed)}")
        return nowhere
    if parts.username is not None or parts.password is not None:
        top.fault("url", "must not hold a user or a password: use credential")
    path = parts.path.rstrip("/")
    if (path and not based) or parts.query or parts.fragment:
        top.fault("url", "must end after the path" if based else "must end after the port")
    elif path and not re.fullmatch(PATH_PATTERN, path):
        top.fault(
            "url", "its path must be at most 8 names of A-Z a-z 0-9 . _ ~ -, no dot first, 128 characters"
        )
    if port == 0:
        top.fault("url", "port 0 is not allowed")
    if (problem := _host_problem(host, remote=remote, cloud=cloud)) is not None:
        top.fault("url", problem)
    return EngineUrl(
        scheme=parts.scheme,
        host=host,
        port=port or DEFAULT_PORTS.get(parts.scheme, 0),
        path=path or API_PATH,
    )


def _host_problem(host: str, *, remote: bool, cloud: bool) -> str | None:
    """What forbids ``host``: literals only, loopback unless the manifest says otherwise."""
    try:
        address = ip_address(host)
    except ValueError:
        if cloud and re.fullmatch(
            r"(?=.{1,253}\Z)[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*\.[a-z][a-z0-9-]*", host
        ):
            return None
        if host == "localhost":
            return "must name an address: write 127.0.0.1 or [::1] for localhost"
        return f"host {host[:64]!r} is not an IP literal" + ("" if cloud else ": a name takes cloud = true")
    if address.is_unspecified or address.is_multicast or (address.version == 6 and address.ipv4_mapped):
        return f"host {host!r} cannot be an engine's address"
    if not address.is_loopback and not remote:
        return f"host {host!r} is not a loopback address: add remote_host = true"
    return None


def _headers(top: Table) -> tuple[str, ...]:
    """Names; of one that is none no more than what may be one is told, as a value may be a key."""
    found = top.texts("pass_headers", 16)
    for index, name in enumerate(found):
        if not re.fullmatch(HEADER_PATTERN, name):
            told = name.partition(":")[0][:64]
            top.fault(f"pass_headers[{index}]", f"{told!r} does not match {HEADER_PATTERN}")
    return tuple(name.lower() for name in found)


def _dialects(table: Table) -> Dialect | None:
    if not table.has("dialects"):
        return None
    found = Dialect(0)
    for index, name in enumerate(table.texts("dialects", len(DIALECTS))):
        if name in DIALECTS:
            found |= DIALECTS[name]
        else:
            table.fault(f"dialects[{index}]", f"{name[:64]!r} is none of {' '.join(DIALECTS)}")
    return found


def _caps(table: Table) -> Caps:
    inner, keys = table.entries("caps", len(CAPABILITIES))
    known = has = Capability(0)
    for key in keys:
        value = inner.flag(key)
        if key not in CAPABILITIES:
            inner.fault(key, f"is none of {' '.join(CAPABILITIES)}")
        elif value is not None:
            known |= CAPABILITIES[key]
            has |= CAPABILITIES[key] if value else Capability(0)
    return Caps(known=known, has=has)


def _labels(top: Table) -> tuple[tuple[str, str], ...]:
    inner, keys = top.entries("labels", limits.LABELS)
    for key in keys:
        if not re.fullmatch(LABEL_PATTERN, key):
            inner.fault(key, f"label {key[:64]!r} does not match {LABEL_PATTERN}")
    return tuple((key, inner.text(key, LABEL_PATTERN) or "") for key in sorted(keys))


def _models(top: Table) -> tuple[DeclaredModel, ...]:
    models: list[DeclaredModel] = []
    taken: set[str] = set()
    for table in top.tables("models", limits.MODELS):
        name = table.text("name", MODEL_PATTERN)
        if not table.has("name"):
            table.fault("name", "is missing")
        aliases = table.texts("aliases", limits.ALIASES, MODEL_PATTERN)
        for key, label in (("name", name), *(("aliases", alias) for alias in aliases)):
            if label is not None and (".." in label or "//" in label):
                table.fault(key, f"{label!r} holds '..' or '//'")
            if label is not None and label in taken:
                table.fault(key, f"{label!r} is used twice in this manifest")
            taken.add(label or "")
        models.append(_model(table, name or "", aliases))
    return tuple(models)


def _model(table: Table, name: str, aliases: tuple[str, ...]) -> DeclaredModel:
    model = DeclaredModel(
        name=name,
        upstream_name=table.text("upstream_name", r"[^\0-\x1f]{1,1024}"),
        aliases=aliases,
        digest=_digest(table),
        base=table.text("base", r"[^\0-\x1f]{1,128}"),
        family=table.text("family", r"[^\0-\x1f]{1,48}"),
        params_b=table.number("params_b"),
        active_b=table.number("active_b"),
        quant=table.text("quant", r"[A-Za-z0-9_.-]{1,24}"),
        ctx_max=table.whole("ctx_max", least=1, most=U32_MAX),
        size_bytes=table.whole("size_bytes", least=1, most=2**52),
        kv_bytes_per_token=table.whole("kv_bytes_per_token", least=1, most=U32_MAX),
        caps=_caps(table),
        keep=table.flag("keep") or False,
    )
    table.refuse_unknown()
    return model


def _digest(table: Table) -> bytes | None:
    text = table.text("digest", r"(sha256:)?[0-9a-fA-F]{64}")
    return bytes.fromhex(text.removeprefix("sha256:")) if text is not None else None
