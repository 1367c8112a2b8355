"""The native routes: everything the runtime can do, under its own names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from trellis.errors import InvalidRequestError, TrellisError
from trellis.runtime.manager.fields import Fields
from trellis.runtime.manager.types import GenerateResult
from trellis.runtime.manager.validation import compiles_patterns
from trellis.runtime.server.cache_tree import cache_routes
from trellis.runtime.server.errors import JsonResponse, body_of
from trellis.runtime.server.exchange import DONE, EventStream, event, read, read_json, unless_disconnected
from trellis.runtime.server.native_older import older_routes
from trellis.runtime.server.native_protocol import GenerateBody, parse_generate, parse_score, render
from trellis.runtime.server.runtime import Runtime

CONTROL_TIMEOUT = 30.0  # seconds that a command waits for the step that is running


def native_routes(runtime: Runtime) -> APIRouter:
    router = APIRouter()
    router.include_router(_information_routes(runtime))
    router.include_router(_generation_routes(runtime))
    router.include_router(older_routes(runtime.config))
    return router


def _information_routes(runtime: Runtime) -> APIRouter:
    router = APIRouter()
    # Control commands block a thread each; they get their own, so that they cannot hold up anything else.
    threads = ThreadPoolExecutor(4, thread_name_prefix="control")

    async def control(command: str, **arguments: Any) -> Any:
        call = partial(runtime.control, command, CONTROL_TIMEOUT, **arguments)
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    @router.api_route("/health", methods=["GET", "HEAD"])
    async def health(request: Request) -> Response:
        """200 when requests are served, else 503; asks nobody, so it is as fast under load as without."""
        now = runtime.health()
        status = 200 if now.ok else 503
        return (
            Response(None, status)
            if request.method == "HEAD"
            else JsonResponse(msgspec.to_builtins(now), status)
        )

    @router.get("/get_model_info")
    @router.get("/model_info")
    async def model_info() -> Response:
        # In a thread: the first time, the chat format is derived by trying the model's template.
        return JsonResponse(await asyncio.to_thread(_model_info, runtime))

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        """The configuration and the scheduler's statistics."""
        stats = await control("stats")
        info = {
            "config": runtime.config.public(),
            "health": msgspec.to_builtins(runtime.health()),
            "in_flight": runtime.manager.in_flight,
        }
        return JsonResponse({**info, **stats})

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        """Forget every cached prefix that no request uses."""
        return JsonResponse({"success": True, **(await control("flush_cache"))})

    @router.post("/set_policy")
    async def set_policy(request: Request) -> Response:
        """``{"policy": …}`` orders the waiting requests by another policy from the next step on."""
        fields = Fields(await read_json(request))
        name = fields.string("policy")
        fields.done()
        if name is None:
            raise InvalidRequestError("policy", "is missing; give the name of a schedule policy")
        await control("set_policy", name=name)
        return JsonResponse({"success": True, "policy": name})

    router.include_router(cache_routes(runtime.tokenizer, control))
    return router


def _generation_routes(runtime: Runtime) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        size, most = runtime.tokenizer.vocab_size, runtime.config.max_requests
        body = await read(request, lambda raw: parse_generate(raw, size, most), compiles_patterns)
        if body.stream:
            return await _stream(request, runtime, body)
        results = await unless_disconnected(request, runtime.manager.generate_many(body.inputs))
        answers = [render(result, body, runtime.tokenizer.token_bytes) for result in results]
        return JsonResponse(answers if body.many else answers[0])

    @router.post("/score")
    async def score(request: Request) -> Response:
        """Log-probabilities of options after a prompt; see ``TokenizerManager.score``."""
        body = await read(request, lambda raw: parse_score(raw, runtime.config.max_requests))
        work = runtime.manager.score(
            body.prompt, body.options, body.namespace, body.prompt_field, body.unconditional
        )
        output = await unless_disconnected(request, work)
        options = [
            {"token_ids": each.token_ids, "logprobs": each.logprobs}
            | ({"unconditional": each.unconditional} if body.unconditional else {})
            for each in output.options
        ]
        return JsonResponse({"options": options, "meta_info": msgspec.to_builtins(output.counts)})

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        """``{"rid": …}`` ends the request with exactly this id, ``{"abort_all": true}`` all. Unknown ids are fine."""
        fields = Fields(await read_json(request))
        rid, everything = fields.string("rid"), fields.boolean("abort_all")
        fields.done()
        if (rid is None) != everything:
            raise InvalidRequestError("rid", "give either rid or abort_all")
        aborted = runtime.manager.abort_all() if rid is None else int(runtime.manager.abort(rid))
        return JsonResponse({"aborted": aborted})

    return router


async def _stream(request: Request, runtime: Runtime, body: GenerateBody) -> Response:
    """Wait for the first output, so that a request that fails before it still gets a status code of its own."""
    deltas = runtime.manager.stream_many(body.inputs)
    first = await unless_disconnected(request, anext(deltas))
    return EventStream(_events(first, deltas, body, runtime))


async def _events(
    first: tuple[int, GenerateResult],
    deltas: AsyncGenerator[tuple[int, GenerateResult], None],
    body: GenerateBody,
    runtime: Runtime,
) -> AsyncGenerator[bytes, None]:
    """Each event is the whole answer so far, as clients of this API expect."""
    sums: dict[int, GenerateResult] = {}

    def step(index: int, delta: GenerateResult) -> bytes:
        if index in sums:
            sums[index].add(delta)
        else:
            sums[index] = delta
        answer = render(sums[index], body, runtime.tokenizer.token_bytes)
        return event({**answer, "index": index} if body.many else answer)

    try:
        yield step(*first)
        async for index, delta in deltas:
            yield step(index, delta)
    except TrellisError as error:
        yield event(body_of(error, openai=False))
    finally:
        await deltas.aclose()
    yield DONE


def _model_info(runtime: Runtime) -> dict[str, Any]:
    form = runtime.tokenizer.chat_format()
    return {
        "model_path": runtime.config.model_path,
        "served_model_name": runtime.config.model_name,
        "is_generation": True,
        "context_length": runtime.config.context_length,
        "vocab_size": runtime.tokenizer.vocab_size,
        "eos_token_ids": sorted(runtime.tokenizer.eos_token_ids),
        "bos_token_id": runtime.tokenizer.bos_token_id,
        "chat_format": msgspec.to_builtins(form),
    }
