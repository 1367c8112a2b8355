"""Trellis through ``trellis.Engine``, in process as the Python interfaces of the peers are."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from benchmark.peers.wire import Output, Request, Runner, serve
from trellis import Engine, __version__
from trellis.runtime.manager.types import GenerateInput
from trellis.runtime.messages import Constraint, SamplingParams


class TrellisRunner:
    """settings["server"]: settings of the server by their Python names."""

    def __init__(self, settings: dict[str, Any]) -> None:
        server: dict[str, Any] = {"max_total_tokens": settings["pool_tokens"], **settings["server"]}
        self._engine = Engine(settings["gguf"], num_threads=settings["threads"], **server)
        self._namespaces = itertools.count(1)
        config = self._engine.core.config
        self.version = f"{__version__}, {config.dtype}, executor {config.executor}"

    def run(self, requests: list[Request]) -> list[Output]:
        manager = self._engine.core.manager
        inputs = [self._input(each) for each in requests]

        async def together() -> list[Output]:
            results = await asyncio.gather(*(manager.generate(each) for each in inputs))
            return [Output(each.text, each.counts.completion_tokens) for each in results]

        return asyncio.run(together())

    def _input(self, request: Request) -> GenerateInput:
        free = request.schema is None
        return GenerateInput(
            prompt=request.prompt,
            params=SamplingParams(max_new_tokens=request.max_tokens, temperature=0.0, ignore_eos=free),
            constraint=None if request.schema is None else Constraint("schema", request.schema),
            namespace="" if request.shared else str(next(self._namespaces)),
        )

    def close(self) -> None:
        self._engine.close()


def build(settings: dict[str, Any]) -> Runner:
    return TrellisRunner(settings)


if __name__ == "__main__":
    serve(build)
