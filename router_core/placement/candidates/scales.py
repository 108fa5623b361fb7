"""How far priors were off where something was measured, so that an untried row is judged by what its like turned out
to be.

Rules: a prior is scaled by the median of measured / expected over the rows of its model in the same quantisation on the
same kind of GPU, else over those of its model, else over all rows, else not at all. How long a load takes is a matter of
the disk: there the other loads of some size at the same endpoint come first, and of these the slowest quarter is expected.
Scales move in steps of 5 %, so that a small change rebuilds no rows.
"""

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct

from router_core.placement.candidates.candidate import Draft
from router_core.placement.request.request import Endpoint
from router_core.policy.profile import ProfilePolicy
from router_core.profile.estimate import quantile
from router_core.profile.priors import Prior, calibration
from router_core.profile.profiles import Profiles

_STEP = math.log(1.05)
_SLOW = 0.75
_TELLING_S = 1.0
"""What should be loaded sooner tells how long the engine takes to start, not how slow the disk is."""
_KINDS = ("prompt", "gen", "load")

Like = tuple[str | None, ...]
"""What rows have in common: model, quantisation and names of GPUs; the model; nothing."""


class Scales(Struct, frozen=True, kw_only=True):
    """Factors on priors, by kind, then by what rows have in common; on load times also by endpoint."""

    of: Mapping[str, Mapping[Like, float]]
    loads: Mapping[Endpoint, float]

    def scaled(self, draft: Draft) -> Prior:
        """The prior of ``draft``, corrected by the rows most like it."""
        likes = _likes(draft)
        prompt, gen, load = (_nearest(likes, self.of[kind]) for kind in _KINDS)
        load, prior = self.loads.get(draft.key, load), draft.prior
        return Prior(prompt=prior.prompt * prompt, gen=prior.gen * gen, load_s=prior.load_s * load)


def scales_of(drafts: Iterable[Draft], profiles: Profiles) -> Scales:
    """The scales that ``profiles`` suggest for these rows."""
    ratios: dict[str, dict[Like, list[float]]] = {kind: {} for kind in _KINDS}
    loads: dict[Endpoint, list[float]] = {}
    for draft in drafts:
        profile = profiles.find(draft.profile_key)
        if profile is None:
            continue
        prior = draft.prior
        for seconds in profile.loads_s if prior.load_s >= _TELLING_S else ():
            loads.setdefault(draft.key, []).append(seconds / prior.load_s)
        load_s = profile.loads_s[-1] if profile.loads_s else None
        measured = (
            (profile.prompt.value, prior.prompt),
            (profile.gen.value, prior.gen),
            (load_s, prior.load_s),
        )
        likes = _likes(draft)
        for kind, (told, expected) in zip(_KINDS, measured, strict=True):
            if told is not None:
                for like in likes:
                    ratios[kind].setdefault(like, []).append(told / expected)
    return Scales(
        of={
            kind: {like: _stepped(found, profiles.policy, alike=bool(like)) for like, found in likes.items()}
            for kind, likes in ratios.items()
        },
        loads={endpoint: _step(quantile(tuple(found), _SLOW)) for endpoint, found in loads.items()},
    )


def _likes(draft: Draft) -> tuple[Like, ...]:
    """From the rows most like ``draft`` to all; a host that computes without GPU is like no other in particular."""
    gpus = draft.static.gpus
    names = [gpus[index].name for index in draft.engine.gpus if index < len(gpus)]
    alike = (draft.group, draft.model.quant, *sorted(names))
    return (alike, (draft.group,), ()) if names else ((draft.group,), ())


def _nearest(likes: tuple[Like, ...], scales: Mapping[Like, float]) -> float:
    return next((scales[like] for like in likes if like in scales), 1.0)


def _stepped(ratios: list[float], policy: ProfilePolicy, *, alike: bool) -> float:
    exact = calibration(ratios, policy, alike=alike)
    return _step(exact) if exact is not None else 1.0


def _step(exact: float) -> float:
    return math.exp(round(math.log(exact) / _STEP) * _STEP)
