"""Sampled tokens that the next step reads on the device, so that it can be launched before anybody has seen them."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenTable:
    """ids: int64 [rows]. A step's tokens stand from place 0 on, until the next step's are put there.

    One table is enough: the step that follows is launched before the one that overwrites, and the device keeps the order. Its
    memory never moves, so graphs read it.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)

    def put(self, ids: Tensor) -> range:
        """int64 [R] → their places. ValueError if there are more than the table has rows."""
        if len(ids) > len(self.ids):
            raise ValueError(f"{len(ids)} tokens were sampled in one step; the table holds {len(self.ids)}")
        self.ids[: len(ids)].copy_(ids)
        return range(len(ids))

    def fill_in(self, token_ids: Tensor, follows: Tensor) -> Tensor:
        """token_ids, follows: int64 [T] → int64 [T], with the token at place follows[i] where that is not negative.

        Where nothing possible was sampled (a negative id) any token will do, as the request is going to fail: it gets 0.
        """
        sampled = self.ids.index_select(0, follows.clamp(min=0)).clamp(min=0)
        return torch.where(follows < 0, token_ids, sampled)
