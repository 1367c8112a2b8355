"""What completions and chat completions have in common: shared fields, usage, logprobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trellis.runtime.manager.bounds import check_sequences
from trellis.runtime.manager.constraints import read_constraint
from trellis.runtime.manager.fields import Fields
from trellis.runtime.manager.types import GenerateInput, GenerateResult, Prompt
from trellis.runtime.manager.validation import MAX_SAMPLES, read_params, sample_seed
from trellis.runtime.server.errors import ModelNotFound
from trellis.runtime.server.runtime import Runtime

MAX_TOP_LOGPROBS = 20
ANY_MODEL = "default"  # what people write who know that a server has one model
_HINTS = ("user", "safety_identifier", "prompt_cache_key", "service_tier")  # no answer depends on them
_TOOLS = "not supported: this server calls no tools; a program of the language can (see the examples)"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "ebnf": ((), "not supported: give it as the extra field grammar"),
    "tools": (([],), _TOOLS),
    "functions": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "parallel_tool_calls": ((True, False), _TOOLS),
    "modalities": ((["text"],), "not supported: this server writes text"),
    "audio": ((), "not supported: this server writes text"),
    "prediction": ((), "not supported"),
    "reasoning_effort": (("none",), "not supported: this server's models do not reason apart"),
    "verbosity": (("medium",), "not supported"),
    "web_search_options": ((), "not supported"),
    "store": ((False,), "not supported: answers are not kept"),
    "suffix": (("",), "not supported: models continue a text, they do not fill one in"),
}


@dataclass(frozen=True)
class OpenAIRequest:
    """A parsed body. inputs: n samples of the first prompt, then of the second, …

    id: of the answer; also what /abort_request takes. echo: put the prompt in front of each completion.
    by_id: log-probabilities call tokens ``token_id:N``, so that tokens that are no text of their own can be told
    apart.
    """

    id: str
    model: str
    created: int
    inputs: list[GenerateInput]
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    top_logprobs: int
    echo: bool = False
    by_id: bool = False

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(frozen=True)
class Length:
    """field: what the client calls the limit of new tokens. default: None is until the context is full."""

    field: str
    default: int | None


@dataclass(frozen=True)
class Logprobs:
    """wanted: of output tokens. top: alternatives a token. of_prompt: of the prompt's tokens too."""

    wanted: bool
    top: int
    of_prompt: bool = False


def read_request(
    fields: Fields,
    runtime: Runtime,
    prompts: Sequence[tuple[str, Prompt]],
    length: Length,
    logprobs: Logprobs,
    prefix: str,
    echo: bool = False,
    token_healing: bool = False,
) -> OpenAIRequest:
    """The shared fields of a body; refuses what nobody read. prompts: (field, prompt). Raises InvalidRequestError."""
    model = _model(fields, runtime)
    n = fields.integer("n", 1, 1, MAX_SAMPLES)
    check_sequences(n * len(prompts), runtime.config.max_requests, prompts[0][0].partition("[")[0])
    context = runtime.config.context_length or 0
    given = fields.get(length.field) is not None
    names = {"max_new_tokens": length.field, "min_new_tokens": "min_tokens"}
    default = context if length.default is None else length.default
    params = read_params(fields, runtime.tokenizer.vocab_size, names, default)
    constraint = read_constraint(fields, fields.get("response_format"))
    namespace = fields.string("cache_salt", "", 1024)
    stream = fields.boolean("stream")
    by_id = fields.boolean("return_tokens_as_token_ids")
    include_usage = _include_usage(fields, stream)
    fields.only("best_of", (1, n), "not supported: every sample is returned; use n")
    _refuse_the_rest(fields)
    rid = f"{prefix}-{uuid.uuid4().hex}"
    inputs = [
        GenerateInput(
            prompt=prompt,
            prompt_field=field,
            params=sample_seed(params, sample),
            params_checked=True,
            constraint=constraint,
            return_logprob=logprobs.wanted,
            top_logprobs_num=logprobs.top,
            logprob_start=0 if logprobs.of_prompt else -1,
            namespace=namespace,
            rid=rid,
            token_healing=token_healing,
            until_context=not given and length.default is None,
            strict_length=given,
        )
        for field, prompt in prompts
        for sample in range(n)
    ]
    return OpenAIRequest(
        id=rid,
        model=model,
        created=int(time.time()),
        inputs=inputs,
        n=n,
        stream=stream,
        include_usage=include_usage,
        logprobs=logprobs.wanted,
        top_logprobs=logprobs.top,
        echo=echo,
        by_id=by_id,
    )


def check_model(name: str, runtime: Runtime) -> str:
    """The served model's id. Raises ModelNotFound."""
    served = runtime.config.model_name
    if name not in (served, runtime.config.model_path, ANY_MODEL):
        raise ModelNotFound("model", f"{name!r} is not served here; this server has {served!r}")
    return served


def usage_of(results: Sequence[GenerateResult], n: int) -> dict[str, Any]:
    """Token counts of a whole answer. A prompt counts once, whatever the number of its samples."""
    prompts = results[::n]
    prompt = sum(result.counts.prompt_tokens for result in prompts)
    completion = sum(result.counts.completion_tokens for result in results)
    forced = sum(result.counts.forced_tokens for result in results)
    passes = sum(result.counts.forward_passes for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.counts.cached_tokens for result in prompts)},
        "completion_tokens_details": {"forced_tokens": forced, "forward_passes": passes},
    }


def ending_of(result: GenerateResult) -> dict[str, Any]:
    """finish_reason, what stopped the text if it was a stop string or token, and warnings if there are any."""
    finish = result.finish
    if finish is None:
        return {"finish_reason": None}
    warnings = {"warnings": result.warnings} if result.warnings else {}
    return {"finish_reason": finish.type, "matched_stop": finish.matched, **warnings}


def _refuse_the_rest(fields: Fields) -> None:
    for name in _HINTS:
        fields.string(name)
    if fields.get("metadata") is not None:  # nor on this
        Fields(fields.get("metadata"), fields.name("metadata"))
    for name, (accepted, reason) in _REFUSED.items():
        fields.only(name, accepted, reason)
    fields.done()


def _model(fields: Fields, runtime: Runtime) -> str:
    name = fields.string("model")
    return runtime.config.model_name if name is None else check_model(name, runtime)


def _include_usage(fields: Fields, stream: bool) -> bool:
    raw = fields.get("stream_options")
    if raw is None:
        return False
    if not stream:
        raise fields.error("stream_options", "only for stream=true")
    options = Fields(raw, "stream_options")
    include = options.boolean("include_usage")
    options.only("include_obfuscation", (False,), "not supported")
    options.done()
    return include
