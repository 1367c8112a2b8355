"""Where the keys and values of a batch lie, told as kernels of paged attention want it told.

A page is ``page_size`` neighbouring slots of the pool, and the first of them is a multiple of that: page p has the slots
p * page_size and on. The same memory can be read with any page size, since a pool's rows lie one after the other. The
layout is that of flashinfer's tables (https://docs.flashinfer.ai/tutorials/kv_layout.html); everything here is numpy, and
``Tables`` puts it on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trellis.runtime.executor.batch import FlatBatch
from trellis.runtime.executor.contract import IntArray


class MisalignedPages(ValueError):
    """A sequence's slots are not whole pages in order, so it can only be read with pages of one slot."""


@dataclass(frozen=True)
class PagedLayout:
    """The pages of B sequences, all int32 arrays.

    queries: [B + 1]; sequence b has the batch's rows queries[b] .. queries[b + 1] - 1.
    indptr: [B + 1]; its pages are indices[indptr[b] : indptr[b + 1]], in the order of its tokens.
    indices: [indptr[B]]. last_page_len: [B], slots of the last page that are its, 1 .. page_size; 0 where it has no page.
    """

    page_size: int
    queries: IntArray
    indptr: IntArray
    indices: IntArray
    last_page_len: IntArray

    @property
    def sequences(self) -> int:
        return len(self.last_page_len)

    @property
    def lengths(self) -> IntArray:
        """Keys of each sequence: int32 [B]."""
        pages = np.diff(self.indptr)
        full: IntArray = np.maximum(pages - 1, 0) * self.page_size + self.last_page_len
        return full.astype(np.int32)


def lay_out(batch: FlatBatch, page_size: int = 1) -> PagedLayout:
    """Raises MisalignedPages if some sequence's slots do not fill pages of that size from their beginning."""
    return pages_of(sequence_bounds(batch), batch.slots, indptr_of(batch.lengths), page_size)


def pages_of(bounds: IntArray, slots: IntArray, queries: IntArray, page_size: int) -> PagedLayout:
    """The layout of sequences whose tokens lie in slots[bounds[b] : bounds[b + 1]]. Raises MisalignedPages."""
    lengths = np.diff(bounds)
    if page_size == 1:
        return PagedLayout(1, queries, bounds, slots, np.minimum(lengths, 1).astype(np.int32))
    places = token_places(lengths)
    _check_aligned(bounds, slots, places, page_size)
    indices = slots[places % page_size == 0] // page_size
    last = np.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
    return PagedLayout(
        page_size,
        queries,
        indptr_of(-(-lengths // page_size)),
        indices.astype(np.int32),
        last.astype(np.int32),
    )


def sequence_bounds(batch: FlatBatch) -> IntArray:
    """int32 [B + 1]: sequence b's slots are ``batch.slots[bounds[b] : bounds[b + 1]]``."""
    return indptr_of(batch.starts + batch.lengths)


def indptr_of(counts: IntArray) -> IntArray:
    """Where each of so many things begins, and the last one ends: int32 [len(counts) + 1]."""
    bounds = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def token_places(lengths: IntArray) -> IntArray:
    """0 .. length - 1 of each sequence, one after the other."""
    bounds = indptr_of(lengths)
    places: IntArray = np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], lengths)
    return places


def view_as_pages(rows: Tensor, page_size: int) -> Tensor:
    """A pool's tensor of a layer, [rows, G, D], as whole pages [pages, page_size, G, D]; the same memory. Rows beyond
    the last whole page are not in it."""
    pages = len(rows) // page_size
    return rows[: pages * page_size].view(pages, page_size, *rows.shape[1:])


def _check_aligned(bounds: IntArray, slots: IntArray, places: IntArray, page_size: int) -> None:
    within = places % page_size
    wrong = slots % page_size != within
    wrong[1:] |= (within[1:] > 0) & (slots[1:] - within[1:] != slots[:-1] - within[:-1])  # in another page
    if wrong.any():
        at = int(wrong.argmax())
        sequence = int(np.searchsorted(bounds, at, "right")) - 1
        raise MisalignedPages(
            f"sequence {sequence}: its token {places[at]} is in slot {slots[at]}; with pages of {page_size} slots, token i "
            f"must be in slot {page_size} * page + i % {page_size}, with one page for every {page_size} tokens"
        )


@dataclass(frozen=True)
class Tables:
    """A layout for a device. queries, indptr and last_page_len stay on the host, where plans are made; indices are on the
    device. All int32."""

    queries: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor

    @staticmethod
    def of(layout: PagedLayout, device: torch.device, indices: Tensor | None = None) -> Tables:
        """indices: int32 on the device, if they are there already."""
        if indices is None:
            indices = host_tensor(layout.indices, device).to(device, non_blocking=True)
        host = (
            host_tensor(values, device) for values in (layout.queries, layout.indptr, layout.last_page_len)
        )
        queries, indptr, last = host
        return Tables(queries, indptr, indices, last)


def host_tensor(values: IntArray, device: torch.device) -> Tensor:
    """int32 on the host, pinned if ``device`` is a GPU, so that a copy to it does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor
