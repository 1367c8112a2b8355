"""The radix tree as people may see it: bounded, with ages, without secrets."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from trellis.radix import NodeView, RadixCache


class CacheView:
    """Shows the tree. clock: the one that the cache has, in seconds.

    The name of a namespace is a secret (a tenant's ``cache_salt``), and so is what was asked under it. So a name
    becomes a short hash with a key that dies with this process, which keeps namespaces apart and tells nothing
    to who guesses names; and the tokens of named namespaces are not shown.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(16)

    def label(self, namespace: str) -> str:
        """Of the namespace that has no name: the empty string."""
        if not namespace:
            return ""
        return hashlib.blake2s(
            namespace.encode(errors="surrogatepass"), key=self._key, digest_size=4
        ).hexdigest()

    def show(self, cache: RadixCache, limit: int, edge_tokens: int, namespace: str | None) -> dict[str, Any]:
        """The ``limit`` nodes with the most hits, parents first, each with its first ``edge_tokens`` tokens.

        namespace: a label; only this one is shown, None for all. The work is bounded (see
        ``RadixCache.snapshot``), so a large tree does not hold up the scheduler.
        """
        only = None if namespace is None else lambda name: self.label(name) == namespace
        views = cache.snapshot(limit, edge_tokens, only)
        now = self._clock()
        sizes = cache.stats()
        return {
            **{
                name: sizes[name]
                for name in ("nodes", "tokens", "protected_tokens", "namespaces", "page_size")
            },
            "policy": cache.policy.name,
            "shown": [self._node(view, now) for view in views],
        }

    def _node(self, view: NodeView, now: float) -> dict[str, Any]:
        secret = bool(view["namespace"])
        return {
            **{name: view[name] for name in ("id", "parent", "depth", "length", "locks", "hits", "children")},
            "namespace": self.label(view["namespace"]),
            "token_ids": None if secret else view["tokens"],
            "idle_s": max(0.0, now - view["last_used"]),
            "age_s": max(0.0, now - view["created"]),
        }
