"""Which part of a decoder each rank holds. Plain arithmetic, without torch.

As in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): the products that make heads and the inner layer of the MLP are
split by outputs, those that take them back to the hidden size by inputs, so that a layer needs two sums over the ranks.
The embedding and the head are split by tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trellis.errors import ModelLoadError
from trellis.runtime.models.config import ModelConfig

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """Stretches [first, end) of one axis of a tensor, one after the other."""

    axis: int
    ranges: Ranges

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.ranges)


@dataclass(frozen=True)
class Split:
    """The part of one rank. Raises ModelLoadError for a model that cannot be split into so many.

    Each rank has as many query heads as the others, and the key/value heads that these read. Where several ranks read one,
    each has a copy (as with more ranks than key/value heads). Where the query heads of a rank begin or end in the middle of
    those that share a key/value head, a rank may hold one twice, so that all of its heads share evenly.
    """

    whole: ModelConfig
    rank: int
    size: int

    def __post_init__(self) -> None:
        c = self.whole
        for what, count in (("attention heads", c.num_heads), ("MLP columns", c.intermediate_size)):
            if count % self.size:
                raise ModelLoadError(
                    f"the model's {count} {what} cannot be split evenly among {self.size} ranks; "
                    f"tensor parallel sizes that fit: {', '.join(map(str, fitting_sizes(c)))}"
                )

    @property
    def local(self) -> ModelConfig:
        """The config of this rank's part, for pools, attention and products. The vocabulary stays whole."""
        c = self.whole
        return replace(
            c,
            num_heads=c.num_heads // self.size,
            num_kv_heads=len(self.kv_heads),
            intermediate_size=c.intermediate_size // self.size,
        )

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """The model's key/value heads that this rank holds, one for each group of its query heads."""
        c, heads = self.whole, self.whole.num_heads // self.size
        sharing = c.num_heads // c.num_kv_heads
        group = math.gcd(
            sharing, heads
        )  # both the ranks and the key/value heads divide the query heads at multiples of it
        first = self.rank * heads
        return tuple((first + at) // sharing for at in range(0, heads, group))

    def queries(self, axis: int) -> Part:
        """Of an axis of all query heads, one after the other."""
        return self._share(axis, self.whole.query_size)

    def keys(self, axis: int) -> Part:
        """Of an axis of all key/value heads."""
        width = self.whole.head_dim
        return Part(axis, tuple((head * width, (head + 1) * width) for head in self.kv_heads))

    def inner(self, axis: int) -> Part:
        """Of an axis of the MLP's inner layer."""
        return self._share(axis, self.whole.intermediate_size)

    @property
    def vocab_rows(self) -> int:
        """Rows of this rank's embedding and head; the last ranks may have rows that stand for no token."""
        return -(-self.whole.vocab_size // self.size)

    def tokens(self) -> Part:
        """Rows of the embedding and of the head."""
        first, end = (min(at * self.vocab_rows, self.whole.vocab_size) for at in (self.rank, self.rank + 1))
        return Part(0, ((first, end),))

    def once(self, part: Part) -> Part:
        """All of it on rank 0 and nothing on the others: what is added to a sum over the ranks."""
        return part if self.rank == 0 else Part(part.axis, ())

    def _share(self, axis: int, total: int) -> Part:
        width = total // self.size
        return Part(axis, ((self.rank * width, (self.rank + 1) * width),))


def fitting_sizes(config: ModelConfig) -> list[int]:
    """Into how many ranks the model can be split."""
    both = math.gcd(config.num_heads, config.intermediate_size)
    return [size for size in range(1, both + 1) if both % size == 0]


def local_kv_size(config: ModelConfig, size: int) -> int:
    """Values of a token's keys (or values) in a layer, on each rank. Raises ModelLoadError as ``Split`` does."""
    return Split(config, 0, size).local.kv_size
