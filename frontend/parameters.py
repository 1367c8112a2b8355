"""Sampling parameters: checked where they are written, immutable from there on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from trellis.errors import InvalidRequestError
from trellis.frontend.backends.base import SamplingOptions

Checker = Callable[[str, Any], Any]


def _integer(low: int, also: int | None = None) -> Checker:
    def check(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InvalidRequestError(where, f"must be an integer, got {value!r}")
        if value < low and value != also:
            extra = f" or {also}" if also is not None else ""
            raise InvalidRequestError(where, f"must be at least {low}{extra}, got {value}")
        return int(value)

    return check


def _number(low: float, high: float = math.inf, *, open_low: bool = False) -> Checker:
    def check(where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidRequestError(where, f"must be a number, got {value!r}")
        number = float(value)
        too_low = number <= low if open_low else number < low
        if not math.isfinite(number) or too_low or number > high:
            top = f" and at most {high:g}" if high < math.inf else ""
            bound = f"more than {low:g}" if open_low else f"at least {low:g}"
            raise InvalidRequestError(where, f"must be finite, {bound}{top}, got {value!r}")
        return number

    return check


def _boolean(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(where, f"must be True or False, got {value!r}")
    return value


def _strings(where: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    if items is None or not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(where, f"must be a string or a list of strings, got {value!r}")
    if "" in items:
        raise InvalidRequestError(where, "an empty string would stop at once; leave it out")
    return items


def _patterns(where: str, value: Any) -> tuple[str, ...]:
    patterns = _strings(where, value)
    for pattern in patterns:
        try:
            matches_nothing = re.compile(pattern).fullmatch("") is not None
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidRequestError(where, f"{error} in {pattern!r}") from error
        if matches_nothing:
            raise InvalidRequestError(where, f"{pattern!r} matches the empty text, so it would stop at once")
    return patterns


def _biases(where: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(where, f"must be a dict of token id to bias, got {value!r:.100}")
    check_id, check_bias = _integer(0), _number(-100, 100)
    return tuple(
        (check_id(f"{where}: the key", token), check_bias(f"{where}[{token!r}]", bias))
        for token, bias in value.items()
    )


def _token_ids(where: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(where, f"must be a list of token ids, got {value!r}")
    return tuple(_integer(0)(where, item) for item in value)


_CHECKS: Mapping[str, Checker] = {
    "max_new_tokens": _integer(0),
    "min_new_tokens": _integer(0),
    "temperature": _number(0),
    "top_p": _number(0, 1, open_low=True),
    "top_k": _integer(1, also=-1),
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 2, open_low=True),
    "stop": _strings,
    "stop_regex": _patterns,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "logit_bias": _biases,
    "seed": _integer(0),
}
SAMPLING_NAMES = tuple(_CHECKS)
_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


def check_sampling(
    owner: str, values: Mapping[str, Any], spelled: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The given values (None = not given), checked and made immutable.

    owner: ``gen`` or ``run``, for messages. ``gen`` calls two of the fields ``max_tokens`` and ``min_tokens``;
    spelled: what else a field was called.
    """
    checked = {}
    for name, value in values.items():
        if value is None:
            continue
        written = name.replace("_new_tokens", "_tokens") if owner == "gen" else name
        checked[name] = _CHECKS[name](f"{owner}.{spelled.get(name, written)}", value)
    low, high = checked.get("min_new_tokens"), checked.get("max_new_tokens")
    if low is not None and high is not None and low > high:
        raise InvalidRequestError(f"{owner}.min_tokens", f"{low} is more than max_tokens = {high}")
    return checked


def check_timeout(owner: str, value: Any, name: str = "timeout") -> float | None:
    return None if value is None else _number(0, open_low=True)(f"{owner}.{name}", value)


def check_count(where: str, value: Any) -> int | None:
    return None if value is None else _integer(0)(where, value)


def check_samples(where: str, value: Any) -> int:
    return 1 if value is None else int(_integer(1)(where, value))


def check_logprobs(owner: str, logprobs: Any, flag: Any, top: Any) -> tuple[bool | None, int | None]:
    """(return_logprob, top_logprobs_num), None where nothing is said. logprobs: the other way to say both."""
    if logprobs is None:
        return check_flag(f"{owner}.return_logprob", flag), check_count(f"{owner}.top_logprobs_num", top)
    if flag is not None or top is not None:
        other = "return_logprob" if flag is not None else "top_logprobs_num"
        raise InvalidRequestError(
            f"{owner}.logprobs", f"says the same as {other}, which is given too; give one"
        )
    if isinstance(logprobs, bool):
        return logprobs, None if logprobs else 0
    if isinstance(logprobs, int) and logprobs >= 0:
        return True, logprobs
    raise InvalidRequestError(
        f"{owner}.logprobs", f"must be True, False, or a number of alternatives, got {logprobs!r}"
    )


def check_flag(where: str, value: Any) -> bool | None:
    return None if value is None else _boolean(where, value)


@dataclass(frozen=True)
class RunOptions:
    """What ``run`` may be told besides the program's own arguments.

    sampling: defaults of every gen that does not say otherwise. timeout: seconds for the whole program.
    num_api_spec_tokens: see ``Program.run``. given: the names of what was told, even if it is the default.
    """

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_healing: bool = True
    num_api_spec_tokens: int = 0
    timeout: float | None = None
    stream: bool = False
    backend: Any = None
    given: frozenset[str] = frozenset()

    def over(self, base: RunOptions) -> RunOptions:
        """``base``, with what was given here."""
        own = {name: getattr(self, name) for name in self.given - _CHECKS.keys()}
        sampling = {name: getattr(self.sampling, name) for name in self.given & _CHECKS.keys()}
        return replace(
            base, sampling=replace(base.sampling, **sampling), given=base.given | self.given, **own
        )

    def updated(self, values: Mapping[str, Any]) -> RunOptions:
        """A copy with the given options (a None leaves an option as it is)."""
        values, spelled = _without_aliases(values)
        values["return_logprob"], values["top_logprobs_num"] = check_logprobs(
            "run",
            values.pop("logprobs", None),
            values.get("return_logprob"),
            values.get("top_logprobs_num"),
        )
        sampling = check_sampling("run", {k: v for k, v in values.items() if k in _CHECKS}, spelled)
        others = {k: v for k, v in values.items() if k not in _CHECKS and v is not None}
        if "timeout" in others:
            others["timeout"] = check_timeout("run", others["timeout"])
        if "num_api_spec_tokens" in others:
            others["num_api_spec_tokens"] = check_count(
                "run.num_api_spec_tokens", others["num_api_spec_tokens"]
            )
        for flag in ("token_healing", "stream"):
            if flag in others:
                others[flag] = check_flag(f"run.{flag}", others[flag])
        given = self.given | sampling.keys() | others.keys()
        return replace(self, sampling=replace(self.sampling, **sampling), given=given, **others)


def _without_aliases(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(values by the names of ``SamplingOptions``, name → alias that was written instead). InvalidRequestError if
    both names of one are given."""
    plain = {name: value for name, value in values.items() if name not in _ALIASES}
    spelled = {}
    for alias, name in _ALIASES.items():
        if values.get(alias) is None:
            continue
        if plain.get(name) is not None:
            raise InvalidRequestError(f"run.{alias}", f"is the same as {name}, which is given too; give one")
        plain[name], spelled[name] = values[alias], alias
    return plain, spelled


RUN_OPTION_NAMES = (
    *SAMPLING_NAMES,
    *_ALIASES,
    "logprobs",
    "return_logprob",
    "top_logprobs_num",
    "token_healing",
    "num_api_spec_tokens",
    "timeout",
    "stream",
    "backend",
)
