"""What flashinfer's wrappers do, in plain torch on any device: the same names, arguments, demands and results.

It stands in for the library in tests, so that the whole backend runs where the library cannot. It computes what
flashinfer documents (https://docs.flashinfer.ai, 0.2 to 0.7) from nothing but the tensors that it is given, in the order of
its own arguments, and refuses what the kernels cannot take: tensors of other types, shapes, devices or sizes, ``run``
before ``plan``, batches beyond what a graph was captured for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pages = tuple[Tensor, Tensor]
"""Keys and values, each [pages, page_size, G, D] (the layout NHD)."""

SHARED_QUERIES = (1, 2, 3, 4, 8)  # heads of a key head, for the decode kernel without tensor cores


@dataclass(frozen=True)
class _Plan:
    queries: Tensor  # on the host, as ``indptr`` and ``last``
    indptr: Tensor
    last: Tensor
    indices: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    window_left: int
    soft_cap: float
    scale: float | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


class _Wrapper:
    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        _demand(workspace.dtype is torch.uint8 and workspace.dim() == 1, "the workspace is a row of bytes")
        _demand(workspace.data_ptr() % 16 == 0, "the workspace begins at a multiple of 16 bytes")
        _demand(kv_layout == "NHD", "this reference has the layout NHD only")
        self.device = workspace.device
        self._plan: _Plan | None = None

    def _run(self, q: Tensor, paged_kv_cache: Pages) -> tuple[Tensor, Tensor]:
        plan = self._plan
        if plan is None:
            raise RuntimeError("plan() comes before run()")
        keys, values = paged_kv_cache
        _demand(q.device == self.device == keys.device == values.device, "all on one device")
        _demand(q.dtype is plan.q_dtype and keys.dtype is values.dtype is plan.kv_dtype, "the planned dtypes")
        _demand(q.shape[1:] == (plan.heads, plan.head_dim), f"q is [T, heads, head_dim], not {q.shape}")
        _demand(
            len(q) == int(plan.queries[-1]), f"{len(q)} queries where {int(plan.queries[-1])} are planned"
        )
        page = (plan.page_size, plan.kv_heads, plan.head_dim)
        _demand(keys.shape[1:] == values.shape[1:] == page, f"pages are {page}, not {keys.shape[1:]}")
        _demand(keys.stride() == values.stride(), "keys and values have the same strides")
        _demand(q.stride(-1) == keys.stride(-1) == 1, "heads lie in one piece")
        return attend(plan, q, keys, values)

    def _check_tables(
        self, queries: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, page_size: int
    ) -> None:
        for name, table in (
            ("qo_indptr", queries),
            ("indptr", indptr),
            ("indices", indices),
            ("last_page_len", last),
        ):
            _demand(table.dtype is torch.int32, f"{name} is int32, not {table.dtype}")
            _demand(table.dim() == 1, f"{name} has one dimension")
        _demand(
            len(indptr) == len(queries) == len(last) + 1, "one sequence more in indptr than in last_page_len"
        )
        pages = indptr.diff()
        _demand(bool((pages >= 0).all() and (queries.diff() >= 0).all()), "indptr never falls")
        _demand(int(indptr[0]) == 0 == int(queries[0]), "indptr begins with 0")
        _demand(
            len(indices) == int(indptr[-1]), f"{len(indices)} pages where indptr ends with {int(indptr[-1])}"
        )
        full = (last >= 1) & (last <= page_size)
        _demand(
            bool(torch.where(pages.cpu() > 0, full.cpu(), last.cpu() == 0).all()),
            f"last_page_len {last.tolist()}",
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Queries of several tokens a sequence; the last query stands at the last key."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,  # noqa: ARG002 - the library's
    ) -> None:
        self._check_tables(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        _demand(num_qo_heads % num_kv_heads == 0, "queries share key heads evenly")
        q_dtype = torch.float16 if isinstance(q_data_type, str) else q_data_type
        self._plan = _Plan(
            qo_indptr.cpu(),
            paged_kv_indptr.cpu(),
            paged_kv_last_page_len.cpu(),
            paged_kv_indices.to(self.device),
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            causal,
            window_left,
            logits_soft_cap or 0.0,
            sm_scale,
            q_dtype,
            kv_data_type or q_dtype,
        )

    def run(
        self, q: Tensor, paged_kv_cache: Pages, *, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q: [T, H, D] → the same, and the sums of exponentials, float32 [T, H], as logarithms to base 2."""
        out, lse = self._run(q, paged_kv_cache)
        return (out, lse) if return_lse else out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """One query a sequence. With ``use_cuda_graph`` the tables are copied to the given buffers, whose sizes are fixed."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self._tensor_cores = use_tensor_cores
        self._buffers: tuple[Tensor, Tensor, Tensor] | None = None
        if use_cuda_graph:
            indptr, indices, last = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            if indptr is None or indices is None or last is None:
                raise ValueError("graphs need buffers for indptr, indices and last_page_len")
            _demand(len(indptr) == len(last) + 1, "the indptr buffer has one place more than last_page_len")
            for buffer in (indptr, indices, last):
                _demand(
                    buffer.dtype is torch.int32 and buffer.device == self.device,
                    "buffers are int32 on the device",
                )
            self._buffers = indptr, indices, last

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,  # noqa: ARG002 - the library's
    ) -> None:
        sequences = len(last_page_len)
        queries = torch.arange(sequences + 1, dtype=torch.int32)
        self._check_tables(queries, indptr, indices, last_page_len, page_size)
        _demand(
            self._tensor_cores or num_qo_heads // num_kv_heads in SHARED_QUERIES,
            "this ratio needs tensor cores",
        )
        indices = indices.to(self.device)
        if self._buffers is not None:
            fixed = self._buffers
            _demand(sequences == len(fixed[2]), f"{sequences} sequences where {len(fixed[2])} were captured")
            _demand(len(indices) <= len(fixed[1]), f"{len(indices)} pages in a buffer of {len(fixed[1])}")
            fixed[0].copy_(indptr)
            fixed[1][: len(indices)].copy_(indices)
            fixed[2].copy_(last_page_len)
            indices = fixed[1]
        q_dtype = torch.float16 if isinstance(q_data_type, str) else q_data_type
        self._plan = _Plan(
            queries,
            indptr.cpu(),
            last_page_len.cpu(),
            indices,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            False,
            window_left,
            logits_soft_cap or 0.0,
            sm_scale,
            q_dtype,
            kv_data_type or q_dtype,
        )

    def run(self, q: Tensor, paged_kv_cache: Pages) -> Tensor:
        """q: [B, H, D] → the same."""
        return self._run(q, paged_kv_cache)[0]


class MultiLevelCascadeAttentionWrapper:
    """A prefill wrapper for each level; only the last one is causal, and the results are merged."""

    def __init__(self, num_levels: int, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout) for _ in range(num_levels)
        ]

    def plan(
        self,
        qo_indptr_arr: Sequence[Tensor],
        paged_kv_indptr_arr: Sequence[Tensor],
        paged_kv_indices_arr: Sequence[Tensor],
        paged_kv_last_page_len: Sequence[Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
    ) -> None:
        tables = zip(
            qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, strict=True
        )
        for level, (wrapper, table) in enumerate(zip(self._levels, tables, strict=True)):
            wrapper.plan(
                *table,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == len(self._levels) - 1,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
            )

    def run(self, q: Tensor, paged_kv_cache: Pages) -> Tensor:
        """q: [T, H, D] → the same."""
        parts = [level._run(q, paged_kv_cache) for level in self._levels]
        return merged([out for out, _ in parts], [lse for _, lse in parts]).to(q.dtype)


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Pages,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write keys and values [T, G, D] where the tables say: entry i is token ``positions[i]`` of ``batch_indices[i]``."""
    _demand(kv_layout == "NHD", "this reference has the layout NHD only")
    keys, values = paged_kv_cache
    for table in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        _demand(table.dtype is torch.int32 and table.device == keys.device, "tables are int32 on the device")
        _demand(table.is_contiguous() and table.dim() == 1, "tables lie in one piece")
    _demand(append_key.dtype is append_value.dtype is keys.dtype is values.dtype, "one dtype")
    _demand(append_key.shape == append_value.shape, "as many keys as values")
    _demand(len(batch_indices) == len(positions) == len(append_key), "a place for each key")
    _demand(len(kv_indptr) == len(kv_last_page_len) + 1, "one place more in indptr than in last_page_len")
    page_size = keys.shape[1]
    page = kv_indices[(kv_indptr[batch_indices] + positions // page_size).long()].long()
    keys[page, (positions % page_size).long()] = append_key
    values[page, (positions % page_size).long()] = append_value


def attend(plan: _Plan, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """([T, H, D] in q's dtype, float32 [T, H]): sequence by sequence, in float32; zeros and -inf where there is no key."""
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, device=q.device)
    scale = plan.head_dim**-0.5 if plan.scale is None else plan.scale
    for b in range(len(plan.last)):
        rows = slice(int(plan.queries[b]), int(plan.queries[b + 1]))
        pages = plan.indices[int(plan.indptr[b]) : int(plan.indptr[b + 1])].long()
        length = max(0, len(pages) - 1) * plan.page_size + int(plan.last[b])
        if length == 0 or rows.start == rows.stop:
            continue
        k, v = (
            pool[pages].flatten(0, 1)[:length].float().repeat_interleave(plan.heads // plan.kv_heads, 1)
            for pool in (keys, values)
        )  # [length, H, D]
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
        if plan.soft_cap > 0:
            scores = plan.soft_cap * torch.tanh(scores / plan.soft_cap)
        seen = _seen(plan, rows.stop - rows.start, length).to(q.device)
        scores = scores.masked_fill(~seen, -math.inf)
        lse[rows] = (scores.logsumexp(-1) / math.log(2)).T
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), v).to(q.dtype)
    return out, lse


def _seen(plan: _Plan, queries: int, keys: int) -> Tensor:
    """bool [queries, keys]; query i stands at key ``keys - queries + i``."""
    own = torch.arange(keys - queries, keys)[:, None]
    key = torch.arange(keys)
    seen = key <= own if plan.causal else torch.ones(queries, keys, dtype=torch.bool)
    return seen & (key >= own - plan.window_left) if plan.window_left >= 0 else seen


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Results of attention over disjoint keys, as one of all keys: float32."""
    lse = torch.stack(list(lses))  # [levels, T, H]
    weights = torch.exp2(lse - lse.amax(0)).nan_to_num()
    weights = weights / weights.sum(0)
    return (torch.stack(list(outs)).float() * weights[..., None]).sum(0)


def _demand(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(f"flashinfer demands: {text}")
