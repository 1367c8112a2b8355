"""What the language asks of a backend. Everything is asynchronous; the language owns the event loop.

Cancelling the task that awaits ``generate`` or iterates ``stream`` must abort the request at the backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from trellis.chat_format import ChatFormat as ChatFormat
from trellis.errors import InvalidRequestError
from trellis.frontend.backends.conversation import Conversation
from trellis.frontend.backends.samples import generate_each, stream_each
from trellis.frontend.backends.surplus import Surplus

if TYPE_CHECKING:
    from trellis.frontend.price import Price

B = TypeVar("B", bound="Backend")

Segment = str | tuple[int, ...]
"""A piece of a prompt: text, or token ids that the model produced earlier (kept, so that they hit the cache)."""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling of one gen, all values resolved. See ``trellis.gen`` for their meaning. A backend that cannot do what
    is not the default refuses it with InvalidRequestError.

    logit_bias: (token id, what is added to its logit).
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Constraint:
    """kind: ``regex`` | ``choices`` | ``schema`` | ``grammar``.

    source: the pattern, a JSON array of the options, the JSON schema's text, or the grammar's text.
    spacing (``spaced`` | ``compact`` | ``any``), strict: for ``schema`` (see ``trellis.gen``).
    """

    kind: str
    source: str
    spacing: str = "spaced"
    strict: bool = True


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to generate. prompt: adjacent segments are never both text.

    token_healing: the last tokens of a prompt that ends in text may be written again, where a longer token could
        stand (``Completion.healed_characters``).
    conversation: the prompt as messages; only for a backend that ``speaks_messages``.
    spec_tokens, surplus: at least so many tokens may be asked for at once, and what an earlier answer wrote beyond
        its end and the prompt has not contradicted since (API speculative execution; others ignore them).
    """

    prompt: tuple[Segment, ...]
    sampling: SamplingOptions
    constraint: Constraint | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_healing: bool = False
    conversation: Conversation | None = None
    spec_tokens: int = 0
    surplus: Surplus | None = None


@dataclass(frozen=True)
class Counts:
    """Where the tokens came from (see the runtime's ``Counts``)."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    forward_passes: int = 0


@dataclass(frozen=True)
class Completion:
    """The whole answer to a ``GenerateRequest``.

    finish_reason: ``stop`` | ``length``. matched: the stop string, stop regex or token id, if one ended the text.
    token_ids: all output tokens. The first kept_tokens of them spell ``text`` but for ``tail_text``.
    healed_characters: before that they spell so many characters again that end the prompt's text.
    truncated_tokens: how many the prompt lost at its beginning, by a server that cuts what is too long.
    logprobs: one an output token, when asked for.
    forced_spans: parts text[start:end] that the constraint left no choice about: they were not sampled.
    grammar_engine, validated_only, constraint_warnings: of a constrained request; see ``Meta``.
    surplus: what an API wrote beyond the text (see ``GenerateRequest``). saved_prompt_tokens: of an answer that comes
        out of a surplus, the prompt tokens that no call had to send again; None for all others.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    matched: str | int | None = None
    counts: Counts = Counts()
    kept_tokens: int = 0
    tail_text: str = ""
    healed_characters: int = 0
    truncated_tokens: int = 0
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    forced_spans: tuple[tuple[int, int], ...] = ()
    grammar_engine: str | None = None
    validated_only: tuple[str, ...] = ()
    constraint_warnings: tuple[str, ...] = ()
    surplus: Surplus | None = None
    saved_prompt_tokens: int | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: new text; ``final`` on the last one (its text is the whole text)."""

    text: str
    final: Completion | None = None


@dataclass(frozen=True)
class OptionScore:
    """One option of a select: its own tokens after the boundary common to all options, and their logprobs.

    unconditional: the logprobs of the same tokens without the prompt, when asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ScoreResult:
    """One ``OptionScore`` an option, in order; counts are summed over the options."""

    options: tuple[OptionScore, ...]
    counts: Counts = Counts()


@dataclass(frozen=True)
class ModelInfo:
    model: str
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    context_length: int | None = None


class Backend(ABC):
    """Where gens run. Subclasses: Engine (in process), RuntimeEndpoint (HTTP), OpenAI, Anthropic and LiteLLM (APIs of
    others), MockBackend (tests)."""

    price: Price | None = None
    """Of its tokens, for ``state.report()``; set it on a backend whose tokens cost something."""

    speaks_messages: bool = False
    """Prompts go out as messages of roles (``GenerateRequest.conversation``), and ``select`` lets the model choose."""

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """Asked once a program; implementations cache it."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises BackendError, InvalidRequestError, ConstraintError, CapacityError, RequestAborted."""

    @abstractmethod
    def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """As generate, piece by piece; the last chunk carries ``final``."""

    @abstractmethod
    async def score(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        """Log-probabilities of every option after the prompt, tokenised jointly with it."""

    async def score_unconditionally(
        self,
        prompt: tuple[Segment, ...],  # noqa: ARG002
        options: Sequence[str],  # noqa: ARG002
    ) -> ScoreResult:
        """As ``score``, with each option's tokens scored without the prompt as well. Not every backend can."""
        reason = f"'unconditional' needs scores without the prompt, which {type(self).__name__} does not give"
        raise InvalidRequestError("select.method", f"{reason}; use 'mean', 'sum' or 'greedy'")

    async def samples(self, request: GenerateRequest, n: int) -> list[Completion]:
        """n answers to one request; they share the prompt. Sample i has the seed of the request plus i, if any."""
        return await generate_each(self, request, n)

    def stream_samples(self, request: GenerateRequest, n: int) -> AsyncIterator[tuple[int, Chunk]]:
        """``samples``, piece by piece: (index of the sample, chunk)."""
        return stream_each(self, request, n)

    async def cache_prefix(self, prompt: tuple[Segment, ...]) -> None:
        """Compute and cache the prompt, so that the requests that follow share it."""
        await self.generate(GenerateRequest(prompt, SamplingOptions(max_new_tokens=0)))

    async def flush_cache(self) -> None:  # noqa: B027 (not every backend has a cache)
        """Forget every cached prefix that no request uses."""

    async def server_info(self) -> dict[str, object]:
        """Statistics of the runtime, for people."""
        return {}

    def close(self) -> None:  # noqa: B027 (not every backend holds something)
        """Release what the backend holds; idempotent."""

    def __enter__(self: B) -> B:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
