"""The OpenAI-compatible routes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import Response

from trellis.errors import TrellisError
from trellis.runtime.manager.types import GenerateResult
from trellis.runtime.manager.validation import compiles_patterns
from trellis.runtime.server.errors import JsonResponse, body_of
from trellis.runtime.server.exchange import DONE, EventStream, event, read, unless_disconnected
from trellis.runtime.server.openai_chat import ChatShape, parse_chat
from trellis.runtime.server.openai_completions import CompletionShape, parse_completion
from trellis.runtime.server.openai_protocol import OpenAIRequest, check_model
from trellis.runtime.server.runtime import Runtime


class Shape(Protocol):
    """How results look in one of the two APIs."""

    def whole(self, results: Sequence[GenerateResult]) -> dict[str, Any]: ...
    def opening(self, index: int) -> dict[str, Any] | None: ...
    def piece(self, index: int, delta: GenerateResult) -> dict[str, Any]: ...
    def usage(self, results: Sequence[GenerateResult]) -> dict[str, Any]: ...


def openai_routes(runtime: Runtime) -> APIRouter:
    router = APIRouter(prefix="/v1")
    started = int(time.time())

    def model(name: str) -> dict[str, Any]:
        length = runtime.config.context_length
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "trellis",
            "max_model_len": length,
        }

    @router.get("/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [model(runtime.config.model_name)]})

    @router.get("/models/{name:path}")
    async def one_model(name: str) -> Response:
        return JsonResponse(model(check_model(name, runtime)))

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        body = await read(request, lambda raw: parse_completion(raw, runtime), compiles_patterns)
        return await _answer(request, runtime, body, CompletionShape(body, runtime.tokenizer))

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        # In a thread always: the model's template is a program.
        body = await read(request, lambda raw: parse_chat(raw, runtime), lambda _: True)
        return await _answer(request, runtime, body, ChatShape(body, runtime.tokenizer.token_bytes))

    return router


async def _answer(request: Request, runtime: Runtime, body: OpenAIRequest, shape: Shape) -> Response:
    if not body.stream:
        results = await unless_disconnected(request, runtime.manager.generate_many(body.inputs))
        return JsonResponse(shape.whole(results))
    deltas = runtime.manager.stream_many(body.inputs)
    # The first output is waited for, so that a request that fails before it still gets its own status code.
    first = await unless_disconnected(request, anext(deltas))
    return EventStream(_events(first, deltas, body, shape))


async def _events(
    first: tuple[int, GenerateResult],
    deltas: AsyncGenerator[tuple[int, GenerateResult], None],
    body: OpenAIRequest,
    shape: Shape,
) -> AsyncGenerator[bytes, None]:
    last: dict[int, GenerateResult] = {}

    def steps(index: int, delta: GenerateResult) -> list[bytes]:
        opening = None if index in last else shape.opening(index)
        last[index] = delta  # counts are totals, so the last delta has them all
        worth = delta.text or delta.logprobs or delta.input_logprobs or delta.finish
        piece = shape.piece(index, delta) if worth else None
        return [event(each) for each in (opening, piece) if each is not None]

    try:
        for chunk in steps(*first):
            yield chunk
        async for index, delta in deltas:
            for chunk in steps(index, delta):
                yield chunk
        if body.include_usage:
            yield event(shape.usage([last[i] for i in range(len(body.inputs))]))
    except TrellisError as error:
        yield event(body_of(error, openai=True))
    finally:
        await deltas.aclose()
    yield DONE
