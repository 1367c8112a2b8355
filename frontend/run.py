"""What all states of one program run share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trellis.frontend.backends.base import Backend, ChatFormat
from trellis.frontend.loop import LoopThread
from trellis.frontend.parameters import RunOptions

if TYPE_CHECKING:
    from trellis.frontend.executor import Executor


class Run:
    """program: its name, for messages. body_done: the program's body has returned (return_value) or raised."""

    def __init__(self, program: str, backend: Backend, options: RunOptions, loop: LoopThread) -> None:
        self.program = program
        self.backend = backend
        self.options = options
        self.loop = loop
        self.body_done = False
        self.return_value: Any = None
        self._chat: ChatFormat | None = None

    async def chat_format(self) -> ChatFormat:
        if self._chat is None:
            self._chat = (await self.backend.model_info()).chat_format
        return self._chat

    def end_body(self, root: Executor) -> None:
        self.body_done = True
        for executor in root.family():
            executor.feed.wake()
