"""The whole runtime in one process: no sockets, nothing to spawn, one thread for the scheduler."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from trellis.errors import BackendError
from trellis.runtime.assembly import Assembly, assemble, settled_context_length
from trellis.runtime.config import ServerConfig
from trellis.runtime.loop import CONTROL_TIMEOUT, Command, Health, SchedulerLoop
from trellis.runtime.manager.detokenizer import Detokenizer
from trellis.runtime.manager.tokenizer_manager import TokenizerManager
from trellis.runtime.manager.transport import MemoryChannel

logger = logging.getLogger(__name__)


class InProcessEngine:
    """A TokenizerManager, a Scheduler on a thread of its own, and a Detokenizer on the same thread.

    Usable from any thread and any event loop through ``manager``. If the scheduler thread ends with an
    exception, every request in flight and every later call gets a BackendError.

    build: makes the scheduler and what belongs to it; called with the config and a function that wakes the
    loop. The default loads the model (ModelLoadError, InvalidRequestError for a bad config).
    """

    def __init__(
        self,
        config: ServerConfig,
        build: Callable[[ServerConfig, Callable[[], None]], Assembly] = assemble,
    ) -> None:
        inbox: MemoryChannel[Command] = MemoryChannel()
        parts = build(config, inbox.wake)
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.manager = TokenizerManager(
            parts.tokenizer,
            context_length=settled_context_length(parts.config),
            max_requests=parts.config.max_requests,
            jump_forward=not parts.config.disable_jump_forward,
            auto_truncate=parts.config.allow_auto_truncate,
        )
        self.manager.connect(inbox)
        manager, detokenizer = self.manager, Detokenizer(parts.tokenizer)
        self._loop = SchedulerLoop(
            parts.scheduler, inbox, lambda outputs: manager.deliver(detokenizer.process(outputs))
        )
        # The thread must not hold the engine, or the engine would never be collected. It is a daemon, and the
        # finalizer, which runs at exit too, ends and joins it: forgetting close() costs nothing.
        thread = threading.Thread(
            target=_run, args=(self._loop, self.manager), name="trellis-scheduler", daemon=True
        )
        self._finalizer = weakref.finalize(self, _shut_down, self._loop, thread, parts.close)
        thread.start()

    def control(self, command: str, timeout: float = CONTROL_TIMEOUT, **arguments: Any) -> Any:
        """Run a command between two steps; see ``SchedulerLoop.control``."""
        return self._loop.control(command, timeout, **arguments)

    def health(self) -> Health:
        """Never waits."""
        if self._loop.ended:
            return Health("ended", "the scheduler has ended")
        return Health.of_heartbeat(self._loop.heartbeat_age)

    def close(self) -> None:
        """End all requests and the thread, and free the model. Idempotent."""
        self._finalizer()

    def __enter__(self) -> InProcessEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _run(loop: SchedulerLoop, manager: TokenizerManager) -> None:
    reason = "the engine is closed"
    try:
        loop.run()
    except BaseException as error:
        logger.exception("the scheduler thread ended with an error")
        reason = f"the scheduler ended with {type(error).__name__}: {error}"
    manager.disconnect(BackendError(reason, 500))
    manager.fail_in_flight(BackendError(reason, 500))


def _shut_down(loop: SchedulerLoop, thread: threading.Thread, close: Callable[[], None]) -> None:
    loop.stop()
    if thread is not threading.current_thread():
        thread.join()
    close()
