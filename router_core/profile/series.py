"""A positive quantity learned in logarithms: exponentially weighted mean and spread, with a rule for outliers.

The first samples are averaged plainly until the weight of a new one has fallen to ``policy.rate``. The variance is the
exponentially weighted one of T. Finch, "Incremental calculation of weighted mean and variance" (2009). A sample beyond
``outlier_sds`` is rejected unless it is the ``outlier_streak``-th in a row on the same side: then the quantity itself
has changed for good, and what was learned before weighs as little as the two that were rejected would have.
"""

import math

from msgspec import Struct

from router_core.policy.profile import ProfilePolicy


class Series(Struct, frozen=True, gc=False, kw_only=True):
    """``n`` accepted samples, by weight, with ``mean`` and ``var`` of their logarithms; ``streak`` counts rejected ones,
    signed. ``before`` is how many of the ``n`` are from before the last lasting change."""

    n: float = 0
    mean: float = 0.0
    var: float = 0.0
    streak: float = 0
    before: float = 0

    @property
    def value(self) -> float | None:
        """The learned quantity itself, None without a sample."""
        return math.exp(self.mean) if self.n else None

    def spread(self, policy: ProfilePolicy) -> float:
        """Log standard deviation in [sd_least, sd_most], with fixed values while there are too few samples."""
        if self.n == 0:
            return policy.sd_untried
        if self.n - self.before < policy.few:
            return policy.sd_few
        return min(policy.sd_most, max(policy.sd_least, math.sqrt(self.var)))


EMPTY = Series()


def fold_sample(series: Series, sample: float, policy: ProfilePolicy, weight: float = 1) -> Series:
    """``series`` with one more positive, finite ``sample`` that counts ``weight`` (0..1); anything else leaves it as it
    is."""
    if not (sample > 0.0 and math.isfinite(sample) and weight > 0.0):
        return series
    x = math.log(sample)
    if series.n == 0:
        return Series(n=weight, mean=x)
    off, before = x - series.mean, series.before
    streak: float = 0
    if abs(off) > policy.outlier_sds * series.spread(policy):
        side = weight if off > 0 else -weight
        streak = series.streak + side if series.streak * side >= 0 else side
        if abs(streak) < policy.outlier_streak:
            return Series(n=series.n, mean=series.mean, var=series.var, streak=streak, before=before)
        before = max(before, series.n + weight - policy.outlier_streak)
    share = max(policy.rate * weight, weight / (series.n - before + weight))
    step = share * off
    return Series(
        n=series.n + weight,
        mean=series.mean + step,
        var=(1.0 - share) * (series.var + off * step),
        streak=streak,
        before=before,
    )


def contradicts(series: Series, value: float, policy: ProfilePolicy) -> bool:
    """True if as many samples as make a change believed lie too far from a positive ``value`` to be of it."""
    return series.n >= policy.outlier_streak and abs(
        math.log(value) - series.mean
    ) > policy.outlier_sds * series.spread(policy)


def shrunk(series: Series, towards: float, weight: float) -> float:
    """Mean of the samples and of ``weight`` pseudo-samples at ``towards``, taken in logarithms.

    Without samples and weight the answer is ``towards``.
    """
    total = series.n + weight
    if total <= 0.0:
        return towards
    return math.exp((series.n * series.mean + weight * math.log(towards)) / total)
