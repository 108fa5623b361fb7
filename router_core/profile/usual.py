"""What a usual request of a model is: the mean sizes of those that were served.

It does not predict how large a single request will be.
"""

from msgspec import Struct

from router_core.policy.profile import ProfilePolicy


class Usual(Struct, frozen=True, gc=False, kw_only=True):
    """Mean tokens of prompts and of answers, each over its own number of samples, a guess to begin with among them."""

    prompt: float
    output: float
    prompts: int = 0
    outputs: int = 0


def usual_of(policy: ProfilePolicy) -> Usual:
    """What is taken for usual before anything was served."""
    return Usual(prompt=policy.usual_prompt_tokens, output=policy.usual_output_tokens)


def fold_usual(usual: Usual, prompt: int | None, output: int | None, policy: ProfilePolicy) -> Usual:
    """``usual`` after one more answer; a size that was not told is None. A prompt without an answer, as of embeddings,
    is told as such: its answer has no tokens."""
    if prompt is None:
        return usual if output is None else _with_output(usual, output, policy)
    usual = _with_output(usual, output or 0, policy)
    step = _weight(usual.prompts, policy) * (prompt - usual.prompt)
    return Usual(
        prompt=usual.prompt + step,
        output=usual.output,
        prompts=usual.prompts + 1,
        outputs=usual.outputs,
    )


def _with_output(usual: Usual, output: int, policy: ProfilePolicy) -> Usual:
    step = _weight(usual.outputs, policy) * (output - usual.output)
    return Usual(
        prompt=usual.prompt,
        output=usual.output + step,
        prompts=usual.prompts,
        outputs=usual.outputs + 1,
    )


def _weight(samples: int, policy: ProfilePolicy) -> float:
    """A plain mean at first, the guess among its values; the last ``usual_kept`` or so count in the end."""
    return max(1.0 / policy.usual_kept, 1.0 / (samples + 1 + policy.usual_weight))
