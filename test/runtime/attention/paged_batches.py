"""Batches whose slots are whole pages, as an allocator of pages would give them; some requests share a beginning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trellis.runtime.executor.batch import Batch, FlatBatch, flatten, pack
from trellis.runtime.executor.contract import Extend


def page_slots(random: np.random.Generator, free: list[int], tokens: int, page_size: int) -> np.ndarray:
    """Slots of so many tokens, in pages taken from ``free``."""
    pages = [free.pop(int(random.integers(len(free)))) for _ in range(-(-tokens // page_size))]
    slots = [page * page_size + i for page in pages for i in range(page_size)]
    return np.array(slots[:tokens], np.int32)


def extends_of(
    requests: Sequence[tuple[int, int, int]],
    shared: Sequence[int] = (),
    page_size: int = 1,
    slots: int = 4096,
    seed: int = 0,
) -> list[Extend]:
    """requests: (index into ``shared`` or -1, tokens of its own before, new tokens). shared: lengths of common beginnings."""
    random = np.random.default_rng(seed)
    free = list(range(1, (slots + 1) // page_size))
    common = [page_slots(random, free, n - n % page_size, page_size) for n in shared]
    extends = []
    for which, before, new in requests:
        prefix = common[which] if which >= 0 else np.empty(0, np.int32)
        own = page_slots(random, free, before + new, page_size)
        token_ids = random.integers(0, 10, new).astype(np.int32)
        extends.append(Extend(token_ids, len(prefix) + before, np.concatenate([prefix, own]), new - 1))
    return extends


def flat_batch(*args: object, **options: object) -> FlatBatch:
    return flatten(extends_of(*args, **options))  # type: ignore[arg-type]


def packed(*args: object, **options: object) -> Batch:
    return pack(extends_of(*args, **options), torch.device("cpu"))  # type: ignore[arg-type]
