"""What a server answers, into the language's own structures. Nothing is taken on trust: whatever is on the other
end of a URL, a wrong answer is a BackendError that says which part of it is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from trellis.chat_format import STRIPS, Turn
from trellis.errors import BackendError
from trellis.frontend.backends.base import ChatFormat, Completion, Counts, ModelInfo, OptionScore, ScoreResult
from trellis.frontend.backends.errors import raise_for_finish
from trellis.frontend.backends.shown import shown

T = TypeVar("T")
D = TypeVar("D")
_MOST = 2**53  # the largest integer that every JSON reader keeps exact


class _Wrong(Exception):
    """Says where the answer is wrong, and what would be right."""


class _Object:
    """A JSON object of an answer. Null counts as missing; every getter raises _Wrong naming the place."""

    def __init__(self, value: Any, place: str = "") -> None:
        if not isinstance(value, dict):
            raise _Wrong(f"{place or 'it'} must be an object, got {shown(value)}")
        self.value = value
        self._place = place

    def place(self, name: str) -> str:
        return f"{self._place}.{name}" if self._place else name

    def get(self, name: str, read: Callable[[Any, str], T]) -> T:
        if self.value.get(name) is None:
            raise _Wrong(f"{self.place(name)} is missing")
        return read(self.value[name], self.place(name))

    def maybe(self, name: str, read: Callable[[Any, str], T], default: D) -> T | D:
        return default if self.value.get(name) is None else self.get(name, read)


def completion(answer: Any, url: str) -> Completion:
    """A whole answer of ``/generate``. Raises what its finish reason says, if the request did not end well."""
    with _checked(answer, url, "/generate"):
        whole = _Object(answer)
        meta = whole.get("meta_info", _Object)
        reason = meta.get("finish_reason", _Object)
        kind = reason.get("type", _text)
        raise_for_finish(kind, reason.maybe("message", _text, ""), reason.maybe("status", _count, 0) or None)
        text = whole.get("text", _text)
        ids = whole.maybe("output_ids", _each(_count), ())
        return Completion(
            text=text,
            token_ids=ids,
            finish_reason=kind,
            matched=reason.maybe("matched", _matched, None),
            counts=_counts(meta),
            kept_tokens=_kept(meta, ids),
            tail_text=_tail(meta, text),
            healed_characters=meta.maybe("healed_characters", _count, 0),
            truncated_tokens=meta.maybe("truncated_tokens", _count, 0),
            logprobs=meta.maybe("output_token_logprobs", _each(_entry), None),
            top_logprobs=meta.maybe("output_top_logprobs", _each(_alternatives), None),
            forced_spans=_spans(meta, text),
            grammar_engine=meta.maybe("grammar_engine", _text, None),
            validated_only=meta.maybe("validated_only", _each(_text), ()),
            constraint_warnings=meta.maybe("constraint_warnings", _each(_text), ()),
        )


def completions(answer: Any, url: str, n: int) -> list[Completion]:
    """An answer of ``/generate`` to a request for n samples."""
    if not isinstance(answer, list) or len(answer) != n:
        raise BackendError(f"{url}: the answer must be a list of {n} samples; it was {shown(answer, 200)}")
    return [completion(each, url) for each in answer]


def sample_index(answer: Any, url: str, n: int) -> int:
    """Which of n samples one event of a streamed ``/generate`` belongs to."""
    with _checked(answer, url, "/generate"):
        whole = _Object(answer)
        index = whole.get("index", _count)
        if index >= n:
            raise _Wrong(f"{whole.place('index')} is {index}, but {n} samples were asked for")
        return index


def progress(answer: Any, url: str) -> tuple[str, bool]:
    """(the text so far, whether it is all) of one event of a streamed ``/generate``."""
    with _checked(answer, url, "/generate"):
        whole = _Object(answer)
        meta = whole.maybe("meta_info", _Object, _Object({}))
        return whole.maybe("text", _text, ""), meta.value.get("finish_reason") is not None


def score_result(answer: Any, url: str, options: int) -> ScoreResult:
    """An answer of ``/score`` to a question about so many options."""
    with _checked(answer, url, "/score"):
        whole = _Object(answer)
        found = whole.get("options", _each(_option))
        if len(found) != options:
            raise _Wrong(f"options must have {options} entries, one an option, got {len(found)}")
        return ScoreResult(found, _counts(whole.maybe("meta_info", _Object, _Object({}))))


def model_info(answer: Any, url: str) -> ModelInfo:
    """An answer of ``/get_model_info``."""
    with _checked(answer, url, "/get_model_info"):
        whole = _Object(answer)
        return ModelInfo(
            whole.get("model_path", _text),
            whole.maybe("chat_format", _chat_format, ChatFormat()),
            whole.maybe("context_length", _count, None),
        )


@contextmanager
def _checked(answer: Any, url: str, route: str) -> Iterator[None]:
    try:
        yield
    except _Wrong as wrong:
        reason = f"{url}: the answer is not a {route} answer: {wrong}; it was {shown(answer, 200)}"
        raise BackendError(reason) from None


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _Wrong(f"{place} must be text, got {shown(value)}")
    return value


def _boolean(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise _Wrong(f"{place} must be true or false, got {shown(value)}")
    return value


def _count(value: Any, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise _Wrong(f"{place} must be an integer of at least 0, got {shown(value)}")
    return value


def _logprob(value: Any, place: str) -> float:
    """JSON has no infinity: null is a token that cannot come."""
    if value is None:
        return -math.inf
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not -1e300 <= value <= 1e300:  # neither NaN, nor an integer that is no float
        raise _Wrong(f"{place} must be a finite number or null, got {shown(value)}")
    return float(value)


def _each(read: Callable[[Any, str], T]) -> Callable[[Any, str], tuple[T, ...]]:
    """Reads a list, element by element."""

    def elements(value: Any, place: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _Wrong(f"{place} must be a list, got {shown(value)}")
        return tuple(read(one, f"{place}[{i}]") for i, one in enumerate(value))

    return elements


def _list_of(value: Any, place: str, least: int) -> list[Any]:
    if not isinstance(value, list) or len(value) < least:
        raise _Wrong(f"{place} must be a list of at least {least}, got {shown(value)}")
    return value


def _matched(value: Any, place: str) -> str | int:
    return value if isinstance(value, str) else _count(value, place)


def _entry(value: Any, place: str) -> float:
    """[logprob, token id, ...]"""
    return _logprob(_list_of(value, place, 1)[0], f"{place}[0]")


def _alternatives(value: Any, place: str) -> tuple[tuple[int, float], ...]:
    def one(entry: Any, at: str) -> tuple[int, float]:
        logprob, token = _list_of(entry, at, 2)[:2]
        return _count(token, f"{at}[1]"), _logprob(logprob, f"{at}[0]")

    return () if value is None else _each(one)(value, place)


def _counts(meta: _Object) -> Counts:
    return Counts(**{name: meta.maybe(name, _count, 0) for name in Counts.__dataclass_fields__})


def _kept(meta: _Object, ids: tuple[int, ...]) -> int:
    kept = meta.maybe("kept_tokens", _count, 0)
    if kept > len(ids):
        raise _Wrong(f"{meta.place('kept_tokens')} is {kept}, but there are {len(ids)} output_ids")
    return kept


def _tail(meta: _Object, text: str) -> str:
    tail = meta.maybe("tail_text", _text, "")
    if not text.endswith(tail):
        raise _Wrong(f"{meta.place('tail_text')} {shown(tail)} is not the end of the text")
    return tail


def _spans(meta: _Object, text: str) -> tuple[tuple[int, int], ...]:
    spans = meta.maybe("forced_spans", _each(_each(_count)), ())
    at, found = 0, []
    for span in spans:
        if len(span) != 2 or not at <= span[0] <= span[1] <= len(text):
            raise _Wrong(f"{meta.place('forced_spans')} must be ascending pairs within the text")
        at = span[1]
        found.append((span[0], span[1]))
    return tuple(found)


def _option(value: Any, place: str) -> OptionScore:
    option = _Object(value, place)
    ids, logprobs = option.get("token_ids", _each(_count)), option.get("logprobs", _each(_logprob))
    unconditional = option.maybe("unconditional", _each(_logprob), None)
    for name, found in (("logprobs", logprobs), ("unconditional logprobs", unconditional)):
        if found is not None and len(found) != len(ids):
            raise _Wrong(f"{place} has {len(ids)} token_ids and {len(found)} {name}")
    return OptionScore(ids, logprobs, unconditional)


def _chat_format(value: Any, place: str) -> ChatFormat:
    chat = _Object(value, place)

    def affixes(pair: Any, at: str) -> tuple[str, str]:
        texts = _each(_text)(pair, at)
        if len(texts) != 2:
            raise _Wrong(f"{at} must be [prefix, suffix], got {shown(pair)}")
        return texts[0], texts[1]

    roles = chat.get("roles", _Object)
    turns = chat.maybe("turns", _each(_turn), ())
    for i, each in enumerate(turns):
        for role, index in each.then.items():
            if index >= len(turns) or turns[index].role != role:
                raise _Wrong(
                    f"{chat.place('turns')}[{i}].then.{role} is {index}, which is no turn of that role"
                )
    return ChatFormat(
        {name: roles.get(name, affixes) for name in roles.value},
        chat.maybe("default_system", _text, ""),
        chat.maybe("begin", _text, ""),
        turns,
        chat.maybe("thinking_end", _text, ""),
        chat.maybe("after_thinking", _text, ""),
        chat.maybe("stop", _each(_text), ()),
        exact=chat.maybe("exact", _boolean, True),
        problem=chat.maybe("problem", _text, ""),
    )


def _turn(value: Any, place: str) -> Turn:
    one = _Object(value, place)
    strips = one.maybe("strips", _text, "")
    if strips not in STRIPS:
        raise _Wrong(
            f"{one.place('strips')} must be one of {', '.join(map(repr, STRIPS))}, got {shown(strips)}"
        )
    then, refuses = one.maybe("then", _Object, _Object({})), one.maybe("refuses", _Object, _Object({}))
    return Turn(
        role=one.maybe("role", _text, ""),
        opening=one.maybe("opening", _text, ""),
        generation=one.maybe("generation", _text, ""),
        closing=one.maybe("closing", _text, ""),
        strips=strips,
        then={role: then.get(role, _count) for role in then.value},
        refuses={role: refuses.get(role, _text) for role in refuses.value},
    )
