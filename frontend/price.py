"""What tokens cost."""

from __future__ import annotations

from dataclasses import dataclass

from trellis.errors import InvalidRequestError
from trellis.frontend.backends.base import Counts

_UNIT = 1_000_000


@dataclass(frozen=True)
class Price:
    """Of a million tokens, in any currency: of the prompt, of the answer (sampled or forced), and of prompt tokens that
    were found in a cache (None: as much as any others). Raises InvalidRequestError for one below 0."""

    prompt: float
    answer: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "answer", "cached"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InvalidRequestError(f"Price.{name}", f"must be at least 0, got {value!r}")

    def of(self, counts: Counts) -> float:
        """What a request cost."""
        cached = self.prompt if self.cached is None else self.cached
        fresh = counts.prompt_tokens - counts.cached_tokens
        spent = fresh * self.prompt + counts.cached_tokens * cached + counts.completion_tokens * self.answer
        return spent / _UNIT
