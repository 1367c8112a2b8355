from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from trellis.frontend import MockBackend, set_default_backend
from trellis.frontend.defaults import DEFAULTS


@pytest.fixture(autouse=True)
def no_default_backend() -> Iterator[None]:
    """Every test begins and ends without a default backend."""
    set_default_backend(None)
    yield
    set_default_backend(None)


@pytest.fixture
def assert_settled() -> Callable[[MockBackend], None]:
    """Call it at the end: no operation of any state and no request of the backend may be left."""

    def check(backend: MockBackend) -> None:
        deadline = time.monotonic() + 10
        while (DEFAULTS.loop.running_tasks or backend.active) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert DEFAULTS.loop.running_tasks == 0
        assert backend.active == 0

    return check
