"""Gens on an API whose answers are OpenAI's: whole or streamed, one or several samples of a prompt."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

from trellis.errors import BackendError
from trellis.frontend.backends.api_backend import APIBackend
from trellis.frontend.backends.base import Chunk, Completion, Counts, GenerateRequest
from trellis.frontend.backends.openai_answers import Answer, Piece, reading
from trellis.frontend.backends.openai_dialects import Dialect
from trellis.frontend.backends.openai_requests import Call


class OpenAIShaped(APIBackend):
    """Subclasses say how a request is written (``_call``), sent (``_create``) and one choice of an answer is read
    (``_piece``)."""

    def __init__(self, api: str, model: str, package: str, timeout: float | None, dialect: Dialect) -> None:
        super().__init__(api, model, package, timeout)
        self._dialect = dialect

    @abstractmethod
    def _call(self, request: GenerateRequest) -> Call: ...

    @abstractmethod
    async def _create(self, call: Call, **more: Any) -> Any:
        """The answer, or with ``stream=True`` an asynchronous iterator of its chunks."""

    @abstractmethod
    def _piece(self, choice: Any) -> Piece: ...

    async def generate(self, request: GenerateRequest) -> Completion:
        return (await self._whole(request, 1))[0]

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async with contextlib.aclosing(self._streamed(request, 1)) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def _whole(self, request: GenerateRequest, n: int) -> list[Completion]:
        """The API counts the tokens of all samples together; they stand with the first."""
        call = self._call(request)
        return await self._answered(call, [self._answer(request, call) for _ in range(n)])

    async def _answered(self, call: Call, answers: list[Answer]) -> list[Completion]:
        found = await self._create(call, **_several(len(answers)))
        with reading(self.api):
            choices = sorted(found.choices, key=lambda choice: choice.index)
            if len(choices) != len(answers):
                raise BackendError(f"{self.api}: {len(answers)} answers were asked for, {len(choices)} came")
            for answer, choice in zip(answers, choices, strict=True):
                answer.add(self._piece(choice))
            return self._complete(answers, getattr(found, "usage", None))

    async def _streamed(self, request: GenerateRequest, n: int) -> AsyncGenerator[tuple[int, Chunk], None]:
        call, usage = self._call(request), None
        answers = [self._answer(request, call) for _ in range(n)]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await self._create(call, **options, **_several(n))
        try:
            with self._errors(), reading(self.api):
                async for chunk in chunks:
                    usage = getattr(chunk, "usage", None) or usage
                    for choice in chunk.choices:
                        if text := answers[choice.index].add(self._piece(choice)):
                            yield choice.index, Chunk(text)
                finals = self._complete(answers, usage)
        finally:
            await _close(chunks)
        for i, final in enumerate(finals):
            yield i, Chunk("", final)

    def _answer(self, request: GenerateRequest, call: Call) -> Answer:
        named = self._dialect.token_ids and request.return_logprob
        return Answer(request, self.api, call.output, token_ids=named)

    def _complete(self, answers: list[Answer], usage: Any) -> list[Completion]:
        first, *others = [answer.complete(usage) for answer in answers]
        self._count(first.counts)
        return [first, *(replace(other, counts=Counts()) for other in others)]


def _several(n: int) -> dict[str, Any]:
    return {"n": n} if n > 1 else {}


async def _close(chunks: Any) -> None:
    """Closing the answer closes its connection, and the server then stops."""
    close = getattr(chunks, "close", None) or getattr(chunks, "aclose", None)
    if close is not None:
        await close()
