"""One call of a command to a running server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from trellis.errors import BackendError

DEFAULT_URL = "http://127.0.0.1:30000"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and its key."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"base URL of the server ({DEFAULT_URL})")
    parser.add_argument("--api-key", default=None, help="the server's key, if it wants one")


def call_server(
    options: argparse.Namespace, method: str, path: str, query: Mapping[str, Any] | None = None
) -> Any:
    """The JSON answer. Raises BackendError, which says where it looked, when there is none."""
    import httpx

    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    base = options.url if "://" in options.url else f"http://{options.url}"
    url = base.rstrip("/") + path
    try:
        response = httpx.request(method, url, params=query, headers=headers, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BackendError(f"no answer from {url}: {error}; is a server running there? (--url)") from None
    if response.is_error:
        raise BackendError(
            f"{url} answered {response.status_code}: {_reason(response.text)}", response.status_code
        )
    try:
        return response.json()
    except ValueError:
        raise BackendError(
            f"{url} answered no JSON: {response.text[:100]!r}; is it a Trellis server?"
        ) from None


def _reason(body: str) -> str:
    """The message of a Trellis error; of any other answer its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500]
