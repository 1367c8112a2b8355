"""A model without a model, a constraint without a compiler, and what the scheduler should make of them.

``FakeRunner`` keeps in every slot a fingerprint of the whole token prefix that was written there. Each forward
checks that the slots it is given hold exactly one sequence, in order, and its logits depend on that whole
sequence. So a slot that is shared, evicted or reused wrongly is caught, or changes the output.
``generate_alone`` says what a request gives when it is served alone, without cache, chunks or batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from trellis.errors import ConstraintError
from trellis.fsm.contract import ConstraintSpec, Vocabulary
from trellis.runtime.executor.contract import Extend, Sampled, SampleRow
from trellis.runtime.messages import Constraint, FinishReason, GenerateCommand, SamplingParams, TokenOutput
from trellis.runtime.scheduler import Scheduler, SchedulerConfig

EOS = 0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SIZE = 1 + len(LETTERS)
START = 0x9E3779B97F4A7C15
MASK64 = (1 << 64) - 1


def make_vocabulary() -> Vocabulary:
    """One byte a token: id 0 is EOS, 1 .. 26 are the letters."""
    token_bytes = [b"", *(letter.encode() for letter in LETTERS)]
    return Vocabulary(
        token_bytes=token_bytes,
        size=SIZE,
        eos_token_ids=frozenset([EOS]),
        encode=lambda text: [1 + LETTERS.index(letter) for letter in text],
        fingerprint="letters",
    )


def ids(text: str) -> list[int]:
    return [1 + LETTERS.index(letter) for letter in text]


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(LETTERS[token - 1] for token in token_ids if token != EOS)


def mix(state: int, token: int) -> int:
    """Fingerprint of a sequence from that of its prefix (splitmix64)."""
    z = (state + (token + 1) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def fingerprint(token_ids: Sequence[int]) -> int:
    state = START
    for token in token_ids:
        state = mix(state, token)
    return state


def logits_of(state: int) -> np.ndarray:
    """float64 [SIZE]; EOS is likely enough that texts end."""
    logits = np.random.default_rng(state).normal(size=SIZE) * 2
    logits[EOS] += 1.0
    return logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def draw(state: int, row: SampleRow) -> tuple[int, float, list[tuple[int, float]]]:
    """Token, its logprob, the best alternatives."""
    logits = logits_of(state)
    logprobs = log_softmax(logits)
    allowed = np.ones(SIZE, bool)
    if row.mask is not None:
        allowed &= np.unpackbits(row.mask.view(np.uint8), bitorder="little")[:SIZE].astype(bool)
    allowed[list(row.forbidden)] = False
    assert allowed.any(), "nothing is allowed"
    scores = logits
    if row.params.temperature > 0:
        noise = np.random.default_rng([row.seed, row.step]).gumbel(size=SIZE)
        scores = logits / row.params.temperature + noise
    token = int(np.where(allowed, scores, -np.inf).argmax())
    best = np.argsort(-logprobs)[: row.top_logprobs_num]
    return token, float(logprobs[token]), [(int(i), float(logprobs[i])) for i in best]


class Boom(RuntimeError):
    """A failure that a test ordered."""


class FakeRunner:
    """Implements ``Runner``. fail_forward, fail_sample: number of the call (from 1) that raises.

    computed: tokens computed so far; batches: (request tokens, start) of each extend of each forward.
    """

    def __init__(self, slots: int) -> None:
        self.vocab_size = SIZE
        self.slots = slots
        self.state = [0] * (slots + 1)
        self.token = [-1] * (slots + 1)
        self.computed = 0
        self.forwards = 0
        self.samples = 0
        self.fail_forward: set[int] = set()
        self.fail_sample: set[int] = set()
        self.batches: list[list[tuple[int, int]]] = []
        self.rows: list[SampleRow] = []

    def forward(self, extends: Sequence[Extend]) -> list[int]:
        self.forwards += 1
        assert extends, "an empty batch"
        self.batches.append([(len(extend.token_ids), extend.start) for extend in extends])
        written: set[int] = set()
        logits: list[int] = []
        for extend in extends:
            logits.extend(self._extend(extend, written))
        if self.forwards in self.fail_forward:
            for slot in written:
                self.state[slot] = 0xBAD
            raise Boom("out of memory")
        return logits

    def _extend(self, extend: Extend, written: set[int]) -> list[int]:
        n = len(extend.token_ids)
        assert n >= 1
        assert 0 <= extend.logits_from <= n
        assert len(extend.slots) == extend.start + n
        slots = extend.slots.tolist()
        assert len(set(slots)) == len(slots), "one slot for two tokens of a sequence"
        assert all(1 <= slot <= self.slots for slot in slots)
        state = START
        for slot in slots[: extend.start]:
            state = mix(state, self.token[slot])
            assert self.state[slot] == state, "a slot does not hold what this sequence needs"
        rows = []
        for index, (token, slot) in enumerate(
            zip(extend.token_ids.tolist(), slots[extend.start :], strict=True)
        ):
            assert slot not in written, "two requests write one slot"
            written.add(slot)
            state = mix(state, token)
            self.state[slot], self.token[slot] = state, token
            if index >= extend.logits_from:
                rows.append(state)
        self.computed += n
        return rows

    def sample(self, logits: list[int], rows: Sequence[SampleRow]) -> Sampled:
        self.samples += 1
        self.rows.extend(rows)
        if self.samples in self.fail_sample:
            raise Boom("sampling failed")
        drawn = [draw(logits[row.row], row) for row in rows]
        return Sampled(
            [token for token, _, _ in drawn],
            [logprob if row.want_logprob else None for row, (_, logprob, _) in zip(rows, drawn, strict=True)],
            [top if row.top_logprobs_num else None for row, (_, _, top) in zip(rows, drawn, strict=True)],
        )

    def score(self, logits, rows, token_ids, top_logprobs_num):
        logprobs = [log_softmax(logits_of(logits[row])) for row in rows]
        best = [np.argsort(-row)[:top_logprobs_num] for row in logprobs]
        return (
            [float(row[token]) for row, token in zip(logprobs, token_ids, strict=True)],
            [[(int(i), float(row[i])) for i in top] for row, top in zip(logprobs, best, strict=True)],
        )


class ChoiceMatcher:
    """Walks a set of texts, letter by letter."""

    def __init__(self, texts: Sequence[str], broken_after: int | None = None) -> None:
        self.texts = list(texts)
        self.accepted = ""
        self.broken_after = broken_after

    def _next(self, so_far: str) -> set[str]:
        return {t[len(so_far)] for t in self.texts if t.startswith(so_far) and len(t) > len(so_far)}

    def _complete(self, so_far: str) -> bool:
        return so_far in self.texts

    def fill_mask(self, row: np.ndarray) -> bool:
        if self.broken_after is not None and len(self.accepted) >= self.broken_after:
            raise Boom("the grammar broke")
        bits = np.zeros(32 * len(row), np.uint8)
        for letter in self._next(self.accepted):
            bits[1 + LETTERS.index(letter)] = 1
        bits[EOS] = self._complete(self.accepted)
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def accept(self, token_id: int) -> bool:
        letter = LETTERS[token_id - 1] if token_id != EOS else ""
        if letter not in self._next(self.accepted):
            return False
        self.accepted += letter
        return True

    def forced(self) -> list[int]:
        at = self.accepted
        while not self._complete(at) and len(self._next(at)) == 1:
            at += next(iter(self._next(at)))
        return ids(at[len(self.accepted) :])

    def draft(self) -> list[int]:
        """A guess that is often wrong, and may end in what is not even allowed."""
        if self.forced():
            return []
        likely = [text for text in self.texts if text.startswith(self.accepted)]
        return ids(max(likely, default="")[len(self.accepted) :][:3] + "a")

    def rollback(self, n: int) -> None:
        self.accepted = self.accepted[: len(self.accepted) - n]

    def is_accepting(self) -> bool:
        return self._complete(self.accepted)

    def is_finished(self) -> bool:
        return self._complete(self.accepted) and not self._next(self.accepted)


class LyingMatcher(ChoiceMatcher):
    """Its mask allows what it does not accept."""

    def accept(self, token_id: int) -> bool:
        return len(self.accepted) < 2 and super().accept(token_id)


@dataclass
class ChoiceGrammar:
    texts: Sequence[str]
    kind: str = "choices"
    engine: str = "fake"
    nbytes: int = 1
    warnings: tuple[str, ...] = ()
    validated_only: tuple[str, ...] = ()

    def validate(self, text: str) -> str | None:
        """``strict`` texts must not hold an "x"; ``loose`` ones neither, but there it is only validated."""
        if self.kind == "fragile":
            raise RuntimeError("boom")
        return "it holds an x" if self.kind in ("strict", "loose") and "x" in text else None

    def matcher(self) -> ChoiceMatcher:
        if self.kind == "lying":
            return LyingMatcher(self.texts)
        return ChoiceMatcher(self.texts, broken_after=2 if self.kind == "broken" else None)

    def accepts(self, text: str | bytes) -> bool:
        return text in self.texts


class FakeCompiler:
    """Compiles at once, or when ``release`` is called. Refuses sources that are not JSON lists."""

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow
        self.pending: list[tuple[ConstraintSpec, Future]] = []

    def submit(self, spec: ConstraintSpec) -> Future:
        future: Future = Future()
        self.pending.append((spec, future))
        if not self.slow:
            self.release()
        return future

    def release(self) -> None:
        pending, self.pending = self.pending, []
        for spec, future in pending:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                loose = ("no x",) if spec.kind == "loose" else ()
                grammar = ChoiceGrammar(json.loads(spec.source), spec.kind, validated_only=loose)
                future.set_result(grammar)
            except json.JSONDecodeError as error:
                refusal = ConstraintError(spec.kind, "syntax", f"position {error.pos}", error.msg)
                future.set_exception(refusal)

    def stats(self) -> dict:
        return {"pending": len(self.pending)}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def command(rid: str, prompt: str | list[int], max_new_tokens: int = 8, **kwargs) -> GenerateCommand:
    """Greedy unless params say otherwise; keyword arguments that SamplingParams knows go there."""
    of_params = {key: kwargs.pop(key) for key in list(kwargs) if key in SamplingParams.__struct_fields__}
    of_params.setdefault("temperature", 0.0)
    return GenerateCommand(
        rid=rid,
        token_ids=ids(prompt) if isinstance(prompt, str) else prompt,
        params=SamplingParams(max_new_tokens=max_new_tokens, **of_params),
        **kwargs,
    )


def choices(*texts: str, kind: str = "choices") -> Constraint:
    return Constraint(kind, json.dumps(list(texts)))


@dataclass
class Answer:
    """All outputs of one request, put together."""

    token_ids: list[int]
    finish: FinishReason | None
    outputs: list[TokenOutput]

    @property
    def text(self) -> str:
        return text_of(self.token_ids)

    @property
    def counts(self):
        return self.outputs[-1].counts

    @property
    def logprobs(self) -> list[float]:
        return [logprob for output in self.outputs for logprob in output.logprobs or ()]

    @property
    def top_logprobs(self) -> list:
        return [top for output in self.outputs for top in output.top_logprobs or ()]

    @property
    def input_logprobs(self):
        given = [o.input_logprobs for o in self.outputs if o.input_logprobs is not None]
        assert len(given) <= 1, "input logprobs come once"
        return given[0] if given else None


class Harness:
    """A scheduler with fakes around it; verifies the slot books after every step."""

    def __init__(
        self, pool: int = 200, slow_grammars: bool = False, rng=None, vocabulary=None, compiler=None, **config
    ) -> None:
        config.setdefault("context_length", 10_000)
        config.setdefault("keep_ended_s", 0.0)  # what fits is then a matter of the running requests alone
        self.config = SchedulerConfig(max_total_tokens=pool, **config)
        self.runner = FakeRunner(self.config.capacity + self.config.page_size - 1)
        self.vocabulary = vocabulary or make_vocabulary()
        self.compiler = compiler or FakeCompiler(slow_grammars)
        self.clock = Clock()
        self.scheduler = Scheduler(
            self.config, self.runner, self.vocabulary, self.compiler, clock=self.clock, rng=rng
        )
        self.outputs: dict[str, list[TokenOutput]] = {}

    def step(self) -> list[TokenOutput]:
        outputs = self.scheduler.step()
        for output in outputs:
            earlier = self.outputs.setdefault(output.rid, [])
            assert not earlier or earlier[-1].finish is None, f"{output.rid}: output after its end"
            assert (output.options is not None) == (not earlier), "options ride on the first output"
            earlier.append(output)
        self.scheduler.check()
        return outputs

    def run(self, *commands: GenerateCommand, limit: int = 5000) -> dict[str, Answer]:
        """Add the commands and step until there is no work."""
        self.scheduler.add(list(commands))
        for _ in range(limit):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), f"work is left after {limit} steps"
        return {rid: self.answer(rid) for rid in self.outputs}

    def answer(self, rid: str) -> Answer:
        outputs = self.outputs[rid]
        tokens = [token for output in outputs for token in output.token_ids]
        return Answer(tokens, outputs[-1].finish, outputs)

    @property
    def size(self) -> int:
        """Slots in whole pages."""
        return self.config.capacity

    @property
    def free(self) -> int:
        return self.scheduler.memory.pool.free

    @property
    def cached(self) -> int:
        return self.scheduler.memory.cache.total


def generate_alone(
    request: GenerateCommand, config: SchedulerConfig, seed: int = 0
) -> tuple[list[int], str, str | int | None]:
    """What the request gives alone: output ids, finish type, what matched. One token at a time, no cache."""
    vocabulary = make_vocabulary()
    params = request.params
    room = min(config.context_length, config.capacity) - len(request.token_ids)
    limit = min(params.max_new_tokens, room)
    matcher = ChoiceGrammar(json.loads(request.constraint.source)).matcher() if request.constraint else None
    output: list[int] = []
    if limit == 0:
        return output, "length", None
    if matcher is not None and matcher.is_finished():
        return output, "stop", None
    while True:
        state = fingerprint([*request.token_ids, *output])
        mask = None
        if matcher is not None:
            mask = np.zeros(vocabulary.mask_words, np.int32)
            matcher.fill_mask(mask)
        forbidden: list[int] = []
        if matcher is None and len(output) < min(params.min_new_tokens, limit):
            forbidden = ([] if params.ignore_eos else [EOS]) + params.stop_token_ids
        used_seed = params.seed if params.seed is not None else seed
        row = SampleRow(0, params, used_seed, len(output), mask=mask, forbidden=forbidden)
        token = draw(state, row)[0]
        output.append(token)
        if matcher is not None and token != EOS:
            assert matcher.accept(token)
        text = text_of(output)
        ends = [(text.index(s) + len(s), -len(s), s) for s in params.stop if s in text]
        if ends:
            return output, "stop", min(ends)[2]
        if token == EOS and (matcher is not None or not params.ignore_eos):
            return output, "stop", token
        if token in params.stop_token_ids:
            return output, "stop", token
        if matcher is not None and matcher.is_finished():
            return output, "stop", None
        if len(output) >= limit:
            return output, "length", None


def assert_as_alone(harness: Harness, request: GenerateCommand) -> None:
    """The answer to a request equals what it gives alone."""
    answer = harness.answer(request.rid)
    assert answer.finish is not None
    tokens, finish, matched = generate_alone(request, harness.config)
    assert (answer.token_ids, answer.finish.type, answer.finish.matched) == (tokens, finish, matched)
