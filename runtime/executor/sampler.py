"""Drawing the next tokens of a batch.

What a row draws depends on nothing but its logits, its parameters, its seed and its step: the path taken through this
file is chosen by each row for itself, never by the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trellis.runtime.executor.adjust import adjust
from trellis.runtime.executor.contract import Sampled, SampleRow
from trellis.runtime.executor.philox import uniforms
from trellis.runtime.messages import TopLogprobs

# So many best tokens nearly always hold a top-p share; finding them costs a fraction of sorting a vocabulary.
CANDIDATES = 1024


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """One token a row. logits: float32 [N, vocab], overwritten; row i belongs to ``rows[i]`` (``row.row`` is not looked
    at here)."""
    reported = [i for i, row in enumerate(rows) if row.want_logprob or row.top_logprobs_num > 0]
    raw = logits[reported] if reported else None  # a copy, before anything is changed
    adjust(logits, rows)
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    greedy = [i for i, row in enumerate(rows) if is_greedy(row)]
    drawn = [i for i, row in enumerate(rows) if not is_greedy(row)]
    if greedy:
        ids[greedy] = (logits if len(greedy) == len(rows) else logits[greedy]).argmax(-1)
    if drawn:
        ids[drawn] = draw(logits[drawn], [rows[i] for i in drawn])
    chosen = ids.tolist()
    logprobs: list[float | None] = [None] * len(rows)
    top: list[TopLogprobs | None] = [None] * len(rows)
    if raw is not None:
        count = max(rows[i].top_logprobs_num for i in reported)
        values, alternatives = token_logprobs(raw, [chosen[i] for i in reported], count)
        for i, value, others in zip(reported, values, alternatives, strict=True):
            logprobs[i] = value if rows[i].want_logprob else None
            top[i] = others[: rows[i].top_logprobs_num] if rows[i].top_logprobs_num > 0 else None
    return Sampled(chosen, logprobs, top)


def is_greedy(row: SampleRow) -> bool:
    return row.params.temperature == 0 or row.params.top_k == 1


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], top: int
) -> tuple[list[float], list[TopLogprobs]]:
    """log-softmax of one token a row, and the ``top`` best of each row, best first. logits: float32 [N, vocab]."""
    total = logits.logsumexp(-1, keepdim=True)
    wanted = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    values = (logits.gather(1, wanted) - total)[:, 0].tolist()
    if top <= 0:
        return values, [[] for _ in token_ids]
    best, ids = logits.topk(min(top, logits.shape[1]), dim=-1)
    pairs = zip(ids.tolist(), (best - total).tolist(), strict=True)
    return values, [list(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Temperature, top-k, top-p, min-p, then one draw a row by inverting the cumulative distribution: int64 [N]."""
    vocab = logits.shape[1]
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    scaled = logits - logits.amax(-1, keepdim=True)
    scaled /= _column([row.params.temperature for row in rows], logits)
    random = torch.from_numpy(uniforms([row.seed for row in rows], [row.step for row in rows])).to(
        logits.device
    )
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    free = [i for i, row in enumerate(rows) if not _is_limited(row, vocab)]
    if free:
        min_p = _column([rows[i].params.min_p for i in free], logits)
        ids[free] = _invert(_drop_improbable(scaled[free].softmax(-1), min_p), random[free])
    limited = [i for i, row in enumerate(rows) if _is_limited(row, vocab)]
    if limited:
        ids[limited] = _draw_limited(scaled[limited], [rows[i] for i in limited], random[limited])
    return ids


def _is_limited(row: SampleRow, vocab: int) -> bool:
    return 0 < row.params.top_k < vocab or row.params.top_p < 1


def _draw_limited(logits: Tensor, rows: Sequence[SampleRow], random: Tensor) -> Tensor:
    """Rows with top-k or top-p: among their best candidates, or all tokens in order where those do not suffice."""
    vocab = logits.shape[1]
    total = logits.logsumexp(-1, keepdim=True)
    best, tokens = logits.topk(min(CANDIDATES, vocab), dim=-1)
    probs = (best - total).exp()
    share = probs.sum(-1).tolist()
    enough = [
        0 < row.params.top_k <= best.shape[1] or best.shape[1] == vocab or row.params.top_p < share[i]
        for i, row in enumerate(rows)
    ]
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    few = [i for i, value in enumerate(enough) if value]
    if few:
        kept = filter_ordered(probs[few], [rows[i] for i in few], vocab)
        ids[few] = tokens[few].gather(1, _invert(kept, random[few])[:, None])[:, 0]
    for i in [
        i for i, value in enumerate(enough) if not value
    ]:  # one at a time: rare, and a sort needs memory
        ordered, order = logits[i : i + 1].sort(dim=-1, descending=True, stable=True)
        kept = filter_ordered((ordered - total[i]).exp(), [rows[i]], vocab)
        ids[i] = order[0, _invert(kept, random[i : i + 1])[0]]
    return ids


def filter_ordered(probs: Tensor, rows: Sequence[SampleRow], vocab: int) -> Tensor:
    """Zero what top-k, then top-p of what is left, then min-p leave out. probs: [N, C], best first; shares of the
    whole vocabulary. Returns float64."""
    limits = [row.params.top_k if 0 < row.params.top_k < vocab else vocab for row in rows]
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = probs.double() * (rank < torch.tensor(limits, device=probs.device)[:, None])
    # With top-k, top-p is a share of the k tokens' mass; without, of everything (also of what is past the candidates).
    mass = torch.tensor([limit < vocab for limit in limits], device=probs.device)[:, None]
    total = torch.where(mass, kept.sum(-1, keepdim=True), 1.0)
    before = kept.cumsum(-1) - kept  # mass of the better tokens
    top_p = _column([row.params.top_p for row in rows], kept)
    kept = kept * ((before < top_p * total) | (top_p >= 1))
    return _drop_improbable(kept, _column([row.params.min_p for row in rows], kept))


def _drop_improbable(probs: Tensor, min_p: Tensor) -> Tensor:
    return probs * (probs >= min_p * probs.amax(-1, keepdim=True))


def _invert(weights: Tensor, random: Tensor) -> Tensor:
    """Index drawn in proportion to the weights: the first whose cumulative weight exceeds random * total."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    index = torch.searchsorted(cumulative, random[:, None] * total, right=True)
    # Rounding may put the target on the total itself: then it is the last index that has any weight.
    last = (cumulative >= total).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.minimum(index, last)[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
