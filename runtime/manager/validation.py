"""Sampling parameters as clients send them → ``SamplingParams`` whose every value is known to be good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trellis.errors import ConstraintError, InvalidRequestError
from trellis.fsm.search import search_pattern
from trellis.runtime.manager.constraints import read_constraint
from trellis.runtime.manager.fields import Fields, kind_of
from trellis.runtime.messages import Constraint, SamplingParams

MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 256
MAX_STOP_PATTERNS = 16
MAX_CALL_PATTERNS = 32  # different ones, in all the sampling parameters of one call
MAX_LOGIT_BIASES = 4096
MAX_SAMPLES = 128
MAX_INTEGER = (1 << 31) - 1
MAX_TEMPERATURE = 100.0  # beyond it there is only noise, and dividing by it loses what logits differ in
MIN_REPETITION_PENALTY = 0.01  # logits divided by less leave the range of float32
GREEDY_BELOW = 1e-6  # a temperature this small divides logits beyond what floats can tell apart

_SEED_LIMIT = 1 << 63
_DEFAULTS = SamplingParams()
_ELSEWHERE = {
    "ebnf": "give it as grammar",
    "structural_tag": "constraints of this server are regex, choices, json_schema and grammar",
    "no_stop_trim": "the stop string is always cut from the text",
    "custom_params": "there are no custom logit processors in this server",
    "stream_interval": "every step is streamed",
    "beam_width": "there is no beam search in this server",
}


@dataclass(frozen=True)
class SamplingRequest:
    """n: how many samples of the same prompt."""

    params: SamplingParams
    constraint: Constraint | None = None
    n: int = 1


def parse_sampling_params(raw: Any, vocab_size: int, path: str = "sampling_params") -> SamplingRequest:
    """The native ``sampling_params`` object; None is all defaults.

    Raises InvalidRequestError for a wrong type or range, an unknown name (with the nearest known one), and
    for features of other systems that this one does not have.
    """
    fields = Fields({} if raw is None else raw, path)
    params = read_params(fields, vocab_size)
    request = SamplingRequest(params, read_constraint(fields), fields.integer("n", 1, 1, MAX_SAMPLES))
    # Byte-level texts never get blanks between special tokens, so both values mean the same.
    fields.boolean("spaces_between_special_tokens", True)
    for name, reason in _ELSEWHERE.items():
        fields.only(name, (False,), f"not supported: {reason}")
    fields.done()
    return request


def check_params(params: SamplingParams, vocab_size: int, path: str = "sampling_params") -> SamplingParams:
    """The same checks for values that a Python caller put together."""
    fields = Fields(msgspec.structs.asdict(params), path)
    checked = read_params(fields, vocab_size)
    fields.done()
    return checked


def read_params(
    fields: Fields,
    vocab_size: int,
    names: Mapping[str, str] | None = None,
    max_new_tokens: int = _DEFAULTS.max_new_tokens,
) -> SamplingParams:
    """SamplingParams out of an object; names maps our name to the client's where they differ.

    max_new_tokens: the default.
    """
    name = {**{field: field for field in SamplingParams.__struct_fields__}, **(names or {})}
    new = fields.integer(name["max_new_tokens"], max_new_tokens, 0, MAX_INTEGER)
    least = fields.integer(name["min_new_tokens"], _DEFAULTS.min_new_tokens, 0, MAX_INTEGER)
    if least > new:
        raise fields.error(
            name["min_new_tokens"], f"must be at most {name['max_new_tokens']} ({new}), not {least}"
        )
    temperature = fields.number(name["temperature"], _DEFAULTS.temperature, 0.0, MAX_TEMPERATURE)
    return SamplingParams(
        max_new_tokens=new,
        min_new_tokens=least,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=fields.number(name["top_p"], _DEFAULTS.top_p, 0.0, 1.0, open_low=True),
        top_k=_top_k(fields, name["top_k"]),
        min_p=fields.number(name["min_p"], _DEFAULTS.min_p, 0.0, 1.0),
        frequency_penalty=fields.number(name["frequency_penalty"], 0.0, -2.0, 2.0),
        presence_penalty=fields.number(name["presence_penalty"], 0.0, -2.0, 2.0),
        repetition_penalty=fields.number(name["repetition_penalty"], 1.0, MIN_REPETITION_PENALTY, 2.0),
        logit_bias=_logit_bias(fields, name["logit_bias"], vocab_size),
        stop=_stop_strings(fields, name["stop"]),
        stop_regex=_stop_patterns(fields, name["stop_regex"]),
        stop_token_ids=_stop_tokens(fields, name["stop_token_ids"], vocab_size),
        ignore_eos=fields.boolean(name["ignore_eos"], _DEFAULTS.ignore_eos),
        skip_special_tokens=fields.boolean(name["skip_special_tokens"], _DEFAULTS.skip_special_tokens),
        seed=fields.integer(name["seed"], None, -_SEED_LIMIT, _SEED_LIMIT - 1),
    )


def _top_k(fields: Fields, name: str) -> int:
    value = fields.integer(name, _DEFAULTS.top_k, -1, MAX_INTEGER)
    if value == 0:
        raise fields.error(name, "must be -1 (off) or at least 1, not 0")
    return value


def _stop_strings(fields: Fields, name: str) -> list[str]:
    raw = fields.get(name)
    stops = _one_or_more(fields, name, MAX_STOP_STRINGS)
    for i, each in enumerate(stops):
        place = name if isinstance(raw, str) else f"{name}[{i}]"
        if fields.check_string(each, place, MAX_STOP_CHARACTERS) == "":
            raise fields.error(place, "must not be empty: every text has the empty string in it")
    return stops


def _one_or_more(fields: Fields, name: str, limit: int) -> list[Any]:
    raw = fields.get(name)
    if raw is not None and not isinstance(raw, (str, list, tuple)):
        raise fields.error(name, f"must be a string or a list of strings, not {kind_of(raw)}")
    return [raw] if isinstance(raw, str) else fields.elements(name, limit)


def _stop_patterns(fields: Fields, name: str) -> list[str]:
    raw = fields.get(name)
    patterns = _one_or_more(fields, name, MAX_STOP_PATTERNS)
    for i, each in enumerate(patterns):
        place = name if isinstance(raw, str) else f"{name}[{i}]"
        try:
            search_pattern(fields.check_string(each, place))
        except ConstraintError as error:
            raise fields.error(place, str(error).removeprefix(f"{error.kind}: ")) from None
    return patterns


def compiles_patterns(raw: Any) -> bool:
    """Whether checking this body means compiling patterns, which takes up to half a second."""
    if not isinstance(raw, Mapping):
        return False
    params = raw.get("sampling_params")
    places = [raw, *(params if isinstance(params, list) else [params])]
    return any(isinstance(each, Mapping) and each.get("stop_regex") is not None for each in places)


def check_patterns(raw: Sequence[Any], path: str) -> None:
    """Refuse more stop patterns than a call may have, before the first is compiled. raw: the ``sampling_params`` of its
    prompts, as they came. Raises InvalidRequestError."""
    distinct: set[str] = set()
    for each in raw:
        given = each.get("stop_regex") if isinstance(each, Mapping) else None
        distinct.update(p for p in (given if isinstance(given, list) else [given]) if isinstance(p, str))
    if len(distinct) > MAX_CALL_PATTERNS:
        reason = (
            f"have {len(distinct)} different stop_regex patterns; one request may have {MAX_CALL_PATTERNS}"
        )
        raise InvalidRequestError(path, reason)


def _stop_tokens(fields: Fields, name: str, vocab_size: int) -> list[int]:
    ids = fields.elements(name, MAX_STOP_TOKENS)
    return [fields.check_integer(each, f"{name}[{i}]", 0, vocab_size - 1) for i, each in enumerate(ids)]


def _logit_bias(fields: Fields, name: str, vocab_size: int) -> dict[int, float]:
    raw = fields.get(name)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise fields.error(name, f"must be an object of token id to bias, not {kind_of(raw)}")
    if len(raw) > MAX_LOGIT_BIASES:
        raise fields.error(name, f"must have at most {MAX_LOGIT_BIASES} entries, not {len(raw)}")
    biases = {}
    for key, value in raw.items():
        text = str(key)[:20]
        if not (text.isascii() and text.isdigit() and int(text) < vocab_size):
            raise fields.error(name, f"key {text!r} is not a token id from 0 to {vocab_size - 1}")
        biases[int(text)] = fields.check_number(value, f"{name}.{text}", -100.0, 100.0)
    return biases


def sample_seed(params: SamplingParams, sample: int) -> SamplingParams:
    """Parameters of the sample with this index: a seed that was given is varied, or all would be the same."""
    if params.seed is None or sample == 0:
        return params
    seed = (params.seed + sample + _SEED_LIMIT) % (2 * _SEED_LIMIT) - _SEED_LIMIT
    return msgspec.structs.replace(params, seed=seed)
