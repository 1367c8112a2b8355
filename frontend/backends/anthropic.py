"""Anthropic's models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from trellis.frontend.backends.anthropic_messages import MessageAnswer, message_call
from trellis.frontend.backends.api_backend import APIBackend
from trellis.frontend.backends.base import ChatFormat, Chunk, Completion, GenerateRequest, ModelInfo
from trellis.frontend.backends.openai_answers import reading
from trellis.frontend.backends.openai_requests import Call

CHAT_FORMAT = ChatFormat({role: (f"{role.upper()}: ", "\n") for role in ("system", "user", "assistant")})


class Anthropic(APIBackend):
    """``Anthropic("claude-sonnet-4-5")``.

    api_key: None is ANTHROPIC_API_KEY. base_url: None is Anthropic's own, or ANTHROPIC_BASE_URL.
    timeout: seconds without a byte until a request fails; None waits for ever.
    max_retries: of the official client, for requests that the server refused or whose connection failed.
    client_options: further arguments of ``anthropic.AsyncAnthropic`` (default_headers, http_client, ...).

    It takes text inside roles only, and a gen only in an assistant message, after a user's. Text before the gen in
    that message is continued by the models that can (others refuse it, which is an InvalidRequestError). ``schema``
    and ``choices`` go out as structured outputs, and ``select`` lets the model choose by them; a regex, a grammar,
    log-probabilities, a seed and penalties raise.
    """

    speaks_messages = True

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float | None = 600.0,
        max_retries: int = 2,
        **client_options: Any,
    ) -> None:
        super().__init__(f"the Messages API of {base_url or 'Anthropic'}", model, "anthropic", timeout)
        given = {"base_url": base_url, "api_key": api_key}
        self._options = {
            **{name: value for name, value in given.items() if value is not None},
            "timeout": timeout,
            "max_retries": max_retries,
            **client_options,
        }

    def _make_client(self) -> Any:
        return self._module.AsyncAnthropic(**self._options)

    async def model_info(self) -> ModelInfo:
        return ModelInfo(self.model, CHAT_FORMAT)

    async def generate(self, request: GenerateRequest) -> Completion:
        call = message_call(request, self.api)
        answer = MessageAnswer(request, self.api, call.output)
        found = await self._create(call)
        with reading(self.api):
            answer.add_message(found)
            whole = answer.complete()
        self._count(whole.counts)
        return whole

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        call = message_call(request, self.api)
        answer = MessageAnswer(request, self.api, call.output)
        events = await self._create(call, stream=True)
        try:
            with self._errors(), reading(self.api):
                async for event in events:
                    if text := answer.add_event(event):
                        yield Chunk(text)
                final = answer.complete()
        finally:
            await events.close()
        self._count(final.counts)
        yield Chunk("", final)

    async def _create(self, call: Call, **more: Any) -> Any:
        client = self._client()
        with self._errors():
            return await client.messages.create(model=self.model, **call.arguments, **more)
