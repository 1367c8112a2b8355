"""A backend without a model: answers come from the test, and every request is kept to be looked at."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trellis.errors import BackendError
from trellis.frontend.backends.base import (
    Backend,
    ChatFormat,
    Chunk,
    Completion,
    Counts,
    GenerateRequest,
    ModelInfo,
    OptionScore,
    SamplingOptions,
    ScoreResult,
    Segment,
)


@dataclass(frozen=True)
class MockAnswer:
    """text (a Completion is passed on as it is), then error if there is one: a streamed gen shows the text first.
    latency: seconds before the answer (infinity hangs until it is cancelled); None is the backend's."""

    text: str | Completion = ""
    error: Exception | None = None
    latency: float | None = None


Answer = str | Completion | Exception | MockAnswer
Answers = Answer | Sequence[Answer] | Callable[[GenerateRequest], Answer | Awaitable[Answer]]
Rows = Sequence[Sequence[float]]
Scores = Mapping[str, float] | Callable[[str, Sequence[str]], Rows | Awaitable[Rows]]


class MockBackend(Backend):
    """answers: one answer for every gen; a list, taken in the order of the requests; or a function of the request
        (plain or async). An exception is raised. Without answers a gen with choices takes the first, one with
        another constraint is an error, and any other says ``mock``.
    scores: log-probability of each option by its text, or a function of prompt text and options (plain or async)
        that returns token log-probabilities for each option. Without scores the first option wins.
    alone: the same for options without their prompt, as ``method="unconditional"`` wants them; the prompt is then "".

    Its tokens are words with the blanks before them. Stop strings, stop patterns and max_new_tokens cut the answer. An answer that
    breaks its regex or choices, or is not JSON where a schema is given, is a BackendError. Safe to use from
    several threads.

    requests, score_requests: all that came, in order. cancelled: how many gens and selects were cancelled.
    active: how many are under way; peak: the most there were at a time.
    """

    def __init__(
        self,
        answers: Answers | None = None,
        *,
        scores: Scores | None = None,
        alone: Scores | None = None,
        chat_format: ChatFormat | None = None,
        latency: float = 0.0,
    ) -> None:
        self._answers = answers
        self._next_answer = 0
        self._scores = scores
        self._alone = alone
        self._chat_format = chat_format or ChatFormat()
        self._latency = latency
        self._lock = threading.Lock()
        self._words: list[str] = []
        self._ids: dict[str, int] = {}
        self.requests: list[GenerateRequest] = []
        self.score_requests: list[tuple[tuple[Segment, ...], tuple[str, ...]]] = []
        self.cancelled = 0
        self.active = 0
        self.peak = 0

    async def model_info(self) -> ModelInfo:
        return ModelInfo("mock", self._chat_format)

    async def generate(self, request: GenerateRequest) -> Completion:
        with _Counted(self):
            text, error = await self._answer(request)
            if error is not None:
                raise error
            return self._completion(request, text)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        with _Counted(self):
            text, error = await self._answer(request)
            final = None if error else self._completion(request, text)
            shown = final or text
            for word in self.tokens(shown if isinstance(shown, str) else shown.text):
                yield Chunk(word)
                await asyncio.sleep(0)
            if error is not None:
                raise error
            yield Chunk("", final)

    async def score(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        with _Counted(self):
            self.score_requests.append((prompt, tuple(options)))
            await asyncio.sleep(self._latency)
            text = self.prompt_text(prompt)
            rows = await _rows(self._scores, text, options)
            scored = [
                OptionScore(self._option_ids(option, len(row)), tuple(row))
                for option, row in zip(options, rows, strict=False)
            ]
            return ScoreResult(tuple(scored), Counts(prompt_tokens=len(self.tokens(text))))

    async def score_unconditionally(self, prompt: tuple[Segment, ...], options: Sequence[str]) -> ScoreResult:
        result = await self.score(prompt, options)
        if self._alone is None:
            rows: Rows = [[0.0] * len(option.logprobs) for option in result.options]
        else:
            rows = await _rows(self._alone, "", options)
        scored = (
            replace(option, unconditional=tuple(row))
            for option, row in zip(result.options, rows, strict=True)
        )
        return replace(result, options=tuple(scored))

    def _option_ids(self, option: str, count: int) -> tuple[int, ...]:
        """The words of the option if there are so many, else tokens that no other option has."""
        words = self.tokens(option)
        return tuple(self._id(words[i] if len(words) == count else f"{option!r}[{i}]") for i in range(count))

    def prompt_text(self, prompt: tuple[Segment, ...]) -> str:
        """A prompt as text; token ids that are not the mock's own show as ``<id>``."""
        return "".join(s if isinstance(s, str) else "".join(map(self._word, s)) for s in prompt)

    @staticmethod
    def tokens(text: str) -> list[str]:
        """Words with the blanks before them; blanks at the end are a token of their own."""
        return re.findall(r"\s*\S+|\s+", text)

    def _word(self, token_id: int) -> str:
        return self._words[token_id] if token_id < len(self._words) else f"<{token_id}>"

    async def _answer(self, request: GenerateRequest) -> tuple[str | Completion, Exception | None]:
        self.requests.append(request)
        answer = self._pick(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, (str, Completion)):
            answer = MockAnswer(answer)
        elif isinstance(answer, Exception):
            answer = MockAnswer(error=answer)
        elif not isinstance(answer, MockAnswer):
            raise BackendError(
                f"a mock answer must be a string, a Completion, an exception or a MockAnswer, got {answer!r}"
            )
        latency = self._latency if answer.latency is None else answer.latency
        if latency == float("inf"):
            await asyncio.Event().wait()
        await asyncio.sleep(latency)
        return answer.text, answer.error

    def _pick(self, request: GenerateRequest) -> Answer | Awaitable[Answer]:
        if callable(self._answers):
            return self._answers(request)
        if isinstance(self._answers, (list, tuple)):
            with self._lock:
                index, self._next_answer = self._next_answer, self._next_answer + 1
            if index >= len(self._answers):
                have = f"{len(self._answers)} answer" + ("s" if len(self._answers) != 1 else "")
                raise BackendError(f"this is gen number {index + 1}, but the mock has only {have}")
            answer: Answer = self._answers[index]
            return answer
        if self._answers is not None:
            return self._answers  # type: ignore[return-value]
        if request.constraint is None:
            return "mock"
        if request.constraint.kind == "choices":
            first: str = json.loads(request.constraint.source)[0]
            return first
        kind = request.constraint.kind
        return BackendError(f"the mock cannot make up text for a {kind}; give it answers")

    def _completion(self, request: GenerateRequest, text: str | Completion) -> Completion:
        if isinstance(text, Completion):
            return text
        self._check_constraint(request, text)
        matched: str | None = None
        found = _first_stop(text, request.sampling)
        if found is not None:
            text, matched = text[: found[0]], found[1]
        words = self.tokens(text)
        finish = "stop"
        if len(words) > request.sampling.max_new_tokens:
            words, finish, matched = words[: request.sampling.max_new_tokens], "length", None
        ids = tuple(self._id(word) for word in words)
        counts = Counts(
            prompt_tokens=len(self.tokens(self.prompt_text(request.prompt))),
            completion_tokens=len(ids),
            sampled_tokens=len(ids),
            forward_passes=len(ids),
        )
        logprobs = tuple(-1.0 for _ in ids) if request.return_logprob else None
        return Completion("".join(words), ids, finish, matched, counts, len(ids), logprobs=logprobs)

    def _id(self, word: str) -> int:
        with self._lock:
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            return self._ids[word]

    @staticmethod
    def _check_constraint(request: GenerateRequest, text: str) -> None:
        constraint = request.constraint
        if constraint is None:
            return
        if constraint.kind == "regex":
            fits = re.fullmatch(constraint.source, text) is not None
        elif constraint.kind == "choices":
            fits = text in json.loads(constraint.source)
        else:
            fits = constraint.kind != "schema" or _is_json(text)
        if not fits:
            raise BackendError(f"the mock's answer {text!r} breaks the {constraint.kind} {constraint.source}")


async def _rows(scores: Scores | None, prompt: str, options: Sequence[str]) -> Rows:
    if scores is None:
        return [[-1.0 - index] for index in range(len(options))]
    if isinstance(scores, Mapping):
        return [[scores[option]] for option in options]
    rows = scores(prompt, options)
    return await rows if inspect.isawaitable(rows) else rows


def _first_stop(text: str, sampling: SamplingOptions) -> tuple[int, str] | None:
    """(where the text is cut, by what): the stop that is complete first; of those the longest, a string before a
    pattern."""
    patterns = [(re.compile(pattern), pattern) for pattern in sampling.stop_regex]
    for end in range(1, len(text) + 1) if patterns or sampling.stop else ():
        ended = [(end - len(stop), 0, stop) for stop in sampling.stop if text.endswith(stop, 0, end)]
        for compiled, pattern in patterns:
            start = next((i for i in range(end) if compiled.fullmatch(text, i, end)), None)
            if start is not None:
                ended.append((start, 1, pattern))
        if ended:
            return min(ended)[0], min(ended)[2]
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class _Counted:
    """Counts a request from its start to its end, and whether it was cancelled."""

    def __init__(self, backend: MockBackend) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        self._backend.active += 1
        self._backend.peak = max(self._backend.peak, self._backend.active)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._backend.active -= 1
        if kind is not None and issubclass(kind, (asyncio.CancelledError, GeneratorExit)):
            self._backend.cancelled += 1
