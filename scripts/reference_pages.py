"""The pages of ``docs/reference`` as text, made from the names in the code and from ``reference_words.toml``."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields

from agent.admin.guard import RequestRefusal
from agent.admin.trust_verbs import _ADD_REFUSALS, _REMOVE_REFUSALS
from agent.cli.exits import Exit
from agent.observe.metrics import OTHER
from agent.relay.frontends.codes import CODES, OF_PEERS
from agent.settings.policy_schema import POLICY_SCHEMA
from agent.settings.schema import SCHEMA
from agent.settings.show import reference
from router_core import limits
from router_core.placement.reasons import Action, AuthorityOutcome, Cause, HintOutcome, Reason
from router_core.placement.request.hints import _ALLOWED, _FLOORS
from scripts import reference_names as names
from scripts.reference_names import MissingName

FOLDER: Final = names.ROOT / "docs" / "reference"
SURFACE: Final = FOLDER / "surface.txt"
_WORDS: Final = Path(__file__).with_name("reference_words.toml")
_MADE: Final = "<!-- made by scripts/docs from the code: change that, then run scripts/docs -->\n\n"

_CURES: Final = "../howto/troubleshooting.md"

Words = Mapping[str, Any]


def words() -> Words:
    return tomllib.loads(_WORDS.read_text())


def files() -> dict[Path, str]:
    """Every file of the folder with its text."""
    said = words()
    _check_state_files(said)
    made = {f"{name}.md": f"# {title}\n\n{_MADE}{text.strip()}\n" for name, title, text in _pages(said)}
    kinds = {path: kind for path, (kind, _) in said["file"].items()}
    made["surface.txt"] = "\n".join(names.surface(kinds)) + "\n"
    return {FOLDER / name: text for name, text in made.items()}


def stale() -> list[str]:
    """What in the folder is not as the code has it."""
    made = files()
    there = set(FOLDER.glob("*")) if FOLDER.is_dir() else set()
    return sorted(
        str(path.relative_to(names.ROOT))
        for path in there | made.keys()
        if path not in made or not path.is_file() or path.read_text() != made[path]
    )


def write() -> None:
    """Make the folder anew."""
    made = files()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in set(FOLDER.glob("*")) - made.keys():
        path.unlink()
    for path, text in made.items():
        path.write_text(text)


def _pages(said: Words) -> Iterable[tuple[str, str, str]]:
    yield "index", "Reference", _index()
    yield "settings", "Settings", _settings(said)
    yield "policy", "Policy", _policy()
    yield "manifest", "Endpoint manifests", _manifest(said)
    yield "cli", "Command line", _cli(said)
    yield "http", "Inference API", _http(said)
    yield "codes", "Codes and reasons", _codes(said)
    yield "admin", "Admin API", _admin(said)
    yield "metrics", "Metrics", _metrics()
    yield "log", "Log", _log(said)
    yield "files", "Files and refusals to start", _files(said)


def _index() -> str:
    pages = {
        "settings": "`pairmesh.toml` and the environment",
        "policy": "`policy.toml`: how requests are placed",
        "manifest": "`endpoints/NAME.toml`: one upstream each",
        "cli": "`pairmesh` and its exit statuses",
        "http": "routes, headers and hints of the inference API",
        "codes": "error codes and reasons with their status",
        "admin": "routes, verbs and JSON documents of the admin API",
        "metrics": "Prometheus metrics and their labels",
        "log": "log events and their fields, trace files",
        "files": "the state folder, schema versions, refusals to start",
    }
    listed = "\n".join(f"- [{name}]({name}.md): {what}" for name, what in pages.items())
    return (
        f"{listed}\n\n[surface.txt](surface.txt) has all names of these pages, one a line, sorted. A change of it is told "
        "in `CHANGELOG.md`, since somebody's configuration, dashboard or script may hold the name."
    )


def _settings(said: Words) -> str:
    variables = _said(said, "variable", names.environment())
    signals = ", ".join(f"`{name}`" for name in names.signals())
    return (
        "`pairmesh.toml` in the config folder. `pairmesh config show` prints the settings in force at the daemon and where "
        "each comes from, `pairmesh config check` everything wrong with any file of the folder. A change waits for a "
        f"restart; `pairmesh status` names what waits.\n\n{reference(SCHEMA)}\n"
        f"Signals of `sampling.pressure`: {signals}.\n\n## Environment\n\n"
        f"{_table(('variable', 'meaning'), [(f'`{name}`', text) for name, text in variables.items()])}"
    )


def _policy() -> str:
    return (
        "`policy.toml` in the config folder, every key optional. A key ending in `_s` is in seconds, in `_ms` in "
        "milliseconds, in `_gib` in GiB; weights, costs and shares are from 0 to 1. A running daemon takes a changed file "
        "whole or, if anything is wrong with it, not at all. `pairmesh status` and every decision name the hash of the "
        f"policy in force. Defaults are those of the preset `balanced`.\n\n{reference(POLICY_SCHEMA)}"
    )


def _manifest(said: Words) -> str:
    rows = _said(said, "manifest", names.manifest_keys())
    table = _table(
        ("key", "takes", "default", "meaning"), [(f"`{key}`", *texts) for key, texts in rows.items()]
    )
    return (
        "`endpoints/NAME.toml` in the config folder, one file per engine. A running daemon follows the files: a changed "
        "manifest replaces its endpoint, a removed one drains first, and one with a fault takes out its own endpoint "
        f"alone.\n\n{table}"
    )


def _cli(said: Words) -> str:
    exits = _said(said, "exit", [str(each.value) for each in Exit])
    parts = []
    verbs: dict[str, list[names.Option]] = {}
    for option in names.options():
        verbs.setdefault(option.verb, []).append(option)
    for verb, (head, *options) in verbs.items():
        text = " ".join(head.help.split())
        rows = [(f"`{option.spelling}`", " ".join(option.help.split()) or "-") for option in options]
        parts.append(
            f"## pairmesh {verb}\n\n{text}\n\n{_table(('argument', 'meaning'), rows) if rows else ''}".strip()
        )
    return (
        "`pairmesh` asks the daemon that the environment names, else this user's own if it runs, else the service. "
        "`--help` of each verb says the same as this page.\n\n"
        + "\n\n".join(parts)
        + "\n\n## Exit status\n\n"
        + _table(("status", "meaning"), exits.items())
    )


def _http(said: Words) -> str:
    headers = _said(said, "header", names.own_headers())
    routes = _table(
        ("path", "methods", "what"),
        [(f"`{path}`", methods, what) for path, methods, what in names.data_routes()],
    )
    own = [(f"`{name}`", where, text) for name, (where, text) in headers.items()]
    hints = [(f"`{name}`", f"`{header}`") for name, header in names.hint_headers().items()]
    terms = [
        *((f"`{name}=`", takes) for name, takes in _ALLOWED.items()),
        *((f"`{name}>=`", _floor(name)) for name in sorted(_FLOORS)),
    ]
    outcomes = _of_enum(said, "hint_outcome", HintOutcome)
    passed = names.passed_headers()
    documents = names.documents()
    own_json = _table(
        ("answer", "keys"), [(f"`{name}`", _listed(documents[name])) for name in names.OF_THE_API]
    )
    return (
        f"## Routes\n\nOn `api.listen`.\n\n{routes}\n\n## Headers\n\n{_table(('header', 'stands in', 'meaning'), own)}\n\n"
        "## Hints in the body\n\nWithout `x-pairmesh-` and with `_` for `-`, in one object `pairmesh` of the body, which no "
        f"engine gets to see; a header wins. Headers and object hold {limits.HINT_HEADERS // limits.KIB} KiB each.\n\n"
        f"{_table(('key', 'header'), hints)}\n\n## Terms of x-pairmesh-require\n\nCommas stand between them; `!` before one "
        f"negates it, where nothing else is said.\n\n{_table(('term', 'takes'), terms)}\n\n## What became of a hint\n\n"
        f"In `x-pairmesh-hints`.\n\n{outcomes}\n\n## Answers of its own\n\n{own_json}\n\n## Headers that pass through\n\nTo the engine: "
        f"{_listed(passed['up'])}, and what `pass_headers` of its manifest names. To the client: {_listed(passed['down'])}."
        " All others are dropped."
    )


def _floor(name: str) -> str:
    return {
        "ctx": "a number: tokens of context",
        "params": "a number: parameters in 10^9, known to hold",
        "bits": "a number: bits per weight, known to hold",
    }[name]


def _codes(said: Words) -> str:
    errors = sorted(CODES.items(), key=lambda entry: (entry[1][0], entry[0]))
    own = [
        (str(status), f"[`{name}`]({_CURES}#{name})", text)
        for name, (status, text) in errors
        if name not in OF_PEERS
    ]
    peers = [(str(status), f"`{name}`", text) for name, (status, text) in errors if name in OF_PEERS]
    refusals = [
        (f"`{each.value}`", str(each.order or "-"), str(each.status)) for each in Reason if each.status != 200
    ]
    choices = {each.value for each in Reason if each.status == 200}
    reasons = _table(
        ("reason", "meaning"), [(f"`{name}`", text) for name, text in _said(said, "reason", choices).items()]
    )
    head = ("status", "code", "meaning")
    return (
        "An error has a code, in the body as the client's dialect has it (`error.code` for OpenAI's; Ollama's clients get "
        "its text in `error`) and in the header `x-pairmesh-reason`. An engine's own errors pass as they are.\n\n"
        f"## Errors\n\n{_table(head, own)}\n\nBetween nodes alone:\n\n{_table(head, peers)}\n\n"
        "## Filters\n\nEach candidate that cannot serve falls to one filter. If none is left, the refusal is named by the "
        "check that removed the last candidate; `context_too_small` has the code `context_length_exceeded` in the body, as "
        f"OpenAI's clients know it.\n\n{_table(('reason', 'order', 'status'), refusals)}\n\n## Why this endpoint\n\n"
        f"{reasons}\n\n## Actions\n\nOf a decision.\n\n{_of_enum(said, 'action', Action)}\n\n## Refusals of a peer\n\n"
        f"In `x-pairmesh-refused`.\n\n{_of_enum(said, 'peer_refusal', Cause)}\n\n## What came of asking an authority\n\n"
        f"{_of_enum(said, 'authority_outcome', AuthorityOutcome)}"
    )


def _admin(said: Words) -> str:
    routes = _said(said, "admin", names.admin_routes())
    codes = _said(said, "admin_code", [each.code for each in RequestRefusal])
    table = _table(("route", "answers"), [(f"`{route}`", text) for route, text in routes.items()])
    refusals = _table(
        ("status", "code", "meaning"),
        [(str(each.status), f"`{each.code}`", codes[each.code]) for each in RequestRefusal],
    )
    texts = {code.value: text for code, text in (*_ADD_REFUSALS.items(), *_REMOVE_REFUSALS.items())}
    texts |= _said(said, "verb_code", set(names.verb_refusals()) - texts.keys())
    verb_codes = _table(("code", "meaning"), [(f"`{code}`", texts[code]) for code in names.verb_refusals()])
    structs = "\n\n".join(
        _struct(name, kind) for name, kind in sorted(_structs(names.DOCUMENTS.values()).items())
    )
    flat = "\n\n".join(
        f"### {name}\n\n{_listed(keys) if keys else 'No keys.'}"
        for name, keys in names.documents().items()
        if name not in names.DOCUMENTS and name not in names.OF_THE_API
    )
    sets = _table(("of", "words"), [(kind, _listed(sorted(each))) for kind, each in names.WORDS.items()])
    documents = _table(
        ("route", "document"),
        [
            (f"`{name}`", f"[{kind.__name__}](#{kind.__name__.lower()})")
            for name, kind in names.DOCUMENTS.items()
        ],
    )
    return (
        "On `admin.listen`, loopback alone, and on `admin.sock` in the runtime folder. Verbs, which change things, are on "
        'the socket alone. Bodies and answers are JSON; a refusal is `{"error": CODE}`, with `detail` where a verb says '
        f"more and `faults` where a question has some. New keys may come; readers ignore those they do not know.\n\n"
        f"## Routes\n\n{table}\n\n## Refusals\n\n{refusals}\n\n## Codes of verbs\n\nWith status 409, or as `code` of an "
        f"answer.\n\n{verb_codes}\n\n## Documents\n\n{documents}\n\nOf the others the keys: dots stand between levels, "
        f"`[]` for each of a list, `{{}}` for each of a table.\n\n{flat}\n\n## Structures\n\n{structs}\n\n## Closed sets of words\n\n{sets}"
    )


def _structs(kinds: Iterable[type[Struct]]) -> dict[str, type[Struct]]:
    """The structures of these documents, those inside them too, by name."""
    found: dict[str, type[Struct]] = {}
    waiting: list[Any] = list(kinds)
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, Struct):
            if kind.__name__ not in found:
                found[kind.__name__] = kind
                waiting += [field.type for field in fields(kind)]
        else:
            waiting += getattr(kind, "__args__", ())
    return found


def _struct(name: str, kind: type[Struct]) -> str:
    own = kind.__dict__.get("__doc__") or ""
    text = "\n\n".join(" ".join(part.split()) for part in own.split("\n\n")).replace("``", "`")
    rows = [(f"`{field.encode_name}`", _linked(field.type)) for field in fields(kind)]
    return f"### {name}\n\n{text}\n\n{_table(('key', 'takes'), rows)}".replace("\n\n\n\n", "\n\n")


def _linked(kind: Any) -> str:
    text = names.annotated_type(kind)
    inner = list(_structs([kind]))
    return (
        text.replace("object", f"[{inner[0]}](#{inner[0].lower()})", 1)
        if inner and "object" in text
        else text
    )


def _metrics() -> str:
    rows = [
        (f"`{each.name}`", each.shape, ", ".join(f"`{label}`" for label in each.labels) or "-", each.help)
        for each in names.metrics()
    ]
    return (
        "`GET /metrics` on `admin.listen`. What is unknown has no series. A label keeps "
        f"{limits.LABEL_VALUES} values, later ones are summed under `{OTHER}`.\n\n"
        f"{_table(('metric', 'type', 'labels', 'help'), rows)}"
    )


def _log(said: Words) -> str:
    events = names.events()
    texts = _said(said, "log", events)
    order = ("debug", "info", "warning", "error")
    rows = [
        (
            f"`{name}`",
            " or ".join(level for level in order if level in event.levels) or "-",
            ", ".join(f"`{field}`" for field in sorted(event.fields)) or "-",
            texts[name],
        )
        for name, event in events.items()
    ]
    lines = names.trace_lines()
    told = _said(said, "trace", lines)
    traced = [
        (f"`{kind}`", ", ".join(f"`{field}`" for field in keys), told[kind]) for kind, keys in lines.items()
    ]
    return (
        "One line each on standard error: JSON with `at`, `level`, `event` and the fields below, or text on a terminal. "
        f"Fields whose value is unknown are null or left out. Lines that say the same of the same are written "
        f"{limits.LOG_LINES_PER_MIN} times a minute, then counted in one line with `suppressed`. A field that names a node "
        f"has its id beside it, in `NAME_id`, where it is known.\n\n## Events\n\n"
        f"{_table(('event', 'level', 'fields', 'meaning'), rows)}\n\n## Lines of a trace\n\n`pairmesh run --trace FILE` "
        "appends JSON lines, the kind in `e`, the time on the boot clock in `at` (ms). For tests and post-mortems.\n\n"
        f"{_table(('line', 'fields', 'meaning'), traced)}"
    )


def _files(said: Words) -> str:
    rows = []
    for path, (kind, text) in said["file"].items():
        version = f"schema {names.schema_of(kind)}" if kind in ("checked", "journal", "profiles") else kind
        form = {"checked": "checked msgpack", "journal": "SQLite", "profiles": "SQLite"}.get(kind)
        rows.append((f"`{path}`", f"{form}, {version}" if form else version, text))
    refusals = _said(said, "start", names.start_refusals())
    member = _listed(names.documents()[names.MEMBER_FILE])
    return (
        "Below the state folder. A checked file is written whole and beside its last version, `NAME.last`, which is read "
        "where the file is damaged. A file of a newer version is set aside as `NAME.vN` or, if the node cannot do without "
        "it, refuses the start. Older ones are brought up by numbered steps.\n\n"
        f"{_table(('file', 'form', 'what it holds'), rows)}\n\n## Member file\n\nWhat `pairmesh trust export` prints: JSON "
        f"text with {member}.\n\n"
        "## Refusals to start\n\nThe daemon ends with exit status 78; the log has "
        f"`start.refused`, standard error the cure.\n\n"
        f"{_table(('reason', 'meaning'), [(f'`{name}`', text) for name, text in refusals.items()])}"
    )


def _check_state_files(said: Words) -> None:
    """Every name that the code joins to its folders is in the table of files, and the other way round."""
    told = {part for path in said["file"] for part in path.split("/") if re.fullmatch(r"[a-z.]+", part)}
    there = set(names.state_files()) - {"endpoints"}
    if told != there:
        raise MissingName(f"reference_words.toml: file: {sorted(told ^ there)}")


def _said(said: Words, kind: str, wanted: Iterable[str]) -> dict[str, Any]:
    """The words for each of ``wanted``; none may be missing or left over."""
    listed = list(wanted)
    missing, more = set(listed) - said[kind].keys(), said[kind].keys() - set(listed)
    if missing or more:
        raise MissingName(
            f"reference_words.toml: {kind}: without words: {sorted(missing)}; without a name: {sorted(more)}"
        )
    return {name: said[kind][name] for name in said[kind]}


def _of_enum(said: Words, kind: str, enum: type[Enum]) -> str:
    texts = _said(said, kind, [str(each.value) for each in enum])
    return _table(("word", "meaning"), [(f"`{name}`", text) for name, text in texts.items()])


def _listed(items: Sequence[str]) -> str:
    return ", ".join(f"`{item}`" for item in items)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
