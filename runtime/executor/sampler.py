"""Drawing the next tokens of a batch.

What a row draws depends on nothing but its logits, its parameters, its seed and its step: the path taken through this
file is chosen by each row for itself, never by the batch. And since logits differ in their last bits from batch to
batch, a draw is a race of the tokens, each with noise of its own (see ``race``): such a difference changes the
winner only where two tokens are as close as that. Inverting the cumulative distribution, as is more usual, moves
the boundaries of all tokens at once; on flat distributions one draw in 300 came out differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trellis.runtime.executor.adjust import adjust
from trellis.runtime.executor.contract import NO_TOKEN, Sampled, SampleRow
from trellis.runtime.executor.noise import gumbel
from trellis.runtime.messages import TopLogprobs

# So many best tokens nearly always hold a top-p share; finding them costs a fraction of sorting a vocabulary.
CANDIDATES = 1024


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """One token a row. logits: float32 [N, vocab], overwritten; row i belongs to ``rows[i]`` (``row.row`` is not looked
    at here). The token of a row that has no finite best logit is ``NO_TOKEN``."""
    reported = [i for i, row in enumerate(rows) if row.want_logprob or row.top_logprobs_num > 0]
    raw = logits[reported] if reported else None  # a copy, before anything is changed
    adjust(logits, rows)
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    greedy = [i for i, row in enumerate(rows) if is_greedy(row)]
    drawn = [i for i, row in enumerate(rows) if not is_greedy(row)]
    if greedy:
        best = (logits if len(greedy) == len(rows) else logits[greedy]).max(-1)
        ids[greedy] = best.indices.masked_fill(~best.values.isfinite(), NO_TOKEN)
    if drawn:
        ids[drawn] = draw(logits[drawn], [rows[i] for i in drawn])
    chosen = ids.tolist()
    logprobs: list[float | None] = [None] * len(rows)
    top: list[TopLogprobs | None] = [None] * len(rows)
    if raw is not None:
        count = max(rows[i].top_logprobs_num for i in reported)
        values, alternatives = token_logprobs(raw, [max(chosen[i], 0) for i in reported], count)
        for i, value, others in zip(reported, values, alternatives, strict=True):
            if chosen[i] == NO_TOKEN:
                continue
            logprobs[i] = value if rows[i].want_logprob else None
            top[i] = others[: rows[i].top_logprobs_num] if rows[i].top_logprobs_num > 0 else None
    return Sampled(chosen, logprobs, top)


def is_greedy(row: SampleRow) -> bool:
    return row.params.temperature == 0 or row.params.top_k == 1


def is_plain(row: SampleRow) -> bool:
    """Whether nothing but the row's mask stands between its logits and its token: a greedy choice without reports."""
    reported = row.want_logprob or row.top_logprobs_num > 0
    changed = row.history is not None or len(row.forbidden) > 0 or bool(row.params.logit_bias)
    return is_greedy(row) and not reported and not changed


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
    """Temperature, top-k, top-p, min-p, then one draw a row: int64 [N]."""
    vocab = logits.shape[1]
    best = logits.amax(-1, keepdim=True)
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    scaled = (logits - best) / _column([row.params.temperature for row in rows], logits)
    ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    free = [i for i, row in enumerate(rows) if not _is_limited(row, vocab)]
    if free:
        some = scaled[free]  # best 0, so min-p is a floor
        floor = _column([row.params.min_p for row in rows], logits)[free].log()
        ids[free] = race(some.masked_fill(some < floor, -math.inf), None, [rows[i] for i in free])
    limited = [i for i, row in enumerate(rows) if _is_limited(row, vocab)]
    if limited:
        ids[limited] = _draw_limited(scaled[limited], [rows[i] for i in limited])
    return ids.masked_fill(~best[:, 0].isfinite(), NO_TOKEN)


def race(log_weights: Tensor, tokens: Tensor | None, rows: Sequence[SampleRow]) -> Tensor:
    """A token a row, drawn in proportion to the weights: the best of log weight + Gumbel noise (Gumbel 1954).

    log_weights: [N, C]. tokens: int64 [N, C], which token each column is; None where column i is token i. The noise
    of a token is a function of (seed, step, token), so neither its column nor the other rows matter.
    """
    count = log_weights.shape[1]
    noise = [
        gumbel(row.seed, row.step, np.arange(count) if tokens is None else tokens[i].cpu().numpy())
        for i, row in enumerate(rows)
    ]
    winner = (log_weights + torch.from_numpy(np.stack(noise)).to(log_weights)).argmax(-1)
    return winner if tokens is None else tokens.gather(1, winner[:, None])[:, 0]


def _is_limited(row: SampleRow, vocab: int) -> bool:
    return 0 < row.params.top_k < vocab or row.params.top_p < 1


def _draw_limited(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
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
        some = [rows[i] for i in few]
        ids[few] = race(filter_ordered(probs[few], some, vocab).log(), tokens[few], some)
    for i in [
        i for i, value in enumerate(enough) if not value
    ]:  # one at a time: rare, and a sort needs memory
        ordered, order = logits[i : i + 1].sort(dim=-1, descending=True, stable=True)
        kept = filter_ordered((ordered - total[i]).exp(), [rows[i]], vocab)
        ids[i] = race(kept.log(), order, [rows[i]])[0]
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


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
