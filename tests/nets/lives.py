"""Net 2: 500 random request lives, step by step, through the relay and the placement of one node at a time whose clock,
engines, peers and clients are played: attempts, refusals, breakers, queue, sessions, learning, draining.

Twenty-five worlds of twenty lives each, which meet in queues, breakers and sessions. Every step is one document: what
happened, what the node did about it, and its books afterwards.
"""

import asyncio
import heapq
import itertools
import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Final

from tests.nets.adapter.relay import PORT, Dial, RelayNode, Upstream
from tests.nets.draw import NOW, OWN
from tests.nets.net import Net

WORLDS: Final = 25
_LIVES: Final = 20
_SPREAD_MS: Final = 20_000
_LAST_MS: Final = 400_000
_POLICIES: Final = ("balanced", "balanced", "balanced", "latency", "pack", "wide")
_HINTS: Final = (
    "x-pairmesh-prefer: @beta",
    "x-pairmesh-prefer: @me/e1",
    "x-pairmesh-class: batch",
    "x-pairmesh-class: background",
    "x-pairmesh-require: node=@gamma",
    "x-pairmesh-locality: host",
    "x-pairmesh-deadline-ms: 9000",
    "x-pairmesh-require: %%",
)
_OWN_DOES: Final = (
    ("well", 50), ("500", 7), ("503", 6), ("429", 3), ("404", 2), ("400", 3), ("refuses", 6), ("no connection", 2),
    ("reset", 3), ("stale", 3), ("hangs", 3), ("cut", 4), ("stalls", 2),
)  # fmt: skip
_PEER_DOES: Final = (
    ("well", 50), ("queue_full", 12), ("draining", 3), ("pressure", 3), ("fault", 4), ("no continue", 2), ("500", 5),
    ("503", 3), ("refuses", 4), ("eof", 3), ("hangs", 3), ("cut", 4),
)  # fmt: skip


def a_world(rng: Random) -> dict[str, Any]:
    """Plain data of one node and its peers: few slots, short queues, so that lives meet."""
    names = ["beta", "gamma", "delta"][: rng.choice((0, 1, 1, 2, 3))]
    own = a_node(rng, OWN, rng.choice((1, 1, 2)))
    return {
        "policy": rng.choice(_POLICIES),
        "own": own,
        "peers": [a_node(rng, name, 1) for name in names],
        "engines": [
            {
                "name": engine["name"],
                "connect_ms": 2_000,
                "first_byte_ms": rng.choice((0, 0, 30_000)),
                "idle_ms": rng.choice((0, 20_000, 300_000)),
            }
            for engine in own["static"]["engines"]
        ],
        "most_waiting": rng.choice((0, 3, 256)),
    }


def a_node(rng: Random, name: str, engines: int) -> dict[str, Any]:
    """A healthy node with ``tiny`` on each engine, and ``other`` on disk."""
    models = [
        {
            "name": model,
            "engine": number,
            "size_mib": size,
            "ctx_served": 8_192,
            "parallel": 4,
            "quant": "Q4_K_M",
            "cap_known": 0,
            "cap_has": 0,
        }
        for number in range(engines)
        for model, size in (("tiny", 900), ("other", 2_100))
    ]
    speed = rng.randint(100, 300) if name == OWN else rng.randint(150, 900)
    return {
        "name": name,
        "liveness": "fresh",
        "confirmed": True,
        "quarantined": False,
        "age_ms": 0,
        "period_ms": 1_000,
        "rtt_ms": rng.choice((None, 1, 40)),
        "static": {
            "host": {"cpus": 8, "ram_total_mib": 65_536},
            "gpus": [{"uuid8": bytes(8), "name": "gpu", "vram_total_mib": 24_576, "mem_bw_gbs": 500}],
            "engines": [
                {
                    "name": f"e{number}",
                    "kind": "llamacpp",
                    "dialects": 0b1111,
                    "slots": rng.choice((1, 1, 1, 2, 4)),
                    "max_queue": rng.choice((0, 0, 1, 2)),
                    "gpus": (0,),
                    "load_policy": rng.choice((0, 1)),
                    "labels": (),
                }
                for number in range(engines)
            ],
            "models": models,
            "profiles": [
                {
                    "model": place,
                    "engine": model["engine"],
                    "n": 10,
                    "prompt_dtps": 20 * speed,
                    "gen_dtps": speed,
                }
                for place, model in enumerate(models)
                if rng.random() < 0.7
            ],
        },
        "volatile": {
            "flags": 0,
            "level": 0,
            "host": {"ram_available_mib": 40_000, "cpu_external_pct": 0},
            "gpus": [{"util_pct": 0, "vram_free_mib": 20_000, "score_c": 0, "level": 0, "state": 0}],
            "resources": [{"code": code, "level": 0, "score_c": rng.randint(0, 20)} for code in (0, 1, 4, 5)],
            "engines": [
                {"state": 3, "running": 0, "queued": 0, "slots": 4, "ours": 0, "obtainable_mib": 20_000}
                for _ in range(engines)
            ],
            "residents": [
                {"model": place, "engine": model["engine"], "state": 2, "mem_mib": 1_500, "ctx": 8_192}
                for place, model in enumerate(models)
                if model["name"] == "tiny" or rng.random() < 0.3
            ],
        },
    }


class Driver:
    """Plays one world to its end; ``steps`` are the documents."""

    def __init__(self, label: str) -> None:
        self.rng = Random(f"lives/{label}")
        self.told = a_world(self.rng)
        self.steps: list[dict[str, Any]] = []
        self._plan: list[tuple[int, int, str, Callable[[], None]]] = []
        self._order = itertools.count()
        self._owners: list[str] = [engine["name"] for engine in self.told["engines"]]
        self._peers: dict[str, dict[str, Any]] = {peer["name"]: peer for peer in self.told["peers"]}
        self._seen: dict[str, int] = {}
        self._does: dict[int, str] = {}
        self._streams: dict[int, bool] = {}
        self.node = RelayNode(self.told, lambda at: self.rng.random() < 0.5)
        for peer in self._peers.values():
            self.node.hears(peer, None)

    def run(self) -> list[dict[str, Any]]:
        """Every step of the world."""
        rng = self.rng
        spread_ms = rng.choice((1_500, 6_000, _SPREAD_MS))
        for life in range(_LIVES):
            self.at(NOW + rng.randrange(spread_ms), f"life {life} asks", partial(self._ask, life))
        for name in self._peers:
            self.at(NOW + rng.randrange(1_000), f"{name} tells", partial(self._peer_tells, name))
        self.at(NOW + 500, "own state", self._own_tells)
        self.at(NOW + 700, "sweep", self._sweep)
        if rng.random() < 0.5:
            drained = rng.choice([*self._owners, None])
            begins = NOW + rng.randrange(_SPREAD_MS)
            self.at(begins, f"drain {drained}", partial(self.node.drain, drained))
            if rng.random() < 0.7:
                self.at(
                    begins + rng.randint(100, 9_000),
                    f"undo {drained}",
                    partial(self.node.undo_drain, drained),
                )
        if rng.random() < 0.2:
            self.at(NOW + rng.randint(5_000, 60_000), "shut down", self.node.shuts_down)
        while self._plan or self.node.due() is not None:
            due = self.node.due()
            if due is not None and (not self._plan or due < self._plan[0][0]):
                self._to(due)
                self._step("time passed", self.node.time_passed)
                continue
            at, _, what, does = heapq.heappop(self._plan)
            if at > NOW + _LAST_MS:
                break
            self._to(at)
            self._step(what, does)
        self._to(NOW + _LAST_MS)
        self._step("the end", self.node.shuts_down)
        self.steps.append({"learned": self.node.lessons()})
        return self.steps

    # --- steps -----------------------------------------------------------------------------------------------

    def at(self, when: int, what: str, does: Callable[[], None]) -> None:
        heapq.heappush(self._plan, (when, next(self._order), what, does))

    def after(self, ms: int, what: str, does: Callable[[], None]) -> None:
        self.at(self.node.clock.now + ms, what, does)

    def _to(self, when: int) -> None:
        self.node.clock.now = max(self.node.clock.now, when)

    def _step(self, what: str, does: Callable[[], None]) -> None:
        does()
        took = self.node.settle()
        dials = self.node.dials()
        for dial in dials:
            self._dialled(dial)
        for action, whom in took:
            if isinstance(whom, Upstream):
                self._asked(whom, action)
        self.steps.append(
            {
                "ms": self.node.clock.now - NOW,
                "what": what,
                "took": [action for action, _ in took],
                "dials": [dial.at for dial in dials],
                "books": self.node.books(),
            }
        )

    # --- clients ---------------------------------------------------------------------------------------------

    def _ask(self, life: int) -> None:
        rng = self.rng
        body: dict[str, Any] = {
            "model": rng.choice(("tiny",) * 8 + ("other", "absent")),
            "messages": [{"role": "user", "content": "x" * rng.choice((40, 900, 4_000))}],
            "stream": rng.random() < 0.7,
        }
        if rng.random() < 0.5:
            body["max_tokens"] = rng.choice((8, 64, 400))
        lines = [f"x-request-id: life-{life}", "content-type: application/json"]
        if rng.random() < 0.3:
            lines.append(rng.choice(_HINTS))
        if rng.random() < 0.35:
            lines.append(f"x-session-id: s{rng.randrange(3)}")
        text = json.dumps(body).encode()
        head = "\r\n".join(
            [
                "POST /v1/chat/completions HTTP/1.1",
                f"host: 127.0.0.1:{PORT}",
                f"content-length: {len(text)}",
                *lines,
            ]
        )
        if rng.random() < 0.1:
            leaves = partial(self.node.leaves, life, stalled=rng.random() < 0.3)
            self.after(rng.choice((1, 30, 800, 9_000)), f"life {life} leaves", leaves)
        self.node.asks(life, head.encode() + b"\r\n\r\n" + text)

    # --- engines and peers -----------------------------------------------------------------------------------

    def _drawn(self, at: str) -> str:
        told = _OWN_DOES if at in self._owners else _PEER_DOES
        return self.rng.choices([does for does, _ in told], weights=[weight for _, weight in told])[0]

    def _dialled(self, dial: Dial) -> None:
        does = self._drawn(dial.at)
        if does == "no connection":
            return
        cause = "connect_refused" if does == "refuses" else None
        ms = self.rng.choice((0, 1, 5, 200))
        self.after(ms, f"{dial.at}: {cause or 'connected'}", partial(dial.comes_to, cause))

    def _asked(self, upstream: Upstream, action: dict[str, Any]) -> None:
        """The node did something on a connection: what the other side does about it."""
        what, at = action["upstream"], upstream.at
        if what == "request":
            self._streams[upstream.number] = '"stream": true' in action["body"]
            self._serve(upstream, self._drawn(at))
        elif what == "head":
            self._seen[at] = max(self._seen.get(at, 0), action["seq"])
            self._does[upstream.number] = does = self._drawn(at)
            if does in ("queue_full", "draining", "pressure"):
                refused = ((b"x-pairmesh-refused", does.encode()), (b"content-type", b"application/json"))
                self._answers(upstream, 429, refused)
            elif does == "fault":
                self._answers(upstream, 502, ((b"x-pairmesh-error", b"upstream_unreachable"),))
            elif does != "no continue":
                self.after(self.rng.choice((1, 4)), f"{at}: continues", upstream.continues)
        elif what == "body":
            self._streams[upstream.number] = '"stream": true' in action["body"]
            self._serve(upstream, self._does[upstream.number])

    def _answers(self, upstream: Upstream, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        def answer() -> None:
            upstream.answers(status, headers)
            upstream.says(b'{"error": {"message": "no"}}', ends=True)

        self.after(self.rng.choice((1, 3, 60)), f"{upstream.at}: {status}", answer)

    def _serve(self, upstream: Upstream, does: str) -> None:
        rng, at = self.rng, upstream.at
        if does.isdigit():
            headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)
            if does in ("503", "429") and rng.random() < 0.5:
                headers += ((b"retry-after", b"3"),)
            self._answers(upstream, int(does), headers)
            return
        if does in ("reset", "eof", "stale", "refuses", "no connection"):
            cause = "reset" if does in ("reset", "refuses") else "eof"
            self.after(rng.choice((1, 40)), f"{at}: {cause}", partial(upstream.breaks, cause))
            return
        if does == "hangs":
            return
        first_ms, gap_ms = rng.choice((20, 300, 2_500, 12_000)), rng.choice((5, 20, 90, 800))
        count = rng.randint(1, 4)
        if not self._streams[upstream.number]:
            self.after(
                first_ms + count * gap_ms, f"{at}: whole answer", partial(self._whole, upstream, count)
            )
            return
        kind = ((b"content-type", b"text/event-stream"),)
        self.after(first_ms, f"{at}: head", partial(upstream.answers, 200, kind))
        for number in range(count):
            says = partial(upstream.says, _event(number, None))
            self.after(first_ms + number * gap_ms, f"{at}: token {number}", says)
        ends_ms = first_ms + count * gap_ms
        if does == "cut":
            self.after(ends_ms, f"{at}: cut", partial(upstream.breaks, "reset"))
        elif does != "stalls":
            timings = {
                "prompt_n": 100,
                "prompt_ms": 0.4 * first_ms,
                "predicted_n": count,
                "predicted_ms": 1.0 + gap_ms,
            }
            last = _event(count, timings) + b"data: [DONE]\n\n"
            self.after(ends_ms, f"{at}: end", partial(upstream.says, last, ends=True))

    @staticmethod
    def _whole(upstream: Upstream, count: int) -> None:
        told = {
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "w"}, "finish_reason": "stop"}
            ],
            "usage": {"prompt_tokens": 300, "completion_tokens": 40 * count},
            "timings": {
                "prompt_n": 300,
                "prompt_ms": 80.0,
                "predicted_n": 40 * count,
                "predicted_ms": 900.0 * count,
            },
        }
        body = json.dumps(told).encode()
        upstream.answers(200, ((b"content-type", b"application/json"),), len(body))
        upstream.says(body, ends=True)

    # --- news ------------------------------------------------------------------------------------------------

    def _peer_tells(self, name: str) -> None:
        rng, peer = self.rng, self._peers[name]
        slots = peer["static"]["engines"][0]["slots"]
        busy = rng.choice((0, 0, 1, slots, slots, slots + 2))
        load = peer["volatile"]["engines"][0] | {
            "running": min(busy, slots),
            "queued": max(0, busy - slots),
            "slots": slots,
            "ours": busy,
            "work_ds": 30 * busy,
            "state": rng.choice((3,) * 12 + (5, 4)),
            "age_ds": rng.choice((0, 0, 25)),
        }
        level = rng.choice((0,) * 14 + (2, 3))
        state = peer["volatile"] | {
            "engines": [load],
            "resources": [
                {"code": code, "level": level if code == 4 else 0, "score_c": 10} for code in (0, 1, 4, 5)
            ],
        }
        liveness = rng.choice(("fresh",) * 14 + ("late", "suspect", "suspect", "gone"))
        self.node.hears(peer | {"volatile": state, "liveness": liveness}, self._seen.get(name))
        if self.node.clock.now < NOW + 3 * _SPREAD_MS:
            self.after(rng.choice((900, 1_000, 2_500)), f"{name} tells", partial(self._peer_tells, name))

    def _own_tells(self) -> None:
        self.node.say()
        self.node.looks()
        if self.node.clock.now < NOW + 3 * _SPREAD_MS:
            self.after(1_000, "own state", self._own_tells)

    def _sweep(self) -> None:
        self.node.sweeps()
        if self.node.clock.now < NOW + _LAST_MS:
            self.after(1_000 if self.node.clock.now < NOW + 2 * _SPREAD_MS else 30_000, "sweep", self._sweep)


def _event(number: int, timings: dict[str, Any] | None) -> bytes:
    told: dict[str, Any] = {
        "choices": [{"index": 0, "delta": {"content": f"w{number}"}, "finish_reason": None}]
    }
    if timings is not None:
        told = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": timings}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def world(label: str) -> list[dict[str, Any]]:
    """Every step of the lives in one world."""

    async def lived() -> list[dict[str, Any]]:
        """Within a loop, which never gets a turn: what is put off until later is settled by the driver."""
        return Driver(label).run()

    return asyncio.run(lived())


LIVES: Final = Net(
    name="lives",
    about="500 random request lives, step by step: what happened, what was done about it, the books",
    labels=lambda: [f"{number:02}" for number in range(WORLDS)],
    run=world,
    whole=100,
)
