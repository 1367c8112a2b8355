"""``GET /cache/tree``: what it asks the scheduler for, and what it makes of the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trellis.runtime.server.cache_tree import text_of

Call = Callable[..., Any]


def test_the_tree_comes_with_its_tokens_as_text(call: Call, scheduler: Any) -> None:
    tree = call("GET", "/cache/tree").json()
    open_node, secret = tree["shown"]
    assert (open_node["text"], open_node["token_ids"]) == ("hello", [*b"hello"])
    assert secret["text"] is None
    assert scheduler.asked == (200, 32, None)


def test_limits_and_a_namespace_can_be_given(call: Call, scheduler: Any) -> None:
    query = {"limit": "7", "edge_tokens": "0", "namespace": "0badcafe"}
    assert call("GET", "/cache/tree", params=query).status_code == 200
    assert scheduler.asked == (7, 0, "0badcafe")


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "1000000000000000000000"}, "limit"),
        ({"limit": "٣"}, "limit"),
        ({"edge_tokens": "-1"}, "edge_tokens"),
        ({"edge_tokens": "65"}, "edge_tokens"),
        ({"depth": "3"}, "depth"),
    ],
)
def test_what_is_wrong_with_a_query_is_named(call: Call, query: dict[str, str], field: str) -> None:
    answer = call("GET", "/cache/tree", params=query)
    assert answer.status_code == 400
    assert field in answer.text


def test_it_needs_the_key_as_the_other_routes_do(engine_with: Any) -> None:
    import asyncio

    import httpx

    from trellis.runtime.server.app import create_app

    async def status(app: Any, headers: dict[str, str]) -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/cache/tree", headers=headers)).status_code

    with engine_with(api_key="k") as engine:
        app = create_app(engine)
        assert asyncio.run(status(app, {})) == 401
        assert asyncio.run(status(app, {"Authorization": "Bearer k"})) == 200


def test_ids_without_a_token_and_half_characters_do_no_harm() -> None:
    table = [b"\xe2\x82", b"\xac", b"x"]
    assert text_of([0, 1, 2, 99, -1], table) == "€x"
    assert text_of([1, 0], table) == "\ufffd\ufffd"
