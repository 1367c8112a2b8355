"""Compiled programs: what is sent together, what fails, and what they say about themselves."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from trellis import ProgramError
from trellis.frontend import MockAnswer, MockBackend, function, gen, select, system, user
from trellis.frontend.backends.base import GenerateRequest


@function
def branches_in_turn(s: Any, topic: str) -> None:
    """The body waits for each branch before it goes on with the next."""
    s += f"About {topic}: "
    branches = s.fork(4)
    for i, branch in enumerate(branches):
        branch += f"{i} " + gen("first")
        branch += "then " + branch["first"] + gen("second")
    branches.join()
    s += " and ".join(["so", topic]) + gen("end")


def test_gens_of_different_branches_are_sent_together() -> None:
    """The body alone sends one after the other, because it reads in between."""
    plain, fast = MockBackend("a", latency=0.01), MockBackend("a", latency=0.01)
    one = branches_in_turn.run("tea", backend=plain)
    two = branches_in_turn.compile().run("tea", backend=fast)
    assert two.text() == one.text()
    assert two["second"] == one["second"] == ["a"] * 4
    # The second gen of a branch goes on while the body starts the next branch: two at a time.
    assert (plain.peak, fast.peak) == (2, 4)


def test_one_slow_branch_holds_up_only_who_needs_it() -> None:
    @function
    def program(s: Any, word: str) -> None:
        s += word
        a, b, c = s.fork(3)
        a += gen("slow")
        b += "after " + a["slow"] + gen("needs it")
        c += "free" + gen("does not")
        c += c["does not"] + gen("last")

    order: list[str] = []

    async def answer(request: GenerateRequest) -> str:
        prompt = backend.prompt_text(request.prompt)
        if prompt == "go":
            while "gofree" not in order or not any(p.startswith("gofree") and p != "gofree" for p in order):
                await asyncio.sleep(0.001)
        order.append(prompt)
        return "x"

    backend = MockBackend(answer)
    program.compile().run("go", backend=backend, timeout=20)
    assert order == ["gofree", "gofreexx", "go", "goafter x"]


def test_the_body_is_not_run() -> None:
    @function
    def program(s: Any, x: str) -> str:
        s += x + gen("y")
        return s["y"] + "!"

    compiled = program.compile()
    body, program.body = program.body, None  # type: ignore[assignment]
    assert compiled.run("a", backend=MockBackend("b")).return_value == "b!"
    program.body = body


def test_it_is_used_like_the_program() -> None:
    compiled = branches_in_turn.compile()
    assert compiled.name == "branches_in_turn"
    assert str(inspect.signature(compiled).parameters["topic"]) == "topic: 'str'"
    with pytest.raises(TypeError, match=r"program 'branches_in_turn': .*'topic'"):
        compiled.run(backend=MockBackend())
    states = compiled.bind(topic="tea").run_batch([{}, {"topic": "milk"}], backend=MockBackend("a"))
    assert [state.text()[6:10] for state in states] == ["tea:", "milk"]
    streamed = compiled.run("tea", backend=MockBackend("a b"), stream=True)
    assert "".join(streamed.text_iter()) == streamed.text()
    later = asyncio.run(compiled.run_async("tea", backend=MockBackend("a")))
    assert later["end"] == "a"
    assert compiled.trace().is_straight
    assert str(compiled.compile().graph()) == str(branches_in_turn.graph())
    fixed = [compiled.bind(topic="tea").compile(), compiled.compile(topic="tea").with_options(max_tokens=3)]
    assert [each.run(backend=MockBackend("a")).text()[6:10] for each in fixed] == ["tea:"] * 2
    assert all(each.trace().is_straight for each in fixed)


def test_arguments_may_be_fixed() -> None:
    @function
    def program(s: Any, x: str, hint: str | None = None, turns: int = 1) -> None:
        if hint is not None:
            s += hint
        for _ in range(turns):
            s += x + gen("y")

    with pytest.raises(ProgramError, match=r"not straight-line.*line .*compares {hint} by 'is'"):
        program.compile()
    with pytest.raises(ProgramError, match=r"range\(\) depends on the value of {turns}"):
        program.compile(hint=None)
    compiled = program.compile(hint="so ", turns=2)
    assert compiled.run("a", backend=MockBackend("b")).text() == "so abab"
    with pytest.raises(TypeError, match=r"'turns' is neither an argument nor a run option"):
        compiled.run("a", turns=3, backend=MockBackend("b"))


def test_the_error_names_the_line() -> None:
    @function
    def program(s: Any) -> None:
        s += "a" + gen("y")
        if s["y"] == "b":
            s += "c"

    lines, first = inspect.getsourcelines(program.body)
    line = first + next(i for i, text in enumerate(lines) if "if s" in text)
    with pytest.raises(
        ProgramError, match=rf"program 'program': cannot be compiled.* line {line} of .*{__name__}"
    ):
        program.compile()


def test_expressions_may_have_symbolic_options() -> None:
    @function
    def program(s: Any, options: list[str], n: int, pattern: str) -> None:
        s += "a" + select("which", options) + gen("y", max_tokens=n, regex=pattern)

    compiled = program.compile()
    backend = MockBackend("12", scores={"x": -2.0, "z": -1.0})
    state = compiled.run(["x", "z"], 5, "[0-9]+", backend=backend)
    assert (state["which"], state["y"]) == ("z", "12")
    assert backend.requests[0].sampling.max_new_tokens == 5
    for bad in ({"n": -1}, {"options": []}, {"pattern": "("}):
        arguments = {"options": ["x", "z"], "n": 5, "pattern": "a", **bad}
        with pytest.raises(Exception) as plain:  # noqa: PT011
            program.run(backend=MockBackend("a"), **arguments)
        with pytest.raises(type(plain.value)) as fast:
            compiled.run(backend=MockBackend("a"), **arguments)
        assert str(fast.value) == str(plain.value)


def test_scopes_messages_and_gens_as_keys() -> None:
    @function
    def program(s: Any, x: str) -> Any:
        s += system(x)
        answer = gen()
        with s.user(), s.var_scope("all"):
            s += "say " + answer
        s += user(f"{s[answer]} of {s['all']}")
        s.set_var("n", len("abc"))
        return [s.messages(), s.get("all"), s.get("n", int)]

    compiled = program.compile()
    fast, plain = (p.run("be", backend=MockBackend("b c")) for p in (compiled, program))
    assert fast.text() == plain.text()
    assert fast.return_value == plain.return_value
    assert plain.return_value[1:] == ["say b c", 3]


def test_what_was_joined_is_a_list_of_known_length() -> None:
    @function
    def program(s: Any, topics: list[str]) -> Any:
        s += f"on {topics}"
        with s.fork(3) as branches:
            branches += lambda i: f"{i} " + gen("fact", max_tokens=2)
        s += f"{len(s['fact'])}: " + "".join(f"[{i}{fact}]" for i, fact in enumerate(s["fact"]))
        for fact in s["fact"]:
            s += user(fact + f"{s['fact']}")
        return s["fact"]

    fast, plain = (p.run([], backend=MockBackend("b c")) for p in (program.compile(), program))
    assert fast.text() == plain.text()
    assert fast.return_value == plain.return_value == ["b c"] * 3


def test_a_gen_that_is_an_argument_cannot_pass_for_what_was_joined() -> None:
    @function
    def program(s: Any, more: Any) -> None:
        s += "a"
        with s.fork(2) as branches:
            branches += gen("x")
        s += more
        for each in s["x"]:
            s += each

    compiled = program.compile()
    assert compiled.run("b", backend=MockBackend("c")).text() == "abcc"
    with pytest.raises(ProgramError, match="an argument sets 'x'"):
        compiled.run(gen("x"), backend=MockBackend("c"))


def test_asynchronous_programs_compile_as_well() -> None:
    @function
    async def program(s: Any, x: str) -> str:
        s += f"{x} " + gen("y")
        async with s.fork(2) as branches:
            for branch in branches:
                branch += gen("z")
                branch += "then " + await branch["z"]
        with s.user():
            s += "all " + "".join(await s["z"])
        await s.run(rate, x)
        return (await s["y"]) + await s.text("y")

    fast, plain = (p.run("a", backend=MockBackend("b c")) for p in (program.compile(), program))
    assert fast.text() == plain.text()
    assert fast.return_value == plain.return_value == "b cb c"


@function
def rate(s: Any, topic: str, temperature: float = 9.0) -> Any:
    s += f"rate {topic} {temperature} " + gen("grade", max_tokens=2) + gen("why")
    return s["grade"]


def test_programs_on_the_same_state_are_part_of_the_graph() -> None:
    @function
    def program(s: Any, x: str) -> str:
        grade = s.run(rate.with_options(top_p=0.5, max_tokens=7), x, temperature=0.25, top_k=3, min_p=0.125)
        branch = s.fork(1)[0]
        branch.run(rate, topic="two", max_tokens=5)
        branch.run(rate, topic="three")
        s += "end " + gen("last")
        return f"{grade}!"

    compiled = program.compile()
    assert "  state 1: rate: gen grade max_tokens=2" in str(compiled.trace())
    sent = []
    for each in (program, compiled):
        backend = MockBackend("b")
        state = each.run("tea", backend=backend, top_p=0.75, temperature=0.125)
        assert state.return_value == "b!"
        sent.append([(backend.prompt_text(r.prompt), r.sampling) for r in backend.requests])
        assert state.text() == "rate tea 0.25 bbend b"
    assert sorted(sent[0], key=str) == sorted(sent[1], key=str)
    assert {s.top_p for _, s in sent[1]} == {0.5, 0.75}


@dataclass
class Person:
    name: str


def test_typed_values_and_their_parts() -> None:
    @function
    def program(s: Any) -> Any:
        s += "a" + gen("who", schema=Person)
        s += f"{s['who'].name}, {s.meta('who').finish_reason}"
        return s["who"]

    state = program.compile().run(backend=MockBackend('{"name": "Ann"}'))
    assert state.text() == 'a{"name": "Ann"}Ann, stop'
    assert state.return_value == Person("Ann")


# -- failures ------------------------------------------------------------------------------------------------------


@function
def reads_of_a_branch(s: Any) -> None:
    s += "a"
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += f"{i}" + gen("x")
        branch += branch["x"] + gen("y")
    branches.join()
    s += gen("z")


@pytest.mark.parametrize("number", range(7))
def test_a_failing_request_is_the_cause(number: int, assert_settled: Callable[[MockBackend], None]) -> None:
    answers: list[Any] = ["ok"] * 7
    answers[number] = ValueError("broken")
    backend = MockBackend(answers)
    with pytest.raises(ProgramError) as caught:
        reads_of_a_branch.compile().run(backend=backend, timeout=20)
    assert isinstance(caught.value.__cause__, ValueError)
    assert_settled(backend)


def test_a_join_ends_with_the_first_failure() -> None:
    """Though another branch never answers."""
    hang = MockAnswer(latency=float("inf"))

    def answer(request: GenerateRequest) -> Any:
        prompt = "".join(map(str, request.prompt))
        return hang if prompt == "a0" else ValueError("broken") if prompt == "a1" else "ok"

    @function
    def program(s: Any) -> None:
        s += "a"
        with s.fork(2) as branches:
            branches += lambda i: f"{i}" + gen("x")

    with pytest.raises(ProgramError, match=r"branch 1.*broken"):
        program.compile().run(backend=MockBackend(answer), timeout=20)


def test_a_join_may_return_errors() -> None:
    @function
    def program(s: Any) -> None:
        s += "a"
        branches = s.fork(2)
        branches += lambda i: f"{i}" + gen("x")
        branches.join(on_error="return")

    backend = MockBackend(lambda r: ValueError("broken") if "1" in str(r.prompt) else "ok")
    first, second = program.compile().run(backend=backend)["x"]
    assert first == "ok"
    assert isinstance(second, ProgramError)


def test_timeouts_and_cancelling_end_it(assert_settled: Callable[[MockBackend], None]) -> None:
    backend = MockBackend(MockAnswer(latency=float("inf")))
    compiled = reads_of_a_branch.compile()
    with pytest.raises(ProgramError) as caught:
        compiled.run(backend=backend, timeout=0.05)
    assert isinstance(caught.value.__cause__, TimeoutError)
    with compiled.run(backend=backend, stream=True) as state:
        pass
    assert state.error() is not None
    assert_settled(backend)


def test_a_value_that_was_cut_is_no_value() -> None:
    @function
    def program(s: Any) -> None:
        s += "a" + gen("who", schema=Person, max_tokens=1)
        s["copy"] = s["who"]

    compiled = program.compile()
    with pytest.raises(ProgramError, match=r"'who'.*max_tokens"):
        compiled.run(backend=MockBackend('{"name": "Ann"}'))


def test_reading_without_use_raises_as_well() -> None:
    @function
    def program(s: Any) -> None:
        s += "a" + gen("who", schema=Person, max_tokens=1)
        s["who"]

    for each in (program, program.compile()):
        with pytest.raises(ProgramError, match=r"'who'.*max_tokens"):
            each.run(backend=MockBackend('{"name": "Ann"}'))


def test_many_branches_of_many_steps() -> None:
    @function
    def program(s: Any, x: str) -> None:
        s += x
        branches = s.fork(200)
        for branch in branches:
            for _ in range(5):
                branch += gen("y")
                branch += branch["y"] + " "
        branches.join()

    backend = MockBackend("b")
    assert program.compile().run("a", backend=backend, timeout=60)["y"] == ["b"] * 200
    assert len(backend.requests) == 1000
