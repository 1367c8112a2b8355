"""The OpenAI API, and every server that speaks it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from trellis.chat_templates import chat_format_of
from trellis.errors import BackendError, InvalidRequestError
from trellis.frontend.backends import answers, speculation
from trellis.frontend.backends.base import (
    ChatFormat,
    Chunk,
    Completion,
    Counts,
    GenerateRequest,
    ModelInfo,
    SamplingOptions,
    ScoreResult,
    Segment,
)
from trellis.frontend.backends.openai_answers import (
    Answer,
    Piece,
    chat_piece,
    completion_piece,
    counts_of,
    reading,
)
from trellis.frontend.backends.openai_dialects import dialect_named
from trellis.frontend.backends.openai_requests import Call, chat_call, completion_call, prompt_text
from trellis.frontend.backends.openai_scoring import AT_ONCE, scored
from trellis.frontend.backends.openai_shaped import OpenAIShaped

APIS = ("auto", "chat", "completions")
_COMPLETION_MODELS = ("gpt-3.5-turbo-instruct", "davinci-002", "babbage-002")
# How a chat looks in the text of a state; the API gets messages.
CHAT_FORMAT = ChatFormat(
    {role: (f"{role.upper()}: ", "\n") for role in ("system", "developer", "user", "assistant")}
)


class OpenAI(OpenAIShaped):
    """``OpenAI("gpt-4.1-mini")``, ``OpenAI("smollm2-135m", "http://127.0.0.1:30000/v1", dialect="trellis")``.

    base_url: with /v1; None is OpenAI's own, or OPENAI_BASE_URL. api_key: None is OPENAI_API_KEY; servers of another
        dialect get no key unless it is given here.
    api: ``chat``, ``completions``, or ``auto``: completions for the models of OpenAI that have only these.
    dialect: what the server takes beyond OpenAI's API: ``openai`` (nothing), ``trellis``, ``vllm``. What the dialect
        has no field for raises; nothing is dropped.
    chat_template: how a completions API gets roles: a ``ChatFormat`` or its name (see ``get_chat_template``); None asks
        a Trellis server, and is plain text elsewhere.
    timeout: seconds without a byte until a request fails; None waits for ever.
    max_retries: of the official client, for requests that the server refused or whose connection failed.
    client_options: further arguments of ``openai.AsyncOpenAI`` (organization, default_headers, http_client, ...).

    The chat API takes text inside roles only, and a gen only in an assistant message; ``select`` lets the model
    choose there. The completions API scores options, if the server echoes log-probabilities, and answers several
    gens with one call (the run option ``num_api_spec_tokens``).
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        api: str = "auto",
        *,
        dialect: str = "openai",
        chat_template: str | ChatFormat | None = None,
        timeout: float | None = 600.0,
        max_retries: int = 2,
        **client_options: Any,
    ) -> None:
        if api not in APIS:
            raise InvalidRequestError("api", f"must be one of {', '.join(map(repr, APIS))}, got {api!r}")
        if api == "auto":
            base_model = model.removeprefix("ft:")
            api = "completions" if base_model.startswith(_COMPLETION_MODELS) else "chat"
        self.speaks_messages = api == "chat"
        where = base_url or "OpenAI"
        super().__init__(f"the {api} API of {where}", model, "openai", timeout, dialect_named(dialect))
        self._chat_format = chat_format_of(chat_template)
        self._options = {
            "base_url": base_url,
            "timeout": timeout,
            "max_retries": max_retries,
            **client_options,
        }
        own = dialect == "openai"
        self._options["api_key"] = api_key if own or api_key else "none"
        self._info: ModelInfo | None = None

    def _make_client(self) -> Any:
        try:
            return self._module.AsyncOpenAI(**self._options)
        except self._module.OpenAIError as error:
            hint = "OpenAI(..., api_key=...) takes a key, any text for a server that wants none"
            raise BackendError(f"{self.api}: {error} {hint}") from None

    async def model_info(self) -> ModelInfo:
        if self._info is None:
            self._info = await self._ask_model_info()
        return self._info

    async def _ask_model_info(self) -> ModelInfo:
        if self.speaks_messages:
            return ModelInfo(self.model, CHAT_FORMAT)
        if self._chat_format is not None or not self._dialect.native:
            return ModelInfo(self.model, self._chat_format or ChatFormat())
        url = self._native_url("/get_model_info")
        with self._errors():
            found = await self._client().get(url, cast_to=object)
        return replace(answers.model_info(found, url), model=self.model)

    # -- gens --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Completion:
        if not self.speaks_messages:
            if (found := speculation.from_surplus(request)) is not None:
                return self._count_saved(found)
            if (long := speculation.longer(request)) is not None:
                return await self._speculate(request, long)
        return await super().generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """A gen that takes part in speculation comes in one piece."""
        if not self.speaks_messages and (request.surplus is not None or request.spec_tokens > 0):
            whole = await self.generate(request)
            yield Chunk(whole.text)
            yield Chunk("", whole)
            return
        async with contextlib.aclosing(self._streamed(request, 1)) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def samples(self, request: GenerateRequest, n: int) -> list[Completion]:
        """One request for all, which takes no part in speculation if they are several."""
        return [await self.generate(request)] if n == 1 else await self._whole(request, n)

    def stream_samples(self, request: GenerateRequest, n: int) -> AsyncIterator[tuple[int, Chunk]]:
        return super().stream_samples(request, n) if n == 1 else self._streamed(request, n)

    async def _speculate(self, request: GenerateRequest, long: GenerateRequest) -> Completion:
        call = completion_call(long, self._dialect, self.api, by_id=False)
        answer = Answer(long, self.api)
        [whole] = await self._answered(call, [answer])
        tokens = answer.token_texts()
        if tokens is None:  # nobody knows where tokens begin, so nothing of this can be used exactly
            return await super().generate(request)
        return speculation.divided(request, whole, tokens)

    def _call(self, request: GenerateRequest) -> Call:
        build = chat_call if self.speaks_messages else completion_call
        return build(request, self._dialect, self.api)

    def _piece(self, choice: Any) -> Piece:
        return chat_piece(choice, self.api) if self.speaks_messages else completion_piece(choice)

    async def _create(self, call: Call, **more: Any) -> Any:
        client = self._client()
        api = client.chat.completions if self.speaks_messages else client.completions
        with self._errors():
            return await api.create(model=self.model, **call.arguments, **more)

    async def cache_prefix(self, prompt: tuple[Segment, ...]) -> None:
        """On a Trellis server's completions API; others look after their caches themselves."""
        if self._dialect.native and not self.speaks_messages:
            await self.generate(GenerateRequest(prompt, SamplingOptions(max_new_tokens=0)))

    async def flush_cache(self) -> None:
        """Of a Trellis server."""
        if self._dialect.native:
            with self._errors():
                await self._client().post(self._native_url("/flush_cache"), cast_to=object)

    # -- selects -----------------------------------------------------------------------------------------------

    async def score(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        """InvalidRequestError for an empty prompt, BackendError if the server echoes no log-probabilities.

        A Trellis server is asked by its own route, which computes the prompt once for all options.
        """
        if self.speaks_messages:
            return await super().score(prompt, options)
        text = prompt_text(prompt)
        if self._dialect.native:
            return await self._native_score({"text": text, "options": list(options)})
        prompts = [text, *(text + option for option in options)]
        groups = [prompts[i : i + AT_ONCE] for i in range(0, len(prompts), AT_ONCE)]
        found = await asyncio.gather(*(self._echoes(group) for group in groups))
        pieces = [piece for group, _ in found for piece in group]
        parts = [counts for _, counts in found]
        total = Counts(
            prompt_tokens=sum(each.prompt_tokens for each in parts),
            cached_tokens=sum(each.cached_tokens for each in parts),
        )
        with reading(self.api):
            return scored(pieces[0], pieces[1:], total, self._dialect.token_ids, self.api)

    async def score_unconditionally(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        if self.speaks_messages or not self._dialect.native:
            return await super().score_unconditionally(prompt, options)
        body = {"text": prompt_text(prompt), "options": list(options), "unconditional": True}
        return await self._native_score(body)

    async def _native_score(self, body: dict[str, Any]) -> ScoreResult:
        url = self._native_url("/score")
        with self._errors():
            found = await self._client().post(url, body=body, cast_to=object)
        result = answers.score_result(found, url, len(body["options"]))
        self._count(result.counts)
        return result

    async def _echoes(self, prompts: Sequence[str]) -> tuple[list[Piece], Counts]:
        """The tokens of the prompts, with the log-probability of each."""
        arguments: dict[str, Any] = {"prompt": list(prompts), "max_tokens": 0, "echo": True, "logprobs": 0}
        if self._dialect.token_ids:
            arguments["extra_body"] = {"return_tokens_as_token_ids": True}
        found = await self._create(Call(arguments))
        with reading(self.api):
            choices = sorted(found.choices, key=lambda choice: choice.index)
            if len(choices) != len(prompts):
                raise BackendError(f"{self.api}: {len(prompts)} prompts were sent, {len(choices)} came back")
            return [self._piece(choice) for choice in choices], self._count(counts_of(found.usage))

    def _native_url(self, path: str) -> str:
        """A Trellis server's own routes stand beside /v1."""
        return str(self._client().base_url).rstrip("/").removesuffix("/v1") + path
