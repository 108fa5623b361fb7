"""What must hold after every fault: pure functions over parsed artefacts; each returns its violations in words.

Artefacts are JSON lines (a node's trace, an engine's executions, a load's requests), documents of the admin API,
and raw bytes. Each checker is shown to find a planted violation.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from router_core.placement.decision.replay import replay
from router_core.placement.reasons import Reason
from router_core.placement.record import DecisionRecord
from router_core.policy.placement import PlacementPolicy

Line = Mapping[str, Any]

OUTCOMES = frozenset({"whole", "told", "cut", "refused", "lost"})
ROUTED_STATES = frozenset({"fresh", "late", "suspect"})
FDS_MORE = 2
THREADS_MORE = 4
"""The event loop's own pool grows with what is asked of it at once, to six on two cores."""
RSS_SHARE = 1.10
RSS_MIB = 24.0
"""Half of it is the ring of decisions, which fills while a test runs: some 10 KiB a record of six hosts. SQLite's page cache
and the tables of profiles fill, too."""
WINDOW = 10
DEFAULT = PlacementPolicy()


def parse(text: str) -> list[dict[str, Any]]:
    """JSON lines; raises ValueError for a line that is none."""
    return [json.loads(line) for line in text.splitlines() if line]


def lives(trace: Sequence[Line]) -> list[list[Line]]:
    """A trace cut at each start of the process."""
    found: list[list[Line]] = []
    for line in trace:
        if line["e"] == "began":
            found.append([])
        found[-1].append(line)
    return found


def sent_only_where_allowed(trace: Sequence[Line]) -> list[str]:
    """I1: whoever a request was dispatched to was a serving member that listed the model, in the router's view."""
    found = []
    for line in trace:
        if line["e"] != "placed":
            continue
        faults = [fact for fact in ("member", "serves", "lists") if not line[fact]]
        if line["state"] not in ROUTED_STATES:
            faults.append(f"state {line['state']}")
        if faults:
            found.append(f"decision {line['decision']} went to {line['target']}: {', '.join(faults)}")
    return found


def stamps_only_rise(trace: Sequence[Line]) -> list[str]:
    """I2: per origin (epoch, seq) never falls within a process life, and no life ends on an older epoch than one before
    it held.

    A life that was killed may have lost up to a minute of floors, so a third node's old record can come in first; the
    newest one must follow. A ``seq`` of 0 says that no picture is held, as after a move to another mesh.
    """
    found = []
    newest_epoch: dict[str, int] = {}
    held: dict[str, tuple[int, int]] = {}
    for number, life in enumerate(lives(trace)):
        held = {}
        for line in life:
            if line["e"] != "record" or not line["seq"]:
                continue
            origin, stamp = line["origin"], (line["epoch"], line["seq"])
            if stamp < held.get(origin, stamp):
                found.append(
                    f"life {number}: {origin} fell from {held[origin]} to {stamp} as {line['state']}"
                )
            held[origin] = stamp
            newest_epoch[origin] = max(newest_epoch.get(origin, 0), stamp[0])
    found += [
        f"the last life ended with epoch {stamp[0]} of {origin}, {newest_epoch[origin]} was held before"
        for origin, stamp in held.items()
        if stamp[0] < newest_epoch[origin]
    ]
    return found


def one_request_one_end(load: Sequence[Line], executions: Sequence[Line]) -> list[str]:
    """I3, outside: each request has one outcome, and nothing is executed anew after the client's first byte."""
    found = []
    counts = Counter(line["request"] for line in load)
    found += [f"{request}: {count} outcomes" for request, count in counts.items() if count > 1]
    found += [
        f"{line['request']}: outcome {line['outcome']}" for line in load if line["outcome"] not in OUTCOMES
    ]
    begun: dict[str, list[float]] = {}
    for line in executions:
        if line["e"] == "begun":
            begun.setdefault(line["request"], []).append(line["at"])
    for line in load:
        times = begun.get(line["request"], [])
        if line["status"] == 200 and not times:
            found.append(f"{line['request']}: answered, but nothing executed it")
        if line["first_byte"] is not None and line["status"] == 200:
            late = [at for at in times if at > line["first_byte"]]
            if late:
                found.append(f"{line['request']}: executed {len(late)} times more after its first byte")
    return found


def reservations_end(trace: Sequence[Line]) -> list[str]:
    """I3, inside: every dispatch has one attempt's outcome and one end of its reservation; killed lives aside."""
    found = []
    kept = lives(trace)
    for number, life in enumerate(kept):
        placed = [line["seq"] for line in life if line["e"] == "placed"]
        ends = Counter(line["seq"] for line in life if line["e"] == "reserved_end")
        attempts = Counter(line["seq"] for line in life if line["e"] == "attempt" and line["side"] == "api")
        for seq in placed:
            for what, count in (("ends", ends[seq]), ("outcomes", attempts[seq])):
                if count > 1 or (count < 1 and number == len(kept) - 1):
                    found.append(f"life {number}: dispatch {seq} has {count} {what}")
    return found


def members_agree(views: Mapping[str, Mapping[str, str]]) -> list[str]:
    """I4: all nodes know the same members, and each is fresh to each."""
    found = []
    names = {node: frozenset(view) for node, view in views.items()}
    if len(set(names.values())) > 1:
        found.append(f"rosters differ: { {node: sorted(seen) for node, seen in names.items()} }")
    for node, view in views.items():
        found += [f"{node} sees {other} {state}" for other, state in view.items() if state != "fresh"]
    return found


def forms(text: str) -> Iterator[bytes]:
    """Every window of ``text`` in the spellings a careless sink could use."""
    for start in range(len(text) - WINDOW + 1):
        window = text[start : start + WINDOW]
        yield window.encode()
        yield window.encode().hex().encode()
    for shift in range(3):
        yield base64.b64encode(b"x" * shift + text.encode())[4 : 4 + 2 * WINDOW]


def no_content(sinks: Mapping[str, bytes], canary: str) -> list[str]:
    """I5: no sink holds a piece of what a client wrote."""
    return [
        f"{name} holds the canary" for name, blob in sinks.items() if any(f in blob for f in forms(canary))
    ]


def nothing_leaks(before: Any, after: Any) -> list[str]:
    """I6: descriptors, threads, children and memory of a process are as before."""
    found = []
    if after.fds > before.fds + FDS_MORE:
        found.append(f"descriptors rose from {before.fds} to {after.fds}")
    if after.threads > before.threads + THREADS_MORE:
        found.append(f"threads rose from {before.threads} to {after.threads}")
    if after.children > before.children:
        found.append(f"children rose from {before.children} to {after.children}")
    if after.rss_mib > max(before.rss_mib * RSS_SHARE, before.rss_mib + RSS_MIB):
        found.append(f"memory rose from {before.rss_mib:.1f} to {after.rss_mib:.1f} MiB")
    return found


def decisions_explain_themselves(decisions: Iterable[Line]) -> list[str]:
    """I7: the chosen row is a candidate that stayed in, every row is accounted for, every code is a known one."""
    found = []
    known = {reason.value for reason in Reason}
    for record in decisions:
        name = record["id"]
        codes = {record["reason"], *record["excluded_counts"], *(row["code"] for row in record["excluded"])}
        found += [f"{name}: unknown code {code}" for code in sorted(codes - known)]
        rows = {row["row"]: row["out"] for row in record["candidates"]}
        if record["chosen"] is not None and rows.get(record["chosen"], "absent") is not None:
            found.append(f"{name}: chose a row that is {rows.get(record['chosen'], 'absent')}")
        accounted = len(rows) + sum(record["excluded_counts"].values())
        if record["full"] and record["candidates"] and accounted != record["view"]["rows"]:
            found.append(f"{name}: {accounted} of {record['view']['rows']} rows accounted for")
        elif accounted > record["view"]["rows"]:
            found.append(f"{name}: {accounted} rows told, {record['view']['rows']} seen")
    return found


def decisions_replay(decisions: Iterable[Line], policy: PlacementPolicy = DEFAULT) -> list[str]:
    """I7: a stored record that tells all it was chosen from comes to the same again, by the policy that made it."""
    found = []
    for line in decisions:
        record = msgspec.convert(line, DecisionRecord)
        if not record.full or record.policy_hash != policy.hash:
            continue
        again = replay(record, policy)
        if (again.chosen, again.action, again.reason) != (record.chosen, record.action, record.reason):
            found.append(f"{record.id}: chose {record.chosen}, replayed it comes to {again.chosen}")
    return found
