"""What is played: calls with known prompts and outputs, and which of them wait for which."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

CLIENT_DELAY = 0.002
"""Seconds from the end of a call to the arrival of the next one: detokenize, run the program, tokenize."""


@dataclass(frozen=True)
class Call:
    """One request.

    prompt, output: int32 token ids; the output is what the model will say. max_new_tokens: asked for; if it is more
    than the output has, the output ends by an end-of-text token.
    after: calls of the trace that have to end before; delay: seconds from the last of these (or from time 0) to the
    arrival. score_from: position of the first prompt token whose logprob is wanted (an option of a select); -1: none.
    """

    prompt: IntArray
    output: IntArray
    max_new_tokens: int
    program: int
    after: tuple[int, ...] = ()
    delay: float = 0.0
    score_from: int = -1

    @property
    def reusable(self) -> int:
        """Leading prompt tokens that may come from the cache; the others have to be computed for their logits."""
        last = len(self.prompt) - 1
        return last if self.score_from < 0 else min(last, self.score_from - 1)

    @property
    def computed(self) -> IntArray:
        """The tokens whose K/V exists when the call ends: all but an output token that was sampled last."""
        output = self.output if len(self.output) < self.max_new_tokens else self.output[:-1]
        return np.concatenate([self.prompt, output])


@dataclass(frozen=True)
class Trace:
    """Calls in an order in which every call stands behind those that it waits for.

    open_loop: programs arrive by a clock of their own, whatever the server does; else all are there at time 0.
    """

    name: str
    calls: tuple[Call, ...]
    open_loop: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(call.prompt) for call in self.calls)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(len(call.prompt) + max(call.max_new_tokens, len(call.output)) for call in self.calls)


class Tokens:
    """Text that nobody has written before: every piece has token ids of its own."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def __call__(self, n: int) -> IntArray:
        return np.fromiter(itertools.islice(self._next, n), np.int32, n)


@dataclass
class Builder:
    """Collects the calls of a trace; ``rng`` and ``tokens`` are shared by all its programs."""

    rng: np.random.Generator
    tokens: Tokens = field(default_factory=Tokens)
    calls: list[Call] = field(default_factory=list)
    programs: int = 0

    def program(self) -> int:
        """The number of a new program."""
        self.programs += 1
        return self.programs - 1

    def text(self, low: int, high: int) -> IntArray:
        """A new piece of low to high tokens."""
        return self.tokens(int(self.rng.integers(low, high + 1)))

    def add(self, call: Call) -> int:
        """Returns the index of the call."""
        self.calls.append(call)
        return len(self.calls) - 1

    def ask(
        self,
        program: int,
        parts: Sequence[IntArray],
        output: IntArray,
        after: tuple[int, ...] = (),
        delay: float | None = None,
    ) -> int:
        """A generate call whose prompt is made of parts. Programs ask for up to twice what they get."""
        wait = delay if delay is not None else CLIENT_DELAY if after else 0.0
        limit = 1 if len(output) == 1 else 2 * len(output)
        return self.add(Call(np.concatenate(parts), output, limit, program, after, wait))

    def select(
        self,
        program: int,
        parts: Sequence[IntArray],
        options: Sequence[IntArray],
        after: tuple[int, ...] = (),
    ) -> list[int]:
        """The options of a select, scored at once behind one prompt."""
        prompt = np.concatenate(parts)
        wait = CLIENT_DELAY if after else 0.0
        nothing = np.empty(0, np.int32)
        return [
            self.add(Call(np.concatenate([prompt, option]), nothing, 0, program, after, wait, len(prompt)))
            for option in options
        ]

    def arrive(self, first: int, at: float) -> None:
        """The calls from index ``first`` on that wait for no other arrive ``at`` seconds from the start."""
        for index in range(first, len(self.calls)):
            if not self.calls[index].after:
                self.calls[index] = replace(self.calls[index], delay=at)

    def exponential(self, mean: float) -> float:
        return CLIENT_DELAY + float(self.rng.exponential(mean))

    def trace(self, name: str, open_loop: bool = False) -> Trace:
        return Trace(name, tuple(self.calls), open_loop)


def shuffled(trace: Trace, rng: np.random.Generator) -> Trace:
    """The same programs, in another order; the calls of one program keep theirs."""
    programs = sorted({call.program for call in trace.calls})
    rank = dict(zip(programs, rng.permutation(len(programs)).tolist(), strict=True))
    order = sorted(range(len(trace.calls)), key=lambda i: (rank[trace.calls[i].program], i))
    new_index = {old: new for new, old in enumerate(order)}
    calls = (trace.calls[i] for i in order)
    return replace(
        trace, calls=tuple(replace(call, after=tuple(new_index[a] for a in call.after)) for call in calls)
    )


def relabelled(trace: Trace, whole_prompts: bool) -> Trace:
    """The same trace with token ids that show a radix tree less than there is to share.

    whole_prompts: what an exact-match table finds stays: the longest earlier prompt, or prompt and output, that the
    prompt begins with. Everything behind it gets ids of its own. Without it every token does: no cache.
    """
    tokens = Tokens()
    entries: dict[bytes, IntArray] = {}
    calls = []
    for call in trace.calls:
        found = _longest_entry(entries, call.prompt) if whole_prompts else call.prompt[:0]
        prompt = np.concatenate([found, tokens(len(call.prompt) - len(found))])
        output = tokens(len(call.output))
        if whole_prompts:
            entries.setdefault(call.prompt.tobytes(), prompt)
            entries.setdefault(call.computed.tobytes(), replace(call, prompt=prompt, output=output).computed)
        calls.append(replace(call, prompt=prompt, output=output))
    return replace(trace, calls=tuple(calls))


def _longest_entry(entries: dict[bytes, IntArray], prompt: IntArray) -> IntArray:
    raw = prompt.tobytes()
    lengths = sorted({len(new) for new in entries.values() if len(new) <= len(prompt)}, reverse=True)
    for length in lengths:
        found = entries.get(raw[: length * prompt.itemsize])
        if found is not None:
            return found
    return prompt[:0]
