"""What a program uses when its caller names nothing: the default backend, and the shared loop thread."""

from __future__ import annotations

import threading

from trellis.errors import BackendError
from trellis.frontend.backends.base import Backend
from trellis.frontend.loop import LoopThread


class Defaults:
    """One of these serves the process (``DEFAULTS``).

    It is an object and not a context variable because a default that is set in the main thread must be seen by
    programs that run in the user's other threads, and new threads start with an empty context. A caller that
    wants something else for one run passes ``backend=`` to it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self.loop = LoopThread()

    def set_backend(self, backend: Backend | None) -> None:
        if backend is not None and not isinstance(backend, Backend):
            raise TypeError(
                f"set_default_backend: expected a Backend such as Engine(...) or RuntimeEndpoint(url), "
                f"got {type(backend).__name__}"
            )
        with self._lock:
            self._backend = backend

    def backend(self, chosen: Backend | None = None) -> Backend:
        """``chosen``, or the default; BackendError if there is neither."""
        backend = chosen if chosen is not None else self._backend
        if backend is None:
            raise BackendError(
                'no backend: call set_default_backend(Engine()) or set_default_backend(RuntimeEndpoint("'
                'http://127.0.0.1:30000")) once, or pass backend= to run()'
            )
        if not isinstance(backend, Backend):
            raise TypeError(f"backend: expected a Backend, got {type(backend).__name__}")
        return backend


DEFAULTS = Defaults()


def set_default_backend(backend: Backend | None) -> None:
    """The backend of every run that names none; None forgets it."""
    DEFAULTS.set_backend(backend)


def flush_cache(backend: Backend | None = None) -> None:
    """Forget every cached prefix that no request uses, at ``backend`` or the default backend."""
    DEFAULTS.loop.result(DEFAULTS.backend(backend).flush_cache)


def server_info(backend: Backend | None = None) -> dict[str, object]:
    """Statistics of the runtime behind ``backend`` or the default backend."""
    return DEFAULTS.loop.result(DEFAULTS.backend(backend).server_info)
