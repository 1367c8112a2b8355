"""What all states of one program run share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trellis.frontend.backends.base import Backend, ChatFormat, ModelInfo
from trellis.frontend.backends.checked import checked
from trellis.frontend.loop import LoopThread, Timer
from trellis.frontend.parameters import RunOptions
from trellis.frontend.spans import Span

if TYPE_CHECKING:
    from trellis.frontend.executor import Executor


class Run:
    """program: its name, for messages. body_done: the program's body has returned (return_value) or raised.
    stop_body: cancels the body of an async program, from any thread. driver: the task that runs it, where nobody
    waits for it: an event loop alone would let go of it."""

    def __init__(self, program: str, backend: Backend, options: RunOptions, loop: LoopThread) -> None:
        self.program = program
        self.backend = backend
        self.options = options
        self.loop = loop
        self.body_done = False
        self.return_value: Any = None
        self.stop_body: Callable[[], None] | None = None
        self.driver: object = None
        self.spans: list[Span] = []  # of all branches, in the order in which they were appended
        self._chat: ChatFormat | None = None

    async def chat_format(self) -> ChatFormat:
        if self._chat is None:
            self._chat = checked(await self.backend.model_info(), ModelInfo, self.backend).chat_format
            if not self._chat.exact and not self._chat.problem:
                warnings.warn(
                    "the model's chat template writes some conversations in another way than role by role, so roles are "
                    "only nearly what the chat endpoint sends; name a template that can be, with chat_template=...",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._chat

    def start_timer(self, root: Executor) -> Timer | None:
        """The timeout of the whole program, if it has one."""
        timeout = self.options.timeout
        if timeout is None:
            return None
        late = TimeoutError(f"the program was not done within its timeout of {timeout:g} s")
        return self.loop.after(timeout, lambda: self.end(root, late))

    def end_body(self, root: Executor) -> None:
        self.body_done = True
        for executor in root.family():
            executor.feed.wake()

    def end(self, executor: Executor, cause: BaseException) -> None:
        """Fail a state from outside, and stop the body if the state is its own: it may be waiting for something
        else. Nothing happens to a state whose program has already ended."""
        if self.body_done and all(each.idle for each in executor.family()):
            return
        executor.fail(cause)
        if executor.is_root and self.stop_body is not None:
            self.stop_body()
