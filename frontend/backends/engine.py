"""The runtime inside this process: no server, no sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trellis.chat_format import ChatFormat
from trellis.errors import BackendError, InvalidRequestError
from trellis.frontend.backends import wire
from trellis.frontend.backends.base import (
    Backend,
    Chunk,
    Completion,
    Counts,
    GenerateRequest,
    ModelInfo,
    OptionScore,
    ScoreResult,
    Segment,
)
from trellis.frontend.backends.errors import raise_for_finish
from trellis.frontend.suggest import did_you_mean

if TYPE_CHECKING:
    from trellis.runtime.engine import InProcessEngine
    from trellis.runtime.manager import GenerateInput, GenerateResult


class Engine(Backend):
    """``Engine("smollm2-135m")`` loads a model into this process and serves programs from it.

    chat_template: a Jinja file, the name of a template (see ``get_chat_template``) or a ``ChatFormat``, instead of the
        model's own. server_config: any setting of the server by its Python name, e.g. ``max_total_tokens=20_000``.
    Raises ModelLoadError when the model cannot be read, InvalidRequestError for a setting that does not exist or has
    a wrong value, BackendError when the runtime is not installed.
    Close it, use it in a ``with`` block, or leave it to the end of the process.
    """

    def __init__(
        self,
        model_path: str = "smollm2-135m",
        *,
        chat_template: str | ChatFormat | None = None,
        **server_config: Any,
    ) -> None:
        try:
            from trellis.runtime.config import ServerConfig
            from trellis.runtime.engine import InProcessEngine
        except ModuleNotFoundError as error:
            reason = (
                f"Engine needs the runtime ({error}); from the Trellis checkout: "
                "pip install '.[runtime]' -c constraints.txt"
            )
            raise BackendError(reason) from error
        for name in server_config:
            if name not in ServerConfig.__dataclass_fields__:
                hint = did_you_mean(name, ServerConfig.__dataclass_fields__)
                raise InvalidRequestError(name, f"is no setting of the server{hint}")
        self._chat = chat_template if isinstance(chat_template, ChatFormat) else None
        if self._chat is None:
            server_config["chat_template"] = chat_template
        self._engine: InProcessEngine | None = InProcessEngine(
            ServerConfig(model_path=model_path, **server_config)
        )

    @property
    def core(self) -> InProcessEngine:
        """The runtime itself: its ``manager`` takes requests, its ``control`` commands. BackendError once closed."""
        return self._open()

    async def model_info(self) -> ModelInfo:
        engine = self._open()
        chat_format = self._chat or engine.tokenizer.chat_format()
        return ModelInfo(engine.config.model_name, chat_format, engine.config.context_length)

    async def generate(self, request: GenerateRequest) -> Completion:
        return _completion(await self._open().manager.generate(_input(request)))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        whole: GenerateResult | None = None
        async with contextlib.aclosing(self._open().manager.stream(_input(request))) as deltas:
            async for delta in deltas:
                text = delta.text
                if whole is None:
                    whole = delta
                else:
                    whole.add(delta)
                yield Chunk(text, _completion(whole) if whole.finish else None)
        if whole is None or whole.finish is None:
            raise BackendError("the engine's stream ended before the answer was complete")

    async def samples(self, request: GenerateRequest, n: int) -> list[Completion]:
        """All of them come in one step of the scheduler, and the prompt is computed once."""
        return [_completion(each) for each in await self._open().manager.generate_many(_inputs(request, n))]

    async def stream_samples(self, request: GenerateRequest, n: int) -> AsyncIterator[tuple[int, Chunk]]:
        wholes: dict[int, GenerateResult] = {}
        async with contextlib.aclosing(self._open().manager.stream_many(_inputs(request, n))) as deltas:
            async for index, delta in deltas:
                text = delta.text
                if index in wholes:
                    wholes[index].add(delta)
                else:
                    wholes[index] = delta
                whole = wholes[index]
                yield index, Chunk(text, _completion(whole) if whole.finish else None)

    async def score(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        return await self._score(prompt, options, unconditional=False)

    async def score_unconditionally(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        return await self._score(prompt, options, unconditional=True)

    async def _score(
        self, prompt: tuple[Segment, ...], options: Sequence[str], unconditional: bool
    ) -> ScoreResult:
        manager = self._open().manager
        scored = await manager.score(wire.segments(prompt), list(options), unconditional=unconditional)
        found = (
            OptionScore(
                tuple(each.token_ids),
                tuple(each.logprobs),
                None if each.unconditional is None else tuple(each.unconditional),
            )
            for each in scored.options
        )
        return ScoreResult(tuple(found), _counts(scored.counts))

    async def flush_cache(self) -> None:
        await self._control("flush_cache")

    async def server_info(self) -> dict[str, object]:
        info: dict[str, object] = await self._control("stats")
        return info

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    async def _control(self, command: str) -> Any:
        # It waits for the scheduler's next pause between two steps, so it must not hold up the loop.
        return await asyncio.to_thread(self._open().control, command)

    def _open(self) -> InProcessEngine:
        if self._engine is None:
            raise BackendError("the engine is closed")
        return self._engine


def _input(request: GenerateRequest) -> GenerateInput:
    from trellis.runtime import messages
    from trellis.runtime.manager import GenerateInput

    sampling = asdict(request.sampling)
    sampling["stop"] = list(request.sampling.stop)
    sampling["stop_regex"] = list(request.sampling.stop_regex)
    sampling["stop_token_ids"] = list(request.sampling.stop_token_ids)
    sampling["logit_bias"] = dict(request.sampling.logit_bias)
    given = request.constraint
    return GenerateInput(
        prompt=wire.segments(request.prompt),
        params=messages.SamplingParams(**sampling),
        constraint=messages.Constraint(**asdict(given)) if given else None,
        return_logprob=request.return_logprob,
        top_logprobs_num=request.top_logprobs_num,
        token_healing=request.token_healing,
    )


def _inputs(request: GenerateRequest, n: int) -> list[GenerateInput]:
    """The input of each of n samples; they share the prompt, which is then tokenized once."""
    from trellis.runtime.manager import sample_seed

    first = _input(request)
    return [replace(first, params=sample_seed(first.params, index)) for index in range(n)]


def _completion(result: GenerateResult) -> Completion:
    """A finished result. Raises what its finish reason says, if the request did not end well."""
    reason = result.finish
    if reason is None:
        raise BackendError("the engine's answer is not complete")
    raise_for_finish(reason.type, reason.message, reason.status)
    grammar = result.grammar
    return Completion(
        text=result.text,
        token_ids=tuple(result.token_ids),
        finish_reason=reason.type,
        matched=reason.matched,
        counts=_counts(result.counts),
        kept_tokens=result.kept_tokens,
        tail_text=result.tail_text,
        healed_characters=result.healed_characters,
        truncated_tokens=result.truncated_tokens,
        logprobs=None if result.logprobs is None else tuple(result.logprobs),
        top_logprobs=None
        if result.top_logprobs is None
        else tuple(tuple(top) for top in result.top_logprobs),
        forced_spans=tuple(result.forced_spans),
        grammar_engine=grammar.engine if grammar else None,
        validated_only=tuple(grammar.validated_only) if grammar else (),
        constraint_warnings=tuple(grammar.warnings) if grammar else (),
    )


def _counts(found: object) -> Counts:
    return Counts(**{name: getattr(found, name) for name in Counts.__dataclass_fields__})
