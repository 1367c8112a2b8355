"""The optional API key."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from trellis.runtime.server.errors import JsonResponse

OPEN_PATHS = ("/health",)  # for load balancers, which have no key


class BearerAuth:
    """ASGI middleware: 401 for requests without ``Authorization: Bearer <key>``."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
            return
        message = "missing or wrong API key; send it as 'Authorization: Bearer KEY'"
        error = {"message": message, "type": "authentication_error", "code": "invalid_api_key"}
        await JsonResponse({"error": error}, 401, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        # Constant time: how long it takes must not tell how much of a guess is right.
        return hmac.compare_digest(given, self._expected)
