"""How ``select`` turns token log-probabilities into a choice.

Every option is scored from one common token boundary, so the methods compare like with like. A method only
defines scores and the winner; probabilities are softmax(scores / temperature) for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trellis.errors import BackendError, InvalidRequestError
from trellis.frontend.backends.base import OptionScore

Options = Sequence[OptionScore]


@dataclass(frozen=True)
class ChoiceMethod:
    """score: the options with their token log-probabilities → one score each. pick: index of the winner, given the
    options and their scores. samples: whether drawing by temperature makes sense. unconditional: the options' tokens
    are to be scored without the prompt as well (``OptionScore.unconditional``)."""

    name: str
    score: Callable[[Options], list[float]]
    pick: Callable[[Options, Sequence[float]], int]
    samples: bool = True
    unconditional: bool = False


@dataclass(frozen=True)
class Decision:
    """index of the chosen option; scores and probabilities (they add up to 1) in the order of the options."""

    index: int
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]


def _mean(options: Options) -> list[float]:
    return [math.fsum(option.logprobs) / len(option.logprobs) for option in options]


def _sum(options: Options) -> list[float]:
    return [math.fsum(option.logprobs) for option in options]


def _first_best(_options: Options, scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _greedy(options: Options, means: Sequence[float]) -> int:
    """Column by column, keep the options with the best token; a shorter option goes on at its own mean."""
    rows = [option.logprobs for option in options]
    remaining = list(range(len(rows)))
    for column in range(max(len(row) for row in rows)):
        values = {i: rows[i][column] if column < len(rows[i]) else means[i] for i in remaining}
        best = max(values.values())
        remaining = [i for i in remaining if values[i] == best]
        if len(remaining) == 1:
            break
    return remaining[0]


def _unconditional(options: Options) -> list[float]:
    """Mean of what the prompt adds to each token's log-probability (pointwise mutual information; Holtzman et al. 2021,
    arXiv:2104.08315). A token that cannot come even without the prompt says nothing."""
    scores = []
    for index, option in enumerate(options):
        if option.unconditional is None or len(option.unconditional) != len(option.logprobs):
            raise BackendError(
                f"the backend gave no unconditional log-probabilities of option {index} of a select"
            )
        gains = [
            given - (alone if alone > -math.inf else 0.0)
            for given, alone in zip(option.logprobs, option.unconditional, strict=True)
        ]
        scores.append(math.fsum(gains) / len(gains))
    return scores


def _exact(options: Options) -> list[float]:
    """The log-probability of each option if the model wrote token by token, at temperature 1, with a mask that leaves
    it only the options' own tokens.

    At each token the probabilities of the tokens that some option goes on with are divided by their sum. Where one
    option ends and others go on, it gets what their tokens leave of 1. So the probabilities of all options add up
    to 1, and no option gains by being long, or by having many like it.
    """
    following: dict[tuple[int, ...], dict[int, float]] = {}
    ends = {option.token_ids for option in options}
    for option in options:
        for i, (token, logprob) in enumerate(zip(option.token_ids, option.logprobs, strict=True)):
            # What several options say of the same token differs by rounding at most: the first counts.
            following.setdefault(option.token_ids[:i], {}).setdefault(token, logprob)
    totals = {path: _log_sum(tokens.values()) for path, tokens in following.items()}
    scores = []
    for option in options:
        score = 0.0
        for i, token in enumerate(option.token_ids):
            path = option.token_ids[:i]
            logprob = following[path][token]
            score += logprob if path in ends else _share(logprob, totals[path], len(following[path]))
        if option.token_ids in following:
            rest = -math.expm1(min(0.0, totals[option.token_ids]))
            score += math.log(rest) if rest > 0 else -math.inf
        scores.append(score)
    return scores


def _log_sum(logprobs: Iterable[float]) -> float:
    values = list(logprobs)
    top = max(values)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(value - top) for value in values))


def _share(logprob: float, total: float, count: int) -> float:
    """If none of the tokens can come, all of them are alike."""
    return -math.log(count) if total == -math.inf else logprob - total


MEAN = ChoiceMethod("mean", _mean, _first_best)
SUM = ChoiceMethod("sum", _sum, _first_best)
GREEDY = ChoiceMethod("greedy", _mean, _greedy, samples=False)
UNCONDITIONAL = ChoiceMethod("unconditional", _unconditional, _first_best, unconditional=True)
EXACT = ChoiceMethod("exact", _exact, _first_best)
_METHODS = {method.name: method for method in (MEAN, SUM, GREEDY, UNCONDITIONAL, EXACT)}
_OTHER_NAMES = {  # those of the original system
    "token_length_normalized": MEAN,
    "greedy_token_selection": GREEDY,
    "unconditional_likelihood_normalized": UNCONDITIONAL,
}


def choice_method(method: str | ChoiceMethod) -> ChoiceMethod:
    """A method by name. InvalidRequestError for an unknown one."""
    if isinstance(method, ChoiceMethod):
        return method
    found = {**_METHODS, **_OTHER_NAMES}.get(method) if isinstance(method, str) else None
    if found is None:
        known = ", ".join(repr(name) for name in _METHODS)
        raise InvalidRequestError("select.method", f"unknown method {method!r}; known: {known}")
    return found


def softmax(scores: Sequence[float], temperature: float = 1.0) -> tuple[float, ...]:
    """exp(score / temperature), normalised. Scores of -inf get 0; if all are -inf, all are equal."""
    top = max(scores)
    if top == -math.inf:
        return tuple(1.0 / len(scores) for _ in scores)
    weights = [math.exp((score - top) / temperature) for score in scores]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def decide(
    method: ChoiceMethod, options: Options, temperature: float = 0.0, seed: int | None = None
) -> Decision:
    """Choose. Ties go to the first. BackendError if an option came back without tokens."""
    for index, option in enumerate(options):
        if not option.logprobs:
            raise BackendError(f"the backend scored no token of option {index} of a select")
    scores = method.score(options)
    probabilities = softmax(scores, temperature or 1.0)
    if temperature > 0:
        import random

        index = random.Random(seed).choices(range(len(options)), weights=probabilities)[0]
    else:
        index = method.pick(options, scores)
    return Decision(index, tuple(scores), probabilities)
