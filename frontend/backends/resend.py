"""An HTTP client that sends a request again where that is safe: the server has not begun to work on it."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from typing import Any

import httpx

LONGEST = 30.0
"""Seconds that the client waits because a server asks it to. One that asks for more is not waited for."""
_FIRST = 0.1  # seconds before the second try to connect; doubled from there on


class ResendingClient(httpx.AsyncClient):
    """``httpx.AsyncClient``; resends: how often a request may be sent again.

    It is sent again when no connection came about, and when the server said 503 with Retry-After: a refusal, before
    any work. Never after a connection was lost, or once an answer has begun.
    """

    def __init__(self, resends: int, **options: Any) -> None:
        super().__init__(**options)
        self._resends = resends

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        for attempt in range(self._resends):
            try:
                answer = await super().send(request, **options)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                # Many states find the server gone in the same moment; they do not come back in one, too.
                wait: float | None = _FIRST * 2**attempt * random.uniform(0.5, 1.5)
            else:
                wait = retry_after(answer)
                if wait is None:
                    return answer
                await answer.aclose()
            await asyncio.sleep(wait or 0.0)
        return await super().send(request, **options)


def retry_after(answer: httpx.Response) -> float | None:
    """Seconds until a refused request may be sent again; None if it was not refused, or not for a short time."""
    said = answer.headers.get("Retry-After")
    if answer.status_code != 503 or said is None:
        return None
    try:
        seconds = float(said) if said.strip().isdigit() else _until(said)
    except ValueError:
        return None
    return max(seconds, 0.0) if seconds <= LONGEST else None


def _until(date: str) -> float:
    """Seconds from now to an HTTP date. ValueError if it is none."""
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
