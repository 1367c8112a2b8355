"""The radix-tree prefix cache: which token prefixes have K/V already, where, and what to drop next.

**What it is for.** The K/V of a token depends only on the tokens before it. So when two requests begin with
the same tokens, the second can use what the first has computed. The cache is a radix tree over tokens: a
path from the root is a prefix, and beside each token stands the *slot* of the pool where its K/V lives.

**The tree.** An edge holds a run of tokens, not one; a ``Node`` is an edge and the point where it ends::

    insert "abcd" slots 1 2 3 4         root ── abcd
    insert "abxy" slots 5 6 7 8         root ── ab ─┬─ cd        existing = 2: the tree keeps its own slots
                                                    └─ xy        1 2 for "ab", and takes 7 8, not 5 6
    match  "abxz" → length 3,           root ── ab ─┬─ cd        the match ends inside an edge, so the edge
           slots 1 2 7, node at "x"                 └─ x ── y    is split and the match has a node of its own

On a split the existing ``Node`` object becomes the *lower* part, and a new object the upper one. So a node
that someone holds goes on meaning "the prefix that ends here".

**Who owns a slot.** At any time exactly one of: the ``SlotPool`` (free), the tree, or a running request
(private). ``SlotPool.alloc`` makes slots private; ``insert`` gives those in ``slots[existing:length]`` to the
tree; ``evict``, ``flush`` and ``discard`` hand slots back to the caller, who releases them. The cache never
talks to the pool, so ``pool.free + cache.total + private == pool.size`` can be checked from outside.

**A request's life.** ::

    found = cache.match(prompt[:-1])                 # the last token is always computed, for its logits
    cache.lock(found.node)                           # before anything that may evict
    fresh = pool.alloc(len(prompt) - found.length)   # None: pool.release(cache.evict(missing)), try again
    held = cache.insert(prompt, np.concatenate([found.slots, fresh])).node
    cache.lock(held); cache.unlock(found.node)       # from here on others can match the prompt
    ...                                              # compute, decode into private slots
    done = cache.insert(tokens, slots)               # leave prompt and answer to whoever comes next
    pool.release(slots[len(prompt) : done.existing])  # another request cached the same answer before
    pool.release(slots[done.length :])               # the part of a page at the end (page_size > 1)
    cache.unlock(held)                               # now evictable, as the most recently used

**Locks** are counts. ``lock(node)`` adds one to the node and to each of its ancestors, so a locked node never
hangs below an evictable one, and what is unlocked can be evicted leaf by leaf to the last token.

**Insert before compute.** A prompt may be inserted when its step is planned, so that other requests of the
same step share it. If the step fails, ``discard(held, keep)`` cuts the path behind the ``keep`` tokens that
were computed before, locks or not, and returns the slots. Locks beyond the cut become *detached*: they
still guard the part of their path that survives, and ``unlock`` gives them back as usual. Requests that
built on one another can therefore each discard and unlock, in any order.

**Eviction** takes unlocked leaves in an order that the policy keeps up to date with every operation (never a
scan of the tree): ``lru``, ``lfu``, ``slru``, ``fifo``; see ``policies.py``. Of the last leaf only as many
tokens go as are needed.

**Pages.** With ``page_size`` p > 1 the tree holds whole pages of p tokens only: a match, an insert and an
eviction are multiples of p, and children are found by their first page instead of their first token. ``PagePool`` then
hands out slots in whole pages.

**Namespaces** keep apart what must not be shared (an adapter, the content of an image, a tenant's salt):
each has its own root; slots, locks and the eviction order are common to all.

**Memory.** An edge keeps its tokens and its slots as two ``bytes`` of int32 values: the header is small, and
whether an edge continues a prompt is one comparison of memory. Cutting an edge copies that edge, nothing else.

Files: ``tree.py`` the nodes, ``cache.py`` the operations, ``results.py`` what they answer, ``pool.py`` the ledger
of free slots, ``pages.py`` that of free pages, ``eviction.py`` what a policy is, ``lists.py`` and ``heap.py`` the two
kinds of order, ``policies.py`` the policies, ``snapshot.py`` the tree as plain data, ``audit.py`` the check of all
invariants. Read them in this order.
"""

from trellis.radix.audit import InvariantError
from trellis.radix.cache import RadixCache
from trellis.radix.eviction import EvictionPolicy
from trellis.radix.heap import HeapPolicy
from trellis.radix.lists import ListPolicy
from trellis.radix.pages import PagePool, make_pool
from trellis.radix.policies import POLICIES
from trellis.radix.pool import SlotPool
from trellis.radix.results import Inserted, Match
from trellis.radix.snapshot import NodeView
from trellis.radix.tree import IntArray, Node

__all__ = [
    "POLICIES",
    "EvictionPolicy",
    "HeapPolicy",
    "Inserted",
    "IntArray",
    "InvariantError",
    "ListPolicy",
    "Match",
    "Node",
    "NodeView",
    "PagePool",
    "RadixCache",
    "SlotPool",
    "make_pool",
]
