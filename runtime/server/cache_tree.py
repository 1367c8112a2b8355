"""``GET /cache/tree``: the live radix tree, for people and their tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from trellis.errors import InvalidRequestError
from trellis.runtime.models import Tokenizer
from trellis.runtime.server.errors import JsonResponse

DEFAULT_NODES, MAX_NODES = 200, 5_000
DEFAULT_EDGE_TOKENS, MAX_EDGE_TOKENS = 32, 64
PARAMETERS = ("limit", "edge_tokens", "namespace")


def cache_routes(tokenizer: Tokenizer, control: Callable[..., Awaitable[Any]]) -> APIRouter:
    """control: runs a command of the scheduler, with keyword arguments."""
    router = APIRouter()

    @router.get("/cache/tree")
    async def cache_tree(request: Request) -> Response:
        """The nodes with the most hits, parents before children; see ``CacheView``.

        limit: nodes at most. edge_tokens: of each edge, how many tokens to show as text. namespace: only this
        one, by the label that the answer gives it (empty: requests without a cache_salt).
        """
        query = request.query_params
        if unknown := sorted(set(query) - set(PARAMETERS)):
            raise InvalidRequestError(unknown[0][:100], f"unknown; there are {', '.join(PARAMETERS)}")
        tree = await control(
            "cache_snapshot",
            limit=_integer(query, "limit", DEFAULT_NODES, 1, MAX_NODES),
            edge_tokens=_integer(query, "edge_tokens", DEFAULT_EDGE_TOKENS, 0, MAX_EDGE_TOKENS),
            namespace=query.get("namespace"),
        )
        for node in tree["shown"]:
            ids = node["token_ids"]
            node["text"] = None if ids is None else text_of(ids, tokenizer.token_bytes)
        return JsonResponse(tree)

    return router


def text_of(token_ids: list[int], token_bytes: list[bytes]) -> str:
    """What the tokens spell, special ones by their names; half characters at the ends become U+FFFD."""
    known = (token_bytes[i] for i in token_ids if 0 <= i < len(token_bytes))
    return b"".join(known).decode("utf-8", "replace")


def _integer(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise InvalidRequestError(name, f"must be an integer from {low} to {high}, not {text[:50]!r}")
    return int(text)
