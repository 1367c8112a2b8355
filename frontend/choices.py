"""How ``select`` turns token log-probabilities into a choice.

Every option is scored from one common token boundary, so the methods compare like with like. A method only
defines scores and the winner; probabilities are softmax(scores / temperature) for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trellis.errors import BackendError, InvalidRequestError
from trellis.frontend.backends.base import OptionScore

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True)
class ChoiceMethod:
    """score: token log-probabilities of each option → one score each. pick: index of the winner, given the
    log-probabilities and the scores. samples: whether drawing by temperature makes sense."""

    name: str
    score: Callable[[Rows], list[float]]
    pick: Callable[[Rows, Sequence[float]], int]
    samples: bool = True


@dataclass(frozen=True)
class Decision:
    """index of the chosen option; scores and probabilities (they add up to 1) in the order of the options."""

    index: int
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]


def _mean(rows: Rows) -> list[float]:
    return [math.fsum(row) / len(row) for row in rows]


def _sum(rows: Rows) -> list[float]:
    return [math.fsum(row) for row in rows]


def _first_best(_rows: Rows, scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _greedy(rows: Rows, means: Sequence[float]) -> int:
    """Column by column, keep the options with the best token; a shorter option goes on at its own mean."""
    remaining = list(range(len(rows)))
    for column in range(max(len(row) for row in rows)):
        values = {i: rows[i][column] if column < len(rows[i]) else means[i] for i in remaining}
        best = max(values.values())
        remaining = [i for i in remaining if values[i] == best]
        if len(remaining) == 1:
            break
    return remaining[0]


MEAN = ChoiceMethod("mean", _mean, _first_best)
SUM = ChoiceMethod("sum", _sum, _first_best)
GREEDY = ChoiceMethod("greedy", _mean, _greedy, samples=False)
_METHODS = {method.name: method for method in (MEAN, SUM, GREEDY)}


def choice_method(method: str | ChoiceMethod) -> ChoiceMethod:
    """A method by name. InvalidRequestError for an unknown one."""
    if isinstance(method, ChoiceMethod):
        return method
    found = _METHODS.get(method)
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
    method: ChoiceMethod, options: Sequence[OptionScore], temperature: float = 0.0, seed: int | None = None
) -> Decision:
    """Choose. Ties go to the first. BackendError if an option came back without tokens."""
    rows = [option.logprobs for option in options]
    for index, row in enumerate(rows):
        if not row:
            raise BackendError(f"the backend scored no token of option {index} of a select")
    scores = method.score(rows)
    probabilities = softmax(scores, temperature or 1.0)
    if temperature > 0:
        import random

        index = random.Random(seed).choices(range(len(rows)), weights=probabilities)[0]
    else:
        index = method.pick(rows, scores)
    return Decision(index, tuple(scores), probabilities)
