"""A refusal for want of room says when to come back; no other error does."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from trellis.errors import BackendError, CapacityError, InvalidRequestError
from trellis.runtime.server.errors import install_error_handlers


@pytest.mark.parametrize(
    ("error", "status", "after"),
    [
        (CapacityError("the queue is full"), 503, "1"),
        (CapacityError("can never fit", 400), 400, None),
        (BackendError("does not answer", 503), 503, None),
        (InvalidRequestError("text", "is missing"), 400, None),
    ],
)
def test_only_a_full_server_asks_for_another_try(error: Exception, status: int, after: str | None) -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    def route() -> None:
        raise error

    answer = TestClient(app, raise_server_exceptions=False).get("/")
    assert (answer.status_code, answer.headers.get("Retry-After")) == (status, after)
