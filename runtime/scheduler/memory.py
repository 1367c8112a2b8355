"""The KV memory of the scheduler: who owns which slot, and every move from one owner to another.

A slot is free (``SlotPool``), in the tree (``RadixCache``) or private to one running request:

    free + tree + private = size        at every moment, each slot with one owner.

With pages of more than one slot a request takes whole pages, and its tokens fill them in order: token i is in the slot
page_size * page + i % page_size. So what is left of its last page is its own too, and needs no list: those slots come
after the last one. The tree only ever has whole pages.

Moves: ``attach`` shares what the tree has; ``reserve`` takes free slots, evicting what nobody uses;
``publish`` hands prompt slots to the tree before they are computed, so that others of the same batch can
share them; ``store`` hands over all that is computed when a request ends or is retracted; ``drop`` and
``take_back`` undo a step that failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trellis.radix import Node, PagePool, RadixCache, SlotPool, make_pool
from trellis.runtime.scheduler.buffer import IntArray, IntBuffer
from trellis.runtime.scheduler.recent import Recent
from trellis.runtime.scheduler.request import CachedAt, Request

EMPTY: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True)
class Published:
    """What one request put into the tree for this step: everything on the path to node after the first
    ``keep`` tokens is not computed before the step has succeeded."""

    node: Node
    keep: int


class KVMemory:
    """Owns the slot pool and the radix cache.

    size: slots of the pool; what is no whole page of them is not used. clock: seconds; tells when a node was used.
    version: changes whenever the tokens in the tree do. evicted_tokens: total so far. recent: what has ended a moment ago.
    """

    def __init__(
        self,
        size: int,
        page_size: int = 1,
        eviction_policy: str = "lru",
        clock: Callable[[], float] | None = None,
        keep_ended_s: float = 0.0,
    ) -> None:
        self.size = size - size % page_size
        self.page_size = page_size
        self._eviction_policy = eviction_policy
        self._clock = clock
        self._keep_ended_s = keep_ended_s
        self.version = 0
        self.evicted_tokens = 0
        self._reset()

    def _reset(self) -> None:
        self.version += 1
        self.pool: SlotPool | PagePool = make_pool(self.size, self.page_size)
        self.recent = Recent(self._keep_ended_s)
        self.cache = RadixCache(self.page_size, self._eviction_policy, self._clock)

    @property
    def available(self) -> int:
        """Slots that ``reserve`` can get: free, or in tree nodes that nobody uses."""
        return self.pool.free + self.cache.evictable

    def private(self, request: Request) -> int:
        """Slots that this request alone owns, those of its last page that have no token yet among them."""
        return request.private + self._spare(request)

    def room(self, request: Request) -> int:
        """Tokens that the request can be given slots for."""
        return self.available + self._spare(request)

    def taken(self, request: Request, n: int) -> int:
        """Slots of those available that n more tokens of the request take: whole pages behind its last one."""
        if self.page_size == 1:
            return n
        beyond = max(0, n - self._spare(request))
        return beyond + -beyond % self.page_size

    def taken_by_each(self, requests: Sequence[Request], wanted: Sequence[int]) -> int:
        """As ``taken``, of all the requests together."""
        if self.page_size == 1:
            return sum(wanted)
        page, total = self.page_size, 0  # no calls below: this is done for every request in every step
        for request, n in zip(requests, wanted, strict=True):
            beyond = n - -len(request.slots) % page
            if beyond > 0:
                total += beyond + -beyond % page
        return total

    def cached(self, request: Request) -> int:
        """Length of the cached prefix that the request could use (see ``Request.match_limit``); leaves no
        trace in the tree.

        Waiting requests are asked for it every step, so the answer is remembered: at no cost until the tree
        changes, and after that for as long as it did not change just where the prefix ends: O(1). Where that has
        grown the look-up goes on from there, so a request that waits for a long prompt to be computed costs no
        more than what is new of it each step.
        """
        limit = request.match_limit
        seen = request.cached_at
        if seen.limit != limit or (seen.version != self.version and self._changed(request, seen)):
            after, known = None, 0
            if seen.node is not None and seen.node.attached and not seen.inside and seen.length <= limit:
                after, known = seen.node, seen.length
            length, node, inside = self.cache.trace(
                request.tokens.view(known, limit), request.namespace, after
            )
            parent = node.parent if node is not None else None
            seen = request.cached_at = CachedAt(self.version, limit, known + length, node, parent, inside)
        else:
            seen.version = self.version
        return seen.length

    def _changed(self, request: Request, seen: CachedAt) -> bool:
        """May the cached prefix be another one than it was? False only if it is certainly the same."""
        node = seen.node
        if node is None or not node.attached or node.parent is not seen.parent:
            return True
        if seen.inside or not node.children or seen.length == seen.limit:
            return False
        return self.page_size > 1 or request.tokens.at(seen.length) in node.children

    def attach(self, request: Request) -> None:
        """Share what the tree has, from nothing or going on: where it now has more than the request computed,
        the request takes that over, and private slots that became duplicates are freed."""
        if request.node is not None and self.cached(request) <= request.computed:
            return
        match = self.cache.match(request.tokens.view(0, request.match_limit), request.namespace)
        self._hold(request, match.node)
        self._release_from(request, request.tree_len)
        request.slots = IntBuffer(match.slots)
        request.tree_len = request.computed = match.length

    def reserve(self, request: Request, n: int) -> bool:
        """Give n more tokens of the request private slots, evicting as needed. False: there are not so many."""
        return self.reserve_each([request], [n])

    def reserve_each(self, requests: Sequence[Request], wanted: Sequence[int]) -> bool:
        """Give so many more tokens of each request private slots: all of them, or (False) none."""
        total = self.taken_by_each(requests, wanted)
        missing = total - self.pool.free
        if missing > 0:
            if missing > self.cache.evictable:
                return False
            freed = self.cache.evict(missing)
            self.pool.release(freed)
            self.evicted_tokens += len(freed)
            self.version += 1
        slots = self.pool.alloc(total)
        if slots is None:
            return False
        if self.page_size > 1:
            self._fill_pages(requests, wanted, slots)
            return True
        if total == len(requests):  # one each, as in every step that only decodes
            for request, slot in zip(requests, slots.tolist(), strict=True):
                request.slots.append(slot)
            return True
        at = 0
        for request, n in zip(requests, wanted, strict=True):
            request.slots.extend(slots[at : at + n])
            at += n
        return True

    def trim(self, request: Request) -> None:
        """Free the slots behind what is computed: those of a draft that did not come. The page where that ends stays."""
        self._release_from(request, max(request.computed, request.tree_len))

    def publish(self, request: Request, end: int) -> Published | None:
        """Hand the slots of the first ``end`` tokens to the tree, before they are computed.

        If the tree already has some of the tokens that this step computes (the request needs their logits),
        the slots stay private. Private duplicates of older tokens are given up for the tree's.
        """
        tokens = request.tokens.view(0, end)
        known = self.cache.peek(tokens, request.namespace)
        keep = request.computed // self.page_size * self.page_size
        if known > keep:
            return None
        if known > request.tree_len:
            theirs = self.cache.match(tokens[:known], request.namespace).slots
            self.pool.release(request.slots.view(request.tree_len, known))
            # A new buffer, as a step that is being computed may read the old one.
            request.slots = IntBuffer(np.concatenate([theirs, request.slots.view(known)]))
            request.tree_len = known
        inserted = self.cache.insert(tokens, request.slots.view(0, end), request.namespace)
        self.version += 1
        self._hold(request, inserted.node)
        request.tree_len = inserted.length
        return Published(inserted.node, keep)

    def store(self, request: Request, ended: bool = True) -> None:
        """The request gives up all its slots; what it computed stays in the tree, evictable. ended: it does not
        come back itself, but a request that goes on with its text may come."""
        computed, end = request.computed, request.node
        if computed > request.tree_len:
            inserted = self.cache.insert(
                request.tokens.view(0, computed), request.slots.view(0, computed), request.namespace
            )
            self.version += 1
            self.pool.release(request.slots.view(request.tree_len, inserted.existing))
            request.tree_len, end = inserted.length, inserted.node
        if ended and self._clock is not None and request.tree_len and end is not None:
            self.recent.add(end, self._clock())
        self.drop(request)

    def drop(self, request: Request) -> None:
        """The request gives up all its slots; nothing is added to the tree."""
        self._release_from(request, request.tree_len)
        if request.node is not None:
            self.cache.unlock(request.node)
        request.node = None
        request.slots = IntBuffer()
        request.tree_len = request.computed = 0

    def take_back(self, published: Sequence[Published]) -> None:
        """Remove from the tree what a failed step published; its requests have been dropped before.

        Latest first: a request that shared what another one published hangs below it.
        """
        self.version += 1
        for entry in reversed(published):
            self.pool.release(self.cache.discard(entry.node, entry.keep))

    def exclusive(self, request: Request) -> int:
        """Slots that become available when this request gives up: private ones, and tree nodes that only it
        holds. It is also what coming back may cost to compute again."""
        tokens = self.private(request)
        for node in request.node.ancestry() if request.node is not None else ():
            if node.locks != 1:
                break
            tokens += node.length
        return tokens

    def flush(self) -> int:
        """Forget every cached token that no request uses; returns how many."""
        self.version += 1
        freed = self.cache.flush()
        self.pool.release(freed)
        return len(freed)

    def drift(self, running: Iterable[Request]) -> int:
        """Slots that the books have lost (positive) or count twice (negative). O(running)."""
        private = sum(self.private(request) for request in running)
        return self.size - self.pool.free - self.cache.evictable - self.cache.protected - private

    def heal(self) -> None:
        """Start with empty books. Only when no request holds a slot."""
        self._reset()

    def check(self, running: Sequence[Request]) -> None:
        """Verify that every slot has exactly one owner and every lock a holder. O(pool); RuntimeError."""
        self.cache.check()
        faults = [*self._slot_faults(running), *self._lock_faults(running)]
        if faults:
            raise RuntimeError(f"slot books: {len(faults)} faults: " + "; ".join(faults[:20]))

    def _slot_faults(self, running: Sequence[Request]) -> Iterator[str]:
        owned = [node.slots for node in self.cache.walk()]
        owned += [self._pages_from(request, request.tree_len) for request in running]
        for run in owned:
            if not _are_pages(run, self.page_size):
                yield f"slots {run[:5].tolist()}... are not whole pages of {self.page_size}, each in order"
        slots, owners = np.unique(np.concatenate([*owned, EMPTY]), return_counts=True)
        if (owners > 1).any():
            yield f"slots {slots[owners > 1][:5].tolist()} have more than one owner"
        used = self.pool.in_use()
        if not np.array_equal(used, slots):
            lost = np.setdiff1d(used, slots)[:5].tolist()
            yield f"slots {lost} are lost, {np.setdiff1d(slots, used)[:5].tolist()} are owned but free"
        for request in running:
            path = [] if request.node is None else [node.slots for node in request.node.ancestry()][::-1]
            if not np.array_equal(np.concatenate([*path, EMPTY]), request.slots.view(0, request.tree_len)):
                yield f"request {request.rid} does not use the slots of its own path in the tree"

    def _lock_faults(self, running: Sequence[Request]) -> Iterator[str]:
        held = Counter(request.node for request in running if request.node is not None)
        for node in self.cache.walk():
            if node.held != held[node]:
                yield f"{node} is held {node.held} times, by {held[node]} requests"

    def _hold(self, request: Request, node: Node) -> None:
        self.cache.lock(node)
        if request.node is not None:
            self.cache.unlock(request.node)
        request.node = node

    def _release_from(self, request: Request, start: int) -> None:
        if len(request.slots) > start:
            self.pool.release(self._pages_from(request, start))
            request.slots.truncate(start)

    def _spare(self, request: Request) -> int:
        """Slots of the request's last page that have no token yet."""
        return -len(request.slots) % self.page_size

    def _pages_from(self, request: Request, start: int) -> IntArray:
        """The slots of all pages of the request in which no token before ``start`` lies."""
        slots, spare = request.slots.view(start + -start % self.page_size), self._spare(request)
        if not spare or not len(slots):
            return slots
        return np.concatenate([slots, _behind(int(slots[-1]), spare)])

    def _fill_pages(self, requests: Sequence[Request], wanted: Sequence[int], fresh: IntArray) -> None:
        """So many more tokens each, in what is left of its last page and then in fresh pages."""
        page, at = self.page_size, 0
        for request, n in zip(requests, wanted, strict=True):
            slots = request.slots
            inside = min(n, -len(slots) % page)
            if n == inside == 1:  # most of the requests of a step that only decodes
                slots.append(slots.at(len(slots) - 1) + 1)
                continue
            if inside:
                slots.extend(_behind(slots.at(len(slots) - 1), inside))
            slots.extend(fresh[at : at + n - inside])
            at += n - inside + -(n - inside) % page


def _behind(slot: int, n: int) -> IntArray:
    return np.arange(slot + 1, slot + 1 + n, dtype=np.int32)


def _are_pages(slots: IntArray, page_size: int) -> bool:
    """Are these whole pages, one after the other, each in order?"""
    whole = len(slots) - len(slots) % page_size
    places = slots[:whole].reshape(-1, page_size)
    starts = places[:, :1]
    return whole == len(slots) and bool(
        (starts % page_size == 0).all() and (places - starts == np.arange(page_size)).all()
    )
