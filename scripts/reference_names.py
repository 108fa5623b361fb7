"""Every name that people and programs outside hold of pairmesh, collected from the code.

Schemas, tables of codes, structs of documents and the command line are read from the product itself; what is only
written out where it is used (metrics, log events, refusals to start) comes from ``reference_scan``.
"""

import ast
import inspect
import re
from argparse import Action, ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin

from msgspec import Struct
from msgspec.structs import fields

from agent.admin import routes
from agent.admin.config_verbs import NoArguments
from agent.admin.documents import DrainDoc, RosterDoc, StatusDoc, view_doc
from agent.admin.drain_verbs import DrainArguments
from agent.admin.guard import RequestRefusal
from agent.admin.questions import ExplainBody, ReplayBody
from agent.admin.routes import _ASKED, _DECISION, _DO, _READ
from agent.admin.trust_verbs import AddArguments, RemoveArguments
from agent.cli import VERBS, config, parser
from agent.cli.exits import Exit
from agent.cli.findings import Finding, Health
from agent.identity.member_file import _Text as MemberFileText
from agent.identity.membership import AddCode, RemoveCode
from agent.observe.journal_file import _STEPS as JOURNAL_STEPS
from agent.relay.dialects import ollama, openai
from agent.relay.frontends import lists, native_lists
from agent.relay.frontends.codes import CODES
from agent.relay.frontends.routes import _ONE_BLOB, _ONE_MODEL, ROUTES, Closed, View
from agent.relay.http.headers import REPLY_FAMILIES, REPLY_PASSED, REQUEST_PASSED
from agent.relay.ports import AccessLine
from agent.settings.fault import toml
from agent.settings.manifest import DeclaredModel, EngineKind, Manifest, parse_manifest
from agent.settings.policy_schema import POLICY_SCHEMA
from agent.settings.reading import Schema
from agent.settings.schema import SCHEMA
from agent.store.checked import FIRST
from agent.store.profiles import _STEPS as PROFILE_STEPS
from router_core.mesh.protocol.actions import Alarm
from router_core.placement.decision.authority import AnswerFault, Question
from router_core.placement.reasons import Action as DecisionAction
from router_core.placement.reasons import AuthorityOutcome, Cause, HintOutcome, Reason
from router_core.placement.record import DecisionRecord
from router_core.placement.request.hints import _ALLOWED, _FLOORS, _HEADER_OF, _IN_BODY
from router_core.placement.request.request import RequestClass
from router_core.placement.residency.events import ResidencyNotice
from router_core.policy.placement import PRESETS, Locality, Match
from router_core.policy.pressure import DESKTOP, SERVER
from router_core.record.membership import Liveness
from router_core.record.spelling import CAPABILITIES, DIALECTS, dialect_name
from router_core.record.state import (
    Dialect,
    EngineState,
    Flag,
    Level,
    ModelState,
    ResourceCode,
    Role,
    Static,
    Volatile,
)
from scripts.reference_scan import (
    Event,
    Metric,
    Module,
    modules,
    raised,
    returned,
    spelled,
    state_places,
    traces,
    variables,
)
from scripts.reference_scan import events as events_in
from scripts.reference_scan import headers as headers_in
from scripts.reference_scan import metrics as metrics_in
from scripts.reference_scan import verbs as verbs_in

ROOT: Final = Path(__file__).resolve().parent.parent

WORDS: Final[Mapping[str, Iterable[str]]] = {
    "action": [each.value for each in DecisionAction],
    "authority-outcome": [each.value for each in AuthorityOutcome],
    "capability": CAPABILITIES,
    "class": [each.value for each in RequestClass],
    "dialect": DIALECTS,
    "engine": [each.value for each in EngineKind],
    "engine-state": [each.name.lower() for each in EngineState],
    "finding": [each.value for each in Health],
    "flag": [str(each.name).lower() for each in Flag],
    "hint-outcome": [each.value for each in HintOutcome],
    "level": [each.name.lower() for each in Level],
    "liveness": [each.value for each in Liveness],
    "locality": [each.value for each in Locality],
    "match": [each.value for each in Match],
    "model-state": [each.name.lower() for each in ModelState],
    "peer-refusal": [each.value for each in Cause],
    "preset": PRESETS,
    "resource": [each.name.lower() for each in ResourceCode],
    "role": [str(each.name).lower() for each in Role],
}
"""Closed sets of words that stand in documents, headers, hints or files."""

VERB_ARGUMENTS: Final[Mapping[str, type[Struct]]] = {
    "config-show": NoArguments,
    "drain": DrainArguments,
    "trust-list": NoArguments,
    "trust-export": NoArguments,
    "trust-add": AddArguments,
    "trust-remove": RemoveArguments,
}
DOCUMENTS: Final[Mapping[str, type[Struct]]] = {
    "GET /v1/status": StatusDoc,
    "GET /v1/decisions/ID": DecisionRecord,
    "POST /v1/explain, asked": ExplainBody,
    "POST /v1/explain": DecisionRecord,
    "POST /v1/replay, asked": ReplayBody,
}
"""Documents that are one struct each."""
WRITTEN_OUT: Final[Mapping[str, tuple[Callable[..., object], ...]]] = {
    "refusal": (routes.refused, routes._faulty, routes.Routes.do, routes.Routes._replay),
    "GET /v1/decisions": (routes.Routes._recent,),
    "POST /v1/replay": (routes.Routes._replay,),
    "error, OpenAI": (openai.error,),
    "error, Ollama": (ollama.error,),
    "GET /health": (lists.health,),
    "GET /v1/models/ID": (lists._entry,),
    "GET /api/tags": (native_lists._tag, native_lists._details),
    "GET /api/ps": (native_lists._running, native_lists._details),
    "GET /api/version": (lists.version,),
    "config check": (config._check,),
    "config show": (config._show, config._show_files),
}
"""Documents that are a mapping in the functions that answer or print them."""
OF_THE_API: Final = tuple(
    name for name in WRITTEN_OUT if name.startswith(("error", "GET /health", "GET /v1/models", "GET /api"))
)
"""Those that the inference API answers."""
_REFUSAL: Final = frozenset({"error", "detail", "faults"})
_BOTH: Final = ("refusal", "POST /v1/replay")
MEMBER_FILE: Final = "member file"
DOCTOR: Final = "doctor"
QUESTION: Final = "authority, question"
ANSWER: Final = "authority, answer"
VIEW: Final = "GET /v1/view"
_INTERNAL_VARIABLES: Final = re.compile(r"PAIRMESH_FAKE_")
_METRICS_BY_TEMPLATE: Final = {"pairmesh_{}_alarms_total": {"pairmesh_mesh_alarms_total": "Mesh alarms."}}
_EVENTS_BY_TEMPLATE: Final = {
    "{}.{}": [f"mesh.{alarm.value}" for alarm in Alarm],
    "model.{}": [f"model.{told.value}" for told in ResidencyNotice],
}
_FIELDS: Final = {
    "request": [field.encode_name for field in fields(AccessLine)],
    "ready": ["api", "mesh", "ingress", "admin"],
}
"""Fields that a line gets from a struct or from the ports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One argument of the command line as its usage spells it."""

    verb: str
    spelling: str
    help: str


class MissingName(Exception):
    """The product has a name that this list does not know how to place, or the other way round."""


@cache
def code() -> tuple[Module, ...]:
    return modules(ROOT)


def manifest_keys() -> list[str]:
    """The keys of an endpoint's manifest, those of a model behind ``models.``; all are known to its reader."""
    keys = [*Manifest.__struct_fields__, *(f"models.{name}" for name in DeclaredModel.__struct_fields__)]
    for key in keys:
        model = key.startswith("models.")
        name = key.removeprefix("models.")
        _, faults = parse_manifest(
            (f"[[models]]\n{name} = 1979-05-27" if model else f"{name} = 1979-05-27").encode(), "x.toml"
        )
        if any(fault.problem == "unknown key" for fault in faults):
            raise MissingName(f"manifest: {key} is no key of the reader")
    return keys


def signals() -> list[str]:
    return sorted({row.signal for policy in (DESKTOP, SERVER) for row in policy.rows})


def options() -> list[Option]:
    """The command line: every verb, with every argument in the order of its help."""
    return [option for verb, made in _verbs(parser(), ()) for option in _options(verb, made)]


def _verbs(made: ArgumentParser, above: tuple[str, ...]) -> Iterator[tuple[str, ArgumentParser]]:
    inner = [action for action in made._actions if isinstance(action, _SubParsersAction)]
    if above:
        yield " ".join(above), made
    for action in inner:
        said = {choice.dest: choice.help for choice in action._choices_actions}
        for name, child in action.choices.items():
            child.description = child.description or said.get(name)
            yield from _verbs(child, (*above, name))


def _options(verb: str, made: ArgumentParser) -> Iterator[Option]:
    yield Option(verb=verb, spelling="", help=made.description or "")
    for action in made._actions:
        if isinstance(action, _SubParsersAction) or "--help" in action.option_strings:
            continue
        yield Option(verb=verb, spelling=_spelling(action), help=action.help or "")


def _spelling(action: Action) -> str:
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    value = str(action.metavar or choices or action.dest.upper())
    if not action.option_strings:
        return f"[{value}]" if action.nargs == "?" else value
    names = ", ".join(action.option_strings)
    return names if action.nargs == 0 else f"{names} {value}"


def hint_headers() -> dict[str, str]:
    """Headers of hints by the key in the body."""
    return {**_HEADER_OF, "session": "x-session-id"}


def own_headers() -> list[str]:
    """Headers of pairmesh's own, in requests and replies, between nodes too."""
    return sorted({*headers_in(code()), *hint_headers().values(), "server-timing", "x-request-id"})


def passed_headers() -> dict[str, list[str]]:
    """Foreign headers that go through, by direction; ``*`` stands for any ending."""
    return {
        "up": [*sorted(_plain(REQUEST_PASSED)), "traceparent"],
        "down": sorted([*_plain(REPLY_PASSED), *(f"{name}*" for name in _plain(REPLY_FAMILIES))]),
    }


def _plain(names: Iterable[bytes]) -> list[str]:
    return [name.decode("ascii") for name in names]


def data_routes() -> list[tuple[str, str, str]]:
    """Method, path and what answers, of the inference API."""
    routes = [*ROUTES.values(), _ONE_MODEL, _ONE_BLOB]
    return sorted((route.template, "/".join(_plain(route.methods)), _what(route.what)) for route in routes)


def _what(what: Dialect | View | Closed) -> str:
    """What a route is there for."""
    if isinstance(what, Closed):
        return f"refused: `{what.value}`"
    if isinstance(what, View):
        return "answered by this node"
    if what in DIALECTS.values():
        return f"placed, dialect `{dialect_name(what)}`"
    return "facts about one model, from any node that has it"


def admin_routes() -> list[str]:
    """Method and path of what the admin address answers, and of the verbs on its socket."""
    reads = [f"GET {path}" for path in _READ] + [f"GET {_DECISION}ID"]
    return [
        *sorted(reads),
        *sorted(f"POST {path}" for path in _ASKED),
        *(f"POST {_DO}{verb}" for verb in VERB_ARGUMENTS),
    ]


def keys_of(kind: object) -> list[str]:
    """The keys of a document of ``kind``: dotted, ``[]`` for each of a list, ``{}`` for each of a table."""
    if isinstance(kind, type) and issubclass(kind, Struct):
        return [
            f".{field.encode_name}{rest}" for field in fields(kind) for rest in ("", *keys_of(field.type))
        ]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) or hasattr(kind, "__metadata__"):
        return [
            rest for part in inner[: 1 if hasattr(kind, "__metadata__") else None] for rest in keys_of(part)
        ]
    if origin in (tuple, list):
        return [f"[]{rest}" for rest in keys_of(inner[0])]
    if origin is dict:
        return [f".{{}}{rest}" for rest in ("", *keys_of(inner[1]))]
    return []


def documents() -> dict[str, list[str]]:
    """The keys of every JSON document, by route or command. An answer of a verb is behind ``POST /v1/do/VERB``."""
    found = {name: _bare(keys_of(kind)) for name, kind in DOCUMENTS.items()}
    for name, functions in WRITTEN_OUT.items():
        keys = [key for function in functions for key in _written(function)]
        of_it = [key for key in keys if name not in _BOTH or (key in _REFUSAL) == (name == "refusal")]
        found[name] = list(dict.fromkeys(of_it))
    (view,) = returned(ast.parse(inspect.getsource(view_doc)))
    found[VIEW] = [word for key in spelled(view) for word in _with_record(key)]
    answers = verbs_in(code(), lambda verb: "-" in verb or verb in VERBS)
    if answers.keys() != VERB_ARGUMENTS.keys():
        raise MissingName(f"verbs of the socket: {sorted(answers.keys() ^ VERB_ARGUMENTS.keys())}")
    for verb, keys in answers.items():
        found[f"POST {_DO}{verb}, asked"] = _bare(keys_of(VERB_ARGUMENTS[verb]))
        found[f"POST {_DO}{verb}"] = keys
    found[f"POST {_DO}drain"] = _bare(keys_of(DrainDoc))
    found[f"POST {_DO}trust-list"] += [f"members[]{key}" for key in keys_of(RosterDoc)]
    found[DOCTOR] = [f"[]{key}" for key in keys_of(Finding)]
    found[MEMBER_FILE] = _bare(keys_of(MemberFileText))
    found[QUESTION] = _bare(keys_of(Question))
    found[ANSWER] = [
        "v",
        *(fault.value for fault in AnswerFault if fault.value in ("order", "weights", "ttl_ms", "reason")),
    ]
    return found


def _written(function: Callable[..., object]) -> list[str]:
    """The keys of every mapping that is written out in ``function``."""
    tree = ast.parse(dedent(inspect.getsource(function)))
    known = inspect.unwrap(function).__globals__
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return [
        str(key.value) if isinstance(key, ast.Constant) else str(known[key.id])
        for key in keys
        if isinstance(key, ast.Constant | ast.Name)
    ]


def _bare(keys: Iterable[str]) -> list[str]:
    return [key.removeprefix(".") for key in keys]


def _with_record(key: str) -> list[str]:
    record = {"volatile": Volatile, "static": Static}.get(key.rpartition(".")[2])
    return [key] if record is None else [key, *(f"{key}{rest}" for rest in keys_of(record))]


def metrics() -> list[Metric]:
    return metrics_in(code(), _METRICS_BY_TEMPLATE)


def events() -> dict[str, Event]:
    found = events_in(code(), _EVENTS_BY_TEMPLATE, ("Alarm", "mesh"))
    for name, more in _FIELDS.items():
        found[name].fields.update(more)
    for name, event in found.items():
        if "..." in event.fields and name not in _FIELDS:
            raise MissingName(f"log: {name} has fields that nobody names")
        event.fields.discard("...")
    return dict(sorted(found.items()))


def trace_lines() -> dict[str, list[str]]:
    return {kind: sorted(names) for kind, names in sorted(traces(code()).items())}


def start_refusals() -> list[str]:
    return raised(code(), "RefuseToStart")


def verb_refusals() -> list[str]:
    """Codes of verbs that say no, with status 409, and of what became of those that do not."""
    return sorted(
        {*raised(code(), "VerbRefused"), *(each.value for each in (*AddCode, *RemoveCode)), "not_replayable"}
    )


def environment() -> list[str]:
    return [name for name in variables(code()) if not _INTERNAL_VARIABLES.match(name)]


def state_files() -> list[str]:
    """Names in the state and runtime folders, as the code joins them."""
    return state_places(module for module in code() if "sampling" not in module.path)


def schema_of(kind: str) -> int:
    """The version of the schema of a kind of file, by the word of the table of files."""
    return {"checked": FIRST.version, "journal": len(JOURNAL_STEPS), "profiles": len(PROFILE_STEPS)}[kind]


def surface(files: Mapping[str, str]) -> list[str]:
    """All of it, one name a line, sorted. ``files`` are the kinds of the files of the state folder."""
    lines = [
        *(f"setting {line}" for line in _with_defaults(SCHEMA)),
        *(f"policy {line}" for line in _with_defaults(POLICY_SCHEMA)),
        *(f"manifest {key}" for key in manifest_keys()),
        *(f"signal {name}" for name in signals()),
        *(f"variable {name}" for name in environment()),
        *(f"cli {option.verb} {option.spelling}".rstrip() for option in options()),
        *(f"exit {each.value}" for each in Exit),
        *(f"header {name}" for name in own_headers()),
        *(f"passed {way} {name}" for way, names in passed_headers().items() for name in names),
        *(f"hint {name}" for name in _IN_BODY),
        *(f"require {name}" for name in (*_ALLOWED, *_FLOORS)),
        *(f"route {methods} {path}" for path, methods, _ in data_routes()),
        *(f"code {name} {status}" for name, (status, _) in CODES.items()),
        *(f"reason {each.value} {each.status}" for each in Reason),
        *(f"word {kind} {word}" for kind, each in WORDS.items() for word in each),
        *(f"admin {route}" for route in admin_routes()),
        *(f"admin-code {each.code} {each.status}" for each in RequestRefusal),
        *(f"verb-code {name}" for name in verb_refusals()),
        *(f"json {name}: {key}" for name, keys in documents().items() for key in keys),
        *(f"metric {each.name}{{{','.join(each.labels)}}} {each.shape}" for each in metrics()),
        *(f"log {name}{{{','.join(sorted(event.fields))}}}" for name, event in events().items()),
        *(f"trace {kind}{{{','.join(names)}}}" for kind, names in trace_lines().items()),
        *(f"start-code {name}" for name in start_refusals()),
        *(f"file {path} {_shown_kind(kind)}" for path, kind in files.items()),
    ]
    return sorted(set(lines))


def _shown_kind(kind: str) -> str:
    return f"schema {schema_of(kind)}" if kind in ("checked", "journal", "profiles") else kind


def _with_defaults(schema: Schema) -> Iterator[str]:
    for key in schema.keys:
        yield f"{key.path} = {'-' if key.default is None else toml(key.default)}"


def annotated_type(kind: Any) -> str:
    """A field's type in words of JSON."""
    if hasattr(kind, "__metadata__"):
        return annotated_type(get_args(kind)[0])
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(annotated_type(part) for part in inner))
    if origin in (tuple, list):
        return f"list of {annotated_type(inner[0])}"
    if origin is dict:
        return f"table of {annotated_type(inner[1])}"
    simple = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        bytes: "base64",
        type(None): "null",
    }
    if kind in simple:
        return simple[kind]
    return "object" if isinstance(kind, type) and issubclass(kind, Struct) else "text"
