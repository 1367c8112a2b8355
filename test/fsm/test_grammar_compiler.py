"""The compiler pool: one compile for equal constraints, a bounded cache, remembered refusals, cancellation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from trellis.errors import CapacityError, ConstraintError, RequestAborted
from trellis.fsm import ConstraintSpec, GrammarCompiler, Limits, Vocabulary, compile_grammar


class Gate:
    """An ``encode`` that waits: holds a worker inside a probe mask until it is opened."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.vocabulary = replace(vocabulary, encode=self._encode)
        self._real = vocabulary.encode

    def _encode(self, text: str) -> list[int]:
        self.entered.set()
        assert self.open.wait(30)
        return self._real(text)


@pytest.fixture
def compiler(tiny: Vocabulary) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tiny)
    yield made
    made.close()


def test_equal_constraints_share_one_grammar(compiler: GrammarCompiler) -> None:
    first = compiler.compile(ConstraintSpec.regex("[ab]+"))
    assert compiler.compile(ConstraintSpec.regex("[ab]+")) is first
    assert compiler.compile(ConstraintSpec.regex("[ab]*")) is not first
    stats = compiler.stats()
    assert (stats["compiled"], stats["hits"], stats["cached"]) == (2, 1, 2)
    assert stats["cached_bytes"] > 0


def test_spacing_and_strictness_tell_schemas_apart(compiler: GrammarCompiler) -> None:
    specs = [
        ConstraintSpec.schema({"type": "array"}, s, strict)
        for s in ("spaced", "any")
        for strict in (True, False)
    ]
    assert len({id(compiler.compile(spec)) for spec in [*specs, *specs]}) == 4


def test_equal_constraints_in_work_are_compiled_once(tiny: Vocabulary) -> None:
    gate = Gate(tiny)
    compiler = GrammarCompiler(gate.vocabulary, workers=1)
    futures = [compiler.submit(ConstraintSpec.regex("forced text")) for _ in range(5)]
    assert compiler.stats()["in_flight"] == 1
    gate.open.set()
    assert len({id(future.result(30)) for future in futures}) == 1
    stats = compiler.stats()
    assert (stats["compiled"], stats["shared"], stats["in_flight"]) == (1, 4, 0)
    compiler.close()


def test_a_refusal_is_remembered_for_a_minute(tiny: Vocabulary) -> None:
    now = [100.0]
    compiler = GrammarCompiler(tiny, clock=lambda: now[0])
    spec = ConstraintSpec.regex("a**")
    errors = []
    for at in (100.0, 159.0, 160.5):
        now[0] = at
        with pytest.raises(ConstraintError) as caught:
            compiler.compile(spec)
        errors.append(caught.value)
    assert {error.where for error in errors} == {"position 2"}
    assert len({id(error) for error in errors}) == 3
    stats = compiler.stats()
    assert (stats["refused"], stats["refusal_hits"]) == (2, 1)
    compiler.close()


def test_an_error_in_the_first_mask_is_a_refusal(tiny: Vocabulary) -> None:
    compiler = GrammarCompiler(tiny, limits=Limits(states=20))
    with pytest.raises(ConstraintError, match="states"):
        compiler.compile(ConstraintSpec.regex(r"\w{1,50}"))
    assert compiler.stats()["refused"] == 1
    compiler.close()


def test_the_cache_is_bounded_in_bytes(tiny: Vocabulary) -> None:
    probe = GrammarCompiler(tiny)
    one = probe.compile(ConstraintSpec.regex("a0+")).nbytes
    probe.close()
    compiler = GrammarCompiler(tiny, cache_bytes=int(one * 3.5))
    specs = [ConstraintSpec.regex(f"a{i}+") for i in range(6)]
    grammars = [compiler.compile(spec) for spec in specs]
    stats = compiler.stats()
    assert stats["cached"] == 3
    assert stats["cached_bytes"] <= one * 3.5
    assert compiler.compile(specs[5]) is grammars[5]
    assert compiler.compile(specs[0]) is not grammars[0]
    assert grammars[0].accepts("a0")  # a request that holds it is not disturbed
    compiler.close()


def test_clear_forgets_grammars_and_refusals(compiler: GrammarCompiler) -> None:
    good, bad = ConstraintSpec.regex("a"), ConstraintSpec.regex("(")
    first = compiler.compile(good)
    with pytest.raises(ConstraintError):
        compiler.compile(bad)
    compiler.clear()
    assert compiler.stats()["cached"] == 0
    assert compiler.compile(good) is not first
    with pytest.raises(ConstraintError):
        compiler.compile(bad)
    assert compiler.stats()["refused"] == 2


def test_a_queued_compile_can_be_cancelled(tiny: Vocabulary) -> None:
    gate = Gate(tiny)
    compiler = GrammarCompiler(gate.vocabulary, workers=1)
    running = compiler.submit(ConstraintSpec.regex("one text"))
    assert gate.entered.wait(30)
    alone = compiler.submit(ConstraintSpec.regex("two text"))
    shared = [compiler.submit(ConstraintSpec.regex("three text")) for _ in range(2)]
    assert alone.cancel()
    assert shared[0].cancel()
    assert compiler.stats()["cancelled"] == 1
    gate.open.set()
    assert running.result(30).accepts("one text")
    assert shared[1].result(30).accepts("three text")
    assert compiler.stats()["compiled"] == 2
    compiler.close()


def test_a_compile_that_nobody_waits_for_is_given_up(tiny: Vocabulary) -> None:
    """The next request with that constraint starts anew, and gets its grammar."""
    gate = Gate(tiny)
    compiler = GrammarCompiler(gate.vocabulary, workers=1)
    first = compiler.submit(ConstraintSpec.regex("some text"))
    assert gate.entered.wait(30)
    assert first.cancel()
    assert compiler.stats()["in_flight"] == 0
    second = compiler.submit(ConstraintSpec.regex("some text"))
    gate.open.set()
    assert second.result(30).accepts("some text")
    stats = compiler.stats()
    assert (stats["cancelled"], stats["compiled"], stats["shared"], stats["in_flight"]) == (1, 1, 0, 0)
    compiler.close()


def test_a_compile_that_somebody_waits_for_goes_on(tiny: Vocabulary) -> None:
    gate = Gate(tiny)
    compiler = GrammarCompiler(gate.vocabulary, workers=1)
    futures = [compiler.submit(ConstraintSpec.regex("some text")) for _ in range(2)]
    assert gate.entered.wait(30)
    assert futures[0].cancel()
    gate.open.set()
    assert futures[1].result(30).accepts("some text")
    assert (compiler.stats()["cancelled"], compiler.stats()["compiled"]) == (0, 1)
    compiler.close()


class Leaving(threading.Event):
    """A stop flag of somebody who leaves after it was looked at so many times."""

    def __init__(self, patience: int) -> None:
        super().__init__()
        self.looks = 0
        self._patience = patience

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks > self._patience


# Each of these costs far more than it is looked at here.
SLOW = [
    ConstraintSpec.regex("(a|b)*a(a|b){30}"),
    ConstraintSpec.regex("(?=.*a.{12})(?=.*b.{12}).*"),
    ConstraintSpec.schema(
        {"anyOf": [{"properties": {f"p{i}": {"not": {"minimum": i}}}} for i in range(300)]}
    ),
    ConstraintSpec.schema(
        {"allOf": [{"not": {"pattern": f"{i}.{{9}}$"}} for i in range(9)], "type": "string"}
    ),
]


def use(spec: ConstraintSpec, vocabulary: Vocabulary, limits: Limits) -> None:
    """Compile it and walk some way: part of an automaton is built only then."""
    matcher = compile_grammar(spec, vocabulary, limits=limits).matcher()
    row = np.empty(vocabulary.mask_words, np.int32)
    for token in vocabulary.encode("ab" * 40):
        matcher.fill_mask(row)
        matcher.accept(token)


@pytest.mark.parametrize("spec", SLOW, ids=lambda spec: spec.source[:24])
def test_the_construction_looks_whether_it_is_still_wanted(spec: ConstraintSpec, tiny: Vocabulary) -> None:
    leaving = Leaving(patience=3)
    with pytest.raises(RequestAborted):
        use(spec, tiny, Limits(stop=leaving))
    assert leaving.looks == 4


def test_a_bug_in_a_compile_answers_its_waiters(tiny: Vocabulary) -> None:
    def broken(text: str) -> list[int]:
        raise KeyError(text)

    compiler = GrammarCompiler(replace(tiny, encode=broken))
    with pytest.raises(Exception, match="KeyError"):
        compiler.submit(ConstraintSpec.regex("forced text")).result(30)
    assert compiler.compile(ConstraintSpec.regex("[ab]+")).accepts("ab")
    compiler.close()


def test_a_closed_compiler_takes_no_more(tiny: Vocabulary) -> None:
    gate = Gate(tiny)
    compiler = GrammarCompiler(gate.vocabulary, workers=1)
    compiler.submit(ConstraintSpec.regex("one text"))
    assert gate.entered.wait(30)
    queued = compiler.submit(ConstraintSpec.regex("two text"))
    compiler.close()
    assert queued.cancelled()
    with pytest.raises(CapacityError):
        compiler.submit(ConstraintSpec.regex("three text"))
    gate.open.set()


def test_unknown_backends_and_kinds_say_what_there_is(tiny: Vocabulary) -> None:
    for spec, backend in [
        (ConstraintSpec.regex("a"), "nonsense"),
        (ConstraintSpec("grammar", "start: 'a'"), "compressed"),
        (ConstraintSpec("schema", "{}"), "compressed"),
    ]:
        compiler = GrammarCompiler(tiny, backend=backend)
        with pytest.raises(ConstraintError, match="compressed") as caught:
            compiler.compile(spec)
        assert caught.value.code == "unsupported"
        compiler.close()


def test_the_probe_mask_is_kept(compiler: GrammarCompiler, tiny: Vocabulary) -> None:
    grammar = compiler.compile(ConstraintSpec.regex("[a-f]{1,9}"))
    before = grammar.nbytes
    grammar.matcher().fill_mask(np.empty(tiny.mask_words, np.int32))
    assert grammar.nbytes == before
