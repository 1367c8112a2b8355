"""Bodies and answers of ``/generate`` and ``/score``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from trellis.errors import InvalidRequestError
from trellis.runtime.manager.bounds import check_sequences
from trellis.runtime.manager.fields import Fields, kind_of
from trellis.runtime.manager.types import GenerateInput, GenerateResult, Prompt
from trellis.runtime.manager.validation import (
    SamplingRequest,
    check_patterns,
    parse_sampling_params,
    sample_seed,
)

PROMPT_FIELDS = ("text", "input_ids", "segments")
_TEXT_ONLY = "not supported: this server's models read text"
_ELSEWHERE = {
    "image_data": _TEXT_ONLY,
    "video_data": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "input_embeds": "not supported: give text, input_ids or segments",
    "token_ids_logprob": "not supported: use top_logprobs_num, or POST /score",
    "lora_path": "not supported: this server has no adapters",
    "session_params": "not supported: shared prefixes are cached without sessions",
    "custom_logit_processor": "not supported: this server runs no code of its clients",
    "return_hidden_states": "not supported",
}


@dataclass(frozen=True)
class GenerateBody:
    """inputs: one a sequence, samples of one prompt next to each other. many: the answer is a list."""

    inputs: list[GenerateInput]
    many: bool
    stream: bool
    text_in_logprobs: bool


@dataclass(frozen=True)
class ScoreBody:
    prompt: Prompt
    prompt_field: str
    options: list[str]
    namespace: str
    unconditional: bool = False


@dataclass(frozen=True)
class _Logprobs:
    """start: ``logprob_start_len``; None if it was left out."""

    wanted: bool
    start: int | None
    top: int
    with_text: bool

    def first(self, max_new_tokens: int) -> int:
        """The first prompt token whose logprob is wanted; -1 for none.

        The first ``logprob_start_len`` tokens, and the one whose logits are the first to be read, are context: 0
        stands for all tokens all the same, with null for the first. Clients that score options count on that: they
        give the prompt's length less 2, and expect the prompt's last token, which may have merged with the option.
        """
        if self.start is None:
            # A request that generates nothing can want only the prompt's.
            return 0 if self.wanted and max_new_tokens == 0 else -1
        return self.start + 1 if self.start > 0 else self.start


def parse_generate(raw: Any, vocab_size: int, max_sequences: int) -> GenerateBody:
    """max_sequences: most that the server takes at once. Raises InvalidRequestError."""
    fields = Fields(raw)
    field, prompts, many = _prompts(fields, max_sequences)
    sampling = _sampling(fields, len(prompts), vocab_size)
    check_sequences(sum(each.n for each in sampling), max_sequences, field)
    rids = _rids(fields, len(prompts))
    logprobs = _logprobs(fields)
    namespace = fields.string("cache_salt", "", 1024)
    healing = fields.boolean("token_healing")
    inputs = [
        GenerateInput(
            prompt=prompt,
            params=sample_seed(each.params, sample),
            params_checked=True,
            constraint=each.constraint,
            return_logprob=logprobs.wanted,
            top_logprobs_num=logprobs.top,
            logprob_start=logprobs.first(each.params.max_new_tokens),
            namespace=namespace,
            rid=rid,
            token_healing=healing,
            prompt_field=f"{field}[{i}]" if many else field,
        )
        for i, (prompt, each, rid) in enumerate(zip(prompts, sampling, rids, strict=True))
        for sample in range(each.n)
    ]
    body = GenerateBody(
        inputs=inputs,
        many=many or any(each.n > 1 for each in sampling),
        stream=fields.boolean("stream"),
        text_in_logprobs=logprobs.with_text,
    )
    for name, reason in _ELSEWHERE.items():
        fields.only(name, (False,), reason)
    fields.done()
    return body


def parse_score(raw: Any, max_sequences: int) -> ScoreBody:
    """As ``parse_generate``."""
    fields = Fields(raw)
    field, prompts, many = _prompts(fields, max_sequences)
    if many:
        raise fields.error(field, "must be one prompt, not a list of them")
    texts = fields.elements("options")
    check_sequences(len(texts), max_sequences, "options")
    options = [fields.check_string(each, f"options[{i}]") for i, each in enumerate(texts)]
    namespace = fields.string("cache_salt", "", 1024)
    unconditional = fields.boolean("unconditional")
    fields.done()
    return ScoreBody(prompts[0], field, options, namespace, unconditional)


def render(result: GenerateResult, body: GenerateBody, token_bytes: Sequence[bytes]) -> dict[str, Any]:
    """The answer for one sequence, whole or so far."""
    meta: dict[str, Any] = {
        "id": result.rid,
        "finish_reason": _finish(result),
        **msgspec.to_builtins(result.counts),
        "kept_tokens": result.kept_tokens,
        "tail_text": result.tail_text,
        "healed_characters": result.healed_characters,
        "truncated_tokens": result.truncated_tokens,
        "forced_spans": result.forced_spans,
        "e2e_latency": result.latency_s,
    }
    if result.warnings:
        meta["warnings"] = result.warnings
    if result.grammar is not None:
        meta["grammar_engine"] = result.grammar.engine
        meta["constraint_warnings"] = result.grammar.warnings
        meta["validated_only"] = result.grammar.validated_only

    def entry(logprob: float | None, token: int) -> list[Any]:
        text = token_bytes[token].decode("utf-8", "replace") if body.text_in_logprobs else None
        return [logprob, token, text]

    if result.logprobs is not None:
        pairs = zip(result.logprobs, result.token_ids, strict=False)
        meta["output_token_logprobs"] = [entry(*pair) for pair in pairs]
    if result.top_logprobs is not None:
        meta["output_top_logprobs"] = [
            [entry(value, token) for token, value in position] for position in result.top_logprobs
        ]
    if result.input_logprobs is not None and result.input_token_ids is not None:
        inputs = zip(result.input_logprobs, result.input_token_ids, strict=False)
        meta["input_token_logprobs"] = [entry(*pair) for pair in inputs]
        known = [value for value in result.input_logprobs if value is not None]
        meta["normalized_prompt_logprob"] = sum(known) / len(known) if known else None
    if result.input_top_logprobs is not None:
        meta["input_top_logprobs"] = [
            None if position is None else [entry(value, token) for token, value in position]
            for position in result.input_top_logprobs
        ]
    return {"text": result.text, "output_ids": result.token_ids, "meta_info": meta}


def _finish(result: GenerateResult) -> dict[str, Any] | None:
    finish = result.finish
    if finish is None:
        return None
    answer: dict[str, Any] = {"type": finish.type}
    if finish.type == "stop":
        answer["matched"] = finish.matched
    elif finish.type == "length":
        answer["length"] = result.counts.completion_tokens
    if finish.message:
        answer["message"] = finish.message
    return answer


def _prompts(fields: Fields, most: int) -> tuple[str, list[Prompt], bool]:
    """(the field that was used, prompts, whether it was a list of prompts)."""
    given = [name for name in PROMPT_FIELDS if fields.get(name) is not None]
    if len(given) != 1:
        found = f"both {given[0]} and {given[1]} are set" if given else "none is set"
        raise InvalidRequestError("text", f"give exactly one of {', '.join(PROMPT_FIELDS)}; {found}")
    [field] = given
    if field == "text" and not isinstance(fields.get(field), list):
        return field, [_prompt(fields, field, field, fields.get(field))], False
    elements = fields.elements(field)
    if field == "segments" or (field == "input_ids" and list not in set(map(type, elements))):
        return field, [_prompt(fields, field, field, elements)], False
    if not elements:
        raise fields.error(field, "must have at least one prompt")
    check_sequences(len(elements), most, field)
    return field, [_prompt(fields, field, f"{field}[{i}]", each) for i, each in enumerate(elements)], True


def _prompt(fields: Fields, kind: str, place: str, value: Any) -> Prompt:
    """One prompt of this kind; whether ids are in the vocabulary is checked when they are encoded."""
    if kind == "text":
        return fields.check_string(value, place)
    if not isinstance(value, list):
        raise fields.error(place, f"must be a list of token ids, not {kind_of(value)}")
    taken, wanted = (
        ({str, list}, "text or a list of token ids") if kind == "segments" else ({int}, "a token id")
    )
    if not set(map(type, value)) <= taken:
        wrong = next(i for i, each in enumerate(value) if type(each) not in taken)
        raise fields.error(f"{place}[{wrong}]", f"must be {wanted}, not {kind_of(value[wrong])}")
    return value


def _logprobs(fields: Fields) -> _Logprobs:
    """return_logprob and what goes with it; asking for more of what is not wanted is a mistake."""
    wanted = fields.boolean("return_logprob")
    start = fields.integer("logprob_start_len", None, -1)
    top = fields.integer("top_logprobs_num", 0, 0)
    with_text = fields.boolean("return_text_in_logprobs")
    asked = {
        "logprob_start_len": start not in (None, -1),
        "top_logprobs_num": top != 0,
        "return_text_in_logprobs": with_text,
    }
    for name, given in asked.items():
        if given and not wanted:
            raise fields.error(name, "only with return_logprob=true")
    return _Logprobs(wanted, start, top, with_text)


def _sampling(fields: Fields, n: int, vocab_size: int) -> list[SamplingRequest]:
    raw = fields.get("sampling_params")
    if not isinstance(raw, list):
        return [parse_sampling_params(raw, vocab_size)] * n
    if len(raw) != n:
        raise fields.error("sampling_params", f"has {len(raw)} entries for {n} prompts")
    check_patterns(raw, "sampling_params")
    return [parse_sampling_params(each, vocab_size, f"sampling_params[{i}]") for i, each in enumerate(raw)]


def _rids(fields: Fields, n: int) -> list[str | None]:
    raw = fields.get("rid")
    if raw is None:
        return [None] * n
    rids = raw if isinstance(raw, list) else [raw]
    if len(rids) != n:
        raise fields.error("rid", f"has {len(rids)} ids for {n} prompts")
    checked: list[str | None] = [fields.check_string(each, "rid", 256) for each in rids]
    if len(set(checked)) != n:
        raise fields.error("rid", "has the same id twice")
    return checked
