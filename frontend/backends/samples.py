"""Several samples of one prompt, for backends that have no request for that: as many requests side by side."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from trellis.frontend.backends.base import Backend, Chunk, Completion, GenerateRequest

_SEEDS = 1 << 63


def sample_request(request: GenerateRequest, index: int) -> GenerateRequest:
    """The request of the sample with this index: a seed that was given is varied, or all would be the same."""
    seed = request.sampling.seed
    if seed is None or index == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + index) % _SEEDS))


async def generate_each(backend: Backend, request: GenerateRequest, n: int) -> list[Completion]:
    """n answers. The first that fails cancels the others."""
    import asyncio

    tasks = [asyncio.ensure_future(backend.generate(sample_request(request, i))) for i in range(n)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancelled(tasks)


async def stream_each(backend: Backend, request: GenerateRequest, n: int) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks of n answers, each with the index of its sample, as they come."""
    import asyncio

    ready: asyncio.Queue[tuple[int, Chunk | None]] = asyncio.Queue()

    async def read(index: int) -> None:
        try:
            chunks: Any = backend.stream(sample_request(request, index))
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    ready.put_nowait((index, chunk))
        finally:
            ready.put_nowait((index, None))

    tasks = [asyncio.ensure_future(read(index)) for index in range(n)]
    try:
        left = n
        while left:
            index, chunk = await ready.get()
            if chunk is None:
                left -= 1
                await tasks[index]
            else:
                yield index, chunk
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: list[asyncio.Future[Any]] | list[asyncio.Task[Any]]) -> None:
    """End what is unfinished, and wait until it has."""
    import asyncio

    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
