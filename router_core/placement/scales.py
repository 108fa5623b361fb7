"""How far priors were off where something was measured, so that an untried row is judged by what its like turned out
to be.

Rules: a prior is scaled by the median of measured / expected over the rows of its model, else over all rows, else not
at all. Scales move in steps of 5 %, so that a small change rebuilds no rows. Refuses to know single nodes.
"""

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct

from router_core.placement.rows import Draft
from router_core.policy.profile import ProfilePolicy
from router_core.profile.priors import Prior, calibration
from router_core.profile.profiles import Profiles

_STEP = math.log(1.05)
_KINDS = ("prompt", "gen", "load")


class Scales(Struct, frozen=True, kw_only=True):
    """Factors on priors, by kind, then by model; ``over_all`` where a model has none."""

    by_model: Mapping[str, Mapping[str, float]]
    over_all: Mapping[str, float]

    def scaled(self, draft: Draft) -> Prior:
        """The prior of ``draft``, corrected."""
        prompt, gen, load = (
            self.by_model[kind].get(draft.group, self.over_all.get(kind, 1.0)) for kind in _KINDS
        )
        prior = draft.prior
        return Prior(prompt=prior.prompt * prompt, gen=prior.gen * gen, load_s=prior.load_s * load)


def scales_of(drafts: Iterable[Draft], profiles: Profiles) -> Scales:
    """The scales that ``profiles`` suggest for these rows."""
    ratios: dict[str, dict[str, list[float]]] = {kind: {} for kind in _KINDS}
    for draft in drafts:
        profile = profiles.find(draft.profile_key)
        if profile is None:
            continue
        prior = draft.prior
        load_s = profile.loads_s[-1] if profile.loads_s else None
        measured = (
            (profile.prompt.value, prior.prompt),
            (profile.gen.value, prior.gen),
            (load_s, prior.load_s),
        )
        for kind, (told, expected) in zip(_KINDS, measured, strict=True):
            if told is not None:
                ratios[kind].setdefault(draft.group, []).append(told / expected)
    policy = profiles.policy
    return Scales(
        by_model={
            kind: {group: _stepped(found, policy) for group, found in groups.items()}
            for kind, groups in ratios.items()
        },
        over_all={
            kind: _stepped([ratio for found in groups.values() for ratio in found], policy)
            for kind, groups in ratios.items()
            if groups
        },
    )


def _stepped(ratios: list[float], policy: ProfilePolicy) -> float:
    exact = calibration(ratios, policy)
    return math.exp(round(math.log(exact) / _STEP) * _STEP) if exact is not None else 1.0
