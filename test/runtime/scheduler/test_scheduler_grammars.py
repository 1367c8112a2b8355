"""The scheduler with the real constraint engine, on a vocabulary with tokens of several letters."""

from __future__ import annotations

import re
import time

import pytest
from scheduler_fakes import EOS, SIZE, Harness, command

from trellis.fsm import GrammarCompiler, Vocabulary
from trellis.runtime.messages import Constraint

LETTERS = ["a", "b", "c", "d", "e", "n", "o", "s", "y", "0", "1", '"', "{", "}", ":"]
MERGES = ["ab", "abc", "no", "yes", "ye", '":', '{"', "cd", "de", "one", "es"]


def encode(text: str) -> list[int]:
    """Longest token first: the canonical spelling of this vocabulary."""
    pieces, out, at = LETTERS + MERGES, [], 0
    while at < len(text):
        piece = max((p for p in pieces if text.startswith(p, at)), key=len)
        out.append(1 + pieces.index(piece))
        at += len(piece)
    return out


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    token_bytes = [b"", *(piece.encode() for piece in LETTERS + MERGES)]
    assert len(token_bytes) == SIZE
    return Vocabulary(token_bytes, SIZE, frozenset([EOS]), encode, "letters-and-merges")


@pytest.fixture(scope="module")
def compiler(vocabulary):
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()


def run(harness: Harness, *commands) -> dict:
    """As ``Harness.run``, waiting for the compiler's threads as well."""
    harness.scheduler.add(list(commands))
    for _ in range(20_000):
        if not harness.scheduler.roster.by_id:
            break
        if harness.scheduler.has_work():
            harness.step()
        else:
            time.sleep(0.001)
    assert not harness.scheduler.roster.by_id
    while harness.scheduler.has_work():
        harness.step()
    return {rid: harness.answer(rid) for rid in harness.outputs}


PATTERNS = [
    "yes|no|none",
    "(abcde){1,3}(no|yes)+",
    '\\{"one":(yes|no)\\}',
    '\\{"abcd":[01]{1,3}:"[a-e]{2,5}"\\}',
    "[a-e]{3,6}one[01]*",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_jump_forward_changes_passes_but_not_ids(vocabulary, compiler, pattern, temperature):
    def answers(jump: bool, **config):
        harness = Harness(pool=400, vocabulary=vocabulary, compiler=compiler, **config)
        commands = [
            command(
                f"r{i}",
                [1 + i, 2, 3],
                max_new_tokens=60,
                temperature=temperature,
                seed=i,
                constraint=Constraint("regex", pattern),
                jump_forward=jump,
                return_logprob=i % 2 == 0,
            )
            for i in range(8)
        ]
        return run(harness, *commands), harness

    jumped, with_jump = answers(True)
    plain, without_jump = answers(False)
    chunked, _ = answers(True, chunked_prefill_size=2, max_running_requests=3)
    for rid, answer in plain.items():
        text = b"".join(vocabulary.token_bytes[token] for token in answer.token_ids).decode()
        assert answer.finish.type == "stop"
        assert re.fullmatch(pattern, text)
        assert answer.token_ids == jumped[rid].token_ids == chunked[rid].token_ids
        assert jumped[rid].logprobs == pytest.approx(answer.logprobs)
        assert chunked[rid].logprobs == pytest.approx(answer.logprobs)
    assert without_jump.scheduler.counters.forced_tokens == 0
    if pattern not in ("yes|no|none",):
        assert with_jump.scheduler.counters.forced_tokens > 0
        passes = [sum(answer.counts.forward_passes for answer in of.values()) for of in (jumped, plain)]
        assert passes[0] < passes[1]


def test_choices_and_refusals(vocabulary, compiler):
    harness = Harness(vocabulary=vocabulary, compiler=compiler)
    answers = run(
        harness,
        command("good", [3, 4], constraint=Constraint("choices", '["yes", "none", "abcd"]')),
        command("bad", [3, 4], constraint=Constraint("regex", "ab(c")),
        command("odd", [3, 4], constraint=Constraint("nonsense", "x")),
        command("free", [3, 4]),
    )
    text = b"".join(vocabulary.token_bytes[token] for token in answers["good"].token_ids).decode()
    assert text in ("yes", "none", "abcd")
    assert [answers[rid].finish.status for rid in ("good", "bad", "odd", "free")] == [None, 400, 400, None]
