"""All profiles this node holds, bounded, with the fallbacks of a look-up.

Owns: profiles by configuration, bytes per prompt token and usual sizes by model, output lengths by model and class. Rules: every
table forgets its least recently used entry at its ceiling; time comes from the outcomes. It knows nothing of
files: a profile leaves and returns as opaque bytes.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

import msgspec

from router_core.errors import RemoteFault
from router_core.ids import Id16
from router_core.policy.profile import ProfilePolicy
from router_core.profile.estimate import rank
from router_core.profile.learn import Profile, learn
from router_core.profile.outcome import Outcome, ProfileKey, Result
from router_core.profile.usual import Usual, fold_usual, usual_of

_Place = tuple[bytes, str, str, str | None, int | None]


class _Outputs:
    """The last output lengths of one model and class, in tokens, as they came and in order, and a high quantile of them:
    it is asked for once per request and learned once per answer."""

    __slots__ = ("_ranked", "_seen", "high")

    def __init__(self) -> None:
        self.high = 0
        self._seen: deque[int] = deque()
        self._ranked: list[int] = []

    def add(self, tokens: int, policy: ProfilePolicy) -> None:
        seen, ranked = self._seen, self._ranked
        if len(seen) >= policy.outputs_kept:
            del ranked[bisect_left(ranked, seen.popleft())]
        seen.append(tokens)
        insort(ranked, tokens)
        self.high = ranked[rank(len(ranked), policy.output_quantile)]


class Profiles:
    """``learn`` outcomes, ``find`` what they taught. ``gen`` rises with every change."""

    def __init__(self, policy: ProfilePolicy) -> None:
        self.policy = policy
        self.gen = 0
        self._profiles: dict[ProfileKey, Profile] = {}
        self._places: dict[_Place, dict[ProfileKey, None]] = {}
        self._changed_at: dict[Id16, int] = {}
        self._bytes_per_token: dict[str, float] = {}
        self._outputs: dict[tuple[str, str], _Outputs] = {}
        self._usual: dict[str, Usual] = {}
        self._unseen = usual_of(policy)

    def __len__(self) -> int:
        return len(self._profiles)

    def items(self) -> Iterator[tuple[ProfileKey, Profile]]:
        """All profiles, least recently used first."""
        return iter(self._profiles.items())

    def learn(self, outcome: Outcome) -> Profile:
        """Fold one outcome in; return the profile it changed."""
        old = self._profiles.get(outcome.key) or Profile(at_ms=outcome.at_ms)
        profile = learn(old, outcome, self.policy)
        self._put(outcome.key, profile)
        self._learn_sizes(outcome)
        return profile

    def restore(self, key: ProfileKey, profile: Profile) -> None:
        """Take over a profile from an earlier process life; what was learned since wins."""
        if key not in self._profiles:
            self._put(key, profile)

    def find(self, key: ProfileKey) -> Profile | None:
        """The profile of ``key``; else of the same model there, with another parallelism, then another context."""
        exact = self._profiles.get(key)
        if exact is not None:
            return exact
        near = self._places.get(_place(key))
        if not near:
            return None
        latest = list(near)[::-1]
        best = next((other for other in latest if other.ctx == key.ctx), latest[0])
        return self._profiles[best]

    def changed_at(self, node: Id16) -> int:
        """The generation in which a profile of ``node`` changed last, 0 if none did."""
        return self._changed_at.get(node, 0)

    def bytes_per_token(self, model: str) -> float:
        """Prompt bytes per token of ``model``, as engines reported, else the policy's."""
        return self._bytes_per_token.get(model, self.policy.bytes_per_token)

    def output_tokens(self, model: str, request_class: str) -> int | None:
        """A high quantile of the last outputs of this model and class; None before the first."""
        outputs = self._outputs.get((model, request_class))
        return None if outputs is None else outputs.high

    def usual(self, model: str) -> Usual:
        """What a usual request of ``model`` is, by those that were served; a guess before the first."""
        return self._usual.get(model, self._unseen)

    def _put(self, key: ProfileKey, profile: Profile) -> None:
        self.gen += 1
        self._changed_at.pop(key.node, None)
        self._changed_at[key.node] = self.gen
        if len(self._changed_at) > self.policy.profiles_kept:
            del self._changed_at[next(iter(self._changed_at))]
        self._profiles.pop(key, None)
        self._profiles[key] = profile
        near = self._places.setdefault(_place(key), {})
        near.pop(key, None)
        near[key] = None
        if len(self._profiles) > self.policy.profiles_kept:
            oldest = next(iter(self._profiles))
            del self._profiles[oldest]
            place = _place(oldest)
            del self._places[place][oldest]
            if not self._places[place]:
                del self._places[place]

    def _learn_sizes(self, outcome: Outcome) -> None:
        if outcome.result is not Result.OK:
            return
        policy, model = self.policy, outcome.key.model
        tokens = (outcome.prompt_tokens or 0) + (outcome.cached_tokens or 0)
        if outcome.prompt_tokens is not None and tokens >= policy.least_counted_tokens and outcome.text_bytes:
            known = self._bytes_per_token.pop(model, policy.bytes_per_token)
            sample = outcome.text_bytes / tokens
            folded = known + policy.rate * (sample - known)
            self._bytes_per_token[model] = min(
                policy.bytes_per_token_most, max(policy.bytes_per_token_least, folded)
            )
            if len(self._bytes_per_token) > policy.names_kept:
                del self._bytes_per_token[next(iter(self._bytes_per_token))]
        told = outcome.prompt_tokens is not None
        usual = self._usual.pop(model, self._unseen)
        self._usual[model] = fold_usual(usual, tokens if told else None, outcome.gen_tokens, policy)
        if len(self._usual) > policy.names_kept:
            del self._usual[next(iter(self._usual))]
        if outcome.gen_tokens is not None and outcome.request_class is not None:
            slot = (model, outcome.request_class)
            outputs = self._outputs.pop(slot) if slot in self._outputs else _Outputs()
            outputs.add(outcome.gen_tokens, policy)
            self._outputs[slot] = outputs
            if len(self._outputs) > policy.names_kept:
                del self._outputs[next(iter(self._outputs))]


def _place(key: ProfileKey) -> _Place:
    return (key.node, key.endpoint, key.model, key.quant, key.offload_pct)


def encode_profile(key: ProfileKey, profile: Profile) -> bytes:
    """One profile as bytes for a store."""
    return msgspec.msgpack.encode((key, profile))


def decode_profile(data: bytes, now: int) -> tuple[ProfileKey, Profile]:
    """A stored profile. Its clock starts anew at ``now``: the boot clock it was written under may be gone.

    Raises RemoteFault("profile") on anything else than what ``encode_profile`` writes.
    """
    try:
        key, profile = msgspec.msgpack.decode(data, type=tuple[ProfileKey, Profile])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteFault("profile", "not a stored profile") from error
    return key, msgspec.structs.replace(profile, at_ms=now)
