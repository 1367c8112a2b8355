"""Programs at the edges of the language: deep, long, in odd places, and with what is easily forgotten."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import inspect
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trellis import (
    AsyncProgramState,
    MockBackend,
    ProgramError,
    ProgramState,
    RequestAborted,
    flush_cache,
    function,
    gen,
    server_info,
    user,
)
from trellis.frontend.async_group import AsyncProgramStateGroup
from trellis.frontend.backends.base import Completion, GenerateRequest
from trellis.frontend.group import ProgramStateGroup
from trellis.frontend.transcript import Transcript

DEEP = 1500  # more than Python's limit of recursion


@function
def ask(s: ProgramState, question: str) -> str:
    s += question + gen("answer")
    return s.text("answer")


def within(seconds: float, work: Callable[[], object]) -> object:
    """What ``work`` returns or raises; a test that hangs fails and ends."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


# -- depth and length --------------------------------------------------------------------------------------------


def chain(s: ProgramState) -> list[ProgramState]:
    """Copies of copies, all of them kept."""
    states = [s]
    for _ in range(DEEP):
        states.append(states[-1].copy())
    return states


def test_forks_in_forks_may_be_deeper_than_the_stack() -> None:
    @function
    def program(s: ProgramState) -> str:
        s += "a " + gen("first")
        last = chain(s)[-1]
        last += gen("last")
        return last.text()

    assert program.run(backend=MockBackend("b")).return_value == "a bb"


def test_a_failure_reaches_the_deepest_fork() -> None:
    made = threading.Event()

    async def answer(_request: GenerateRequest) -> str:
        await asyncio.to_thread(made.wait)
        raise RuntimeError("down")

    @function
    def program(s: ProgramState) -> ProgramError | None:
        s += "a " + gen("first")
        last = chain(s)[-1]
        made.set()
        return last.error()

    def run() -> object:
        (state,) = program.run_batch([()], backend=MockBackend(answer), on_error="return")
        return state.return_value

    error = within(30, run)
    assert isinstance(error, ProgramError)
    assert isinstance(error.__cause__, RuntimeError)
    assert error.variable == "first"


def test_a_prompt_that_grows_is_made_as_one_that_is_made_at_once() -> None:
    grown = Transcript()
    for index in range(20):
        grown.write(f"q{index} ")
        if index % 3:
            grown.add_completion(Completion(f"a{index}", (index, index + 1), kept_tokens=2))
        if index % 5 == 0:
            grown.add_completion(Completion("w", (7,), kept_tokens=1, healed_characters=0))
        branch = grown.copy()
        branch.write("branch")
        for each in (grown, branch):
            assert each.prompt() == Transcript(list(each.pieces)).prompt()
            assert each.prompt() == each.prompt()


def test_ten_thousand_pieces_in_one_sum() -> None:
    parts = gen("x") + ""
    for _ in range(10_000):
        parts = parts + "a"
    state = function(lambda s: s.__iadd__(parts) and None).run(backend=MockBackend("b"))
    assert len(state.text()) == 10_001


def test_a_fork_of_a_fork_that_nobody_keeps_is_cancelled_and_waited_for() -> None:
    backend = MockBackend("b", latency=float("inf"))

    @function
    def program(s: ProgramState) -> ProgramError | None:
        s += "a "
        last = s.copy().copy()
        last.sync()
        last += gen("x")
        s.cancel()
        return last.error()

    def run() -> object:
        (state,) = program.run_batch([()], backend=backend, on_error="return")
        return state.return_value

    error = within(30, run)
    assert isinstance(error, ProgramError)
    assert isinstance(error.__cause__, RequestAborted)


# -- places where nothing may wait ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "waits",
    [
        lambda backend: ask.run_batch([("a",), ("b",)], backend=backend),
        lambda backend: ask.cache(backend=backend),
        lambda backend: flush_cache(backend),
        lambda backend: server_info(backend),
    ],
    ids=["run_batch", "cache", "flush_cache", "server_info"],
)
def test_what_would_wait_for_its_own_thread_says_so(waits: Callable[[MockBackend], object]) -> None:
    backend = MockBackend("b")

    @function
    async def program(s: AsyncProgramState) -> object:  # noqa: ARG001
        return waits(backend)

    error = within(10, lambda: program.run(backend=backend))
    assert isinstance(error, RuntimeError)
    assert "await" in str(error)


# -- what is easily forgotten --------------------------------------------------------------------------------------


def test_a_state_is_not_iterated() -> None:
    @function
    def plain(s: ProgramState) -> object:
        return list(s)  # type: ignore[call-overload]

    @function
    async def awaited(s: AsyncProgramState) -> object:
        return [each for each in s]  # type: ignore[attr-defined]  # noqa: C416

    for program in (plain, awaited):
        with pytest.raises(TypeError, match="not iterable"):
            program.run(backend=MockBackend())


def test_a_method_of_what_was_not_awaited_says_so() -> None:
    @function
    async def program(s: AsyncProgramState) -> str:
        s += "a" + gen("x")
        return await s["x"].strip()  # type: ignore[no-any-return]

    with pytest.raises(AttributeError, match=r"\(await s\['x'\]\)\.strip"):
        program.run(backend=MockBackend())


def test_a_decorator_that_hides_an_async_def_is_an_error() -> None:
    def plain(body: Any) -> Any:
        @functools.wraps(body)
        def wrapper(*args: Any) -> Any:
            return body(*args)

        return wrapper

    @function
    @plain
    async def program(s: AsyncProgramState) -> None:
        s += "never said"

    @function
    def outer(s: ProgramState) -> None:
        s.run(program)

    for each in (program, outer):
        with pytest.raises(TypeError, match=r"program 'program'.*async def"):
            each.run(backend=MockBackend())


def test_an_object_with_an_async_call_is_an_async_program() -> None:
    class Body:
        async def __call__(self, s: AsyncProgramState) -> str:
            s += "a" + gen("x")
            return await s.text()

    assert function(Body()).run(backend=MockBackend("b")).return_value == "ab"


def test_a_program_is_not_made_of_a_program() -> None:
    with pytest.raises(TypeError, match="made of a function, got the class 'dict'"):
        function(dict)
    with pytest.raises(TypeError, match="is a program already"):
        function(ask)


def test_the_signature_of_a_program_is_what_run_takes() -> None:
    assert list(inspect.signature(ask).parameters) == ["question"]
    bound = inspect.signature(ask.bind(question="why"))
    assert bound.parameters["question"].default == "why"


def test_both_kinds_of_state_have_the_same_methods() -> None:
    for plain, awaited in (
        (ProgramState, AsyncProgramState),
        (ProgramStateGroup, AsyncProgramStateGroup),
    ):
        names = [{name for name in vars(kind) if not name.startswith("_")} for kind in (plain, awaited)]
        assert names[0] == names[1]


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_program_can_be_pickled_by_its_name() -> None:
    cold = ask.bind(question="why").with_options(temperature=0)
    backend = MockBackend("b")
    again = pickle.loads(pickle.dumps(cold))
    assert again.run(backend=backend).text() == "whyb"
    assert backend.requests[0].sampling.temperature == 0
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(function(lambda s: None))  # noqa: ARG005


def test_a_program_goes_to_another_process() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_run_there, (ask,)) == "ab"


def _run_there(program: Any) -> str:
    text: str = program.run("a", backend=MockBackend("b")).text()
    return text


def test_a_copy_of_a_program_is_the_program() -> None:
    local = function(lambda s: s.__iadd__("a") and None)
    assert copy.copy(local) is copy.deepcopy(local) is local


# -- options ---------------------------------------------------------------------------------------------------------


def test_a_sub_program_may_set_an_option_to_its_default() -> None:
    sampled = ask.with_options(temperature=1.0, max_tokens=128, return_logprob=False)

    @function
    def outer(s: ProgramState) -> None:
        s.run(sampled, "a")
        s.run(ask, "b")

    backend = MockBackend("c")
    outer.run(backend=backend, temperature=0, max_tokens=5, return_logprob=True)
    told = [(r.sampling.temperature, r.sampling.max_new_tokens, r.return_logprob) for r in backend.requests]
    assert told == [(1.0, 128, False), (0, 5, True)]


# -- whose error it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_error_of_the_body_is_not_blamed_on_a_gen_that_runs(kind: str) -> None:
    backend = MockBackend("b", latency=float("inf"))
    begun = lambda: backend.active == 1  # noqa: E731

    @function
    def plain(s: ProgramState) -> None:
        s += "a" + gen("x")
        while not begun():
            pass
        raise ValueError("of the body")

    @function
    async def awaited(s: AsyncProgramState) -> None:
        s += "a" + gen("x")
        while not begun():
            await asyncio.sleep(0)
        raise ValueError("of the body")

    program = plain if kind == "plain" else awaited
    (state,) = program.run_batch([()], backend=backend, on_error="return")
    error = state.error()
    assert isinstance(error, ProgramError)
    assert error.variable is None
    assert isinstance(error.__cause__, ValueError)


def test_an_error_of_a_program_within_a_program_names_both() -> None:
    @function
    def outer(s: ProgramState) -> None:
        s += "b"
        ask.run("a", backend=MockBackend(RuntimeError("down")))

    (state,) = outer.run_batch([()], backend=MockBackend(), on_error="return")
    error = state.error()
    assert isinstance(error, ProgramError)
    assert (error.program, error.variable) == ("outer", None)
    assert "program 'ask', variable 'answer'" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


# -- looking ---------------------------------------------------------------------------------------------------------


def test_a_report_has_what_branches_asked_once() -> None:
    @function
    def program(s: ProgramState) -> None:
        s += "a" + gen("x")
        for mode in ("concatenate", "gather"):
            branches = s.fork(2)
            branches += gen("y")
            branches += gen()
            branches.join(mode)
        s.gather(p=ask.bind(question="q"))

    backend = MockBackend("b c")
    report = program.run(backend=backend).report()
    assert report.total.completion_tokens == 2 * len(backend.requests)
    names = [row.variable for row in report.rows]
    assert {"x", "y[0]", "y[1]", "y (branch 0)", "(unnamed) (branch 3)", "p.answer"} <= set(names)
    assert len(names) == len(set(names)) == len(backend.requests)


def test_half_a_character_does_not_break_the_page(tmp_path: Path) -> None:
    @function
    def program(s: ProgramState) -> None:
        s += user("\ud800") + gen("\udcff")

    state = program.run(backend=MockBackend("\ud801 e\u0301"))
    state.timeline().save(tmp_path / "run.html")
    assert "&#55297; e\u0301" in (tmp_path / "run.html").read_text(encoding="utf-8")


# -- garbage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_run_leaves_nothing_to_the_collector_of_cycles(kind: str) -> None:
    @function
    async def awaited(s: AsyncProgramState, question: str) -> None:
        s += question + gen("answer")
        await s["answer"]
        branches = s.fork(2)
        branches += gen("more")
        await branches.join()

    program = ask if kind == "plain" else awaited
    program.run_batch([("a",)], backend=MockBackend())  # what is made once is made now
    gc.collect()
    gc.disable()
    try:
        program.run_batch([("a",)] * 20, backend=MockBackend())
        assert gc.collect() < 20  # less than one object a run
    finally:
        gc.enable()


# -- tracing ---------------------------------------------------------------------------------------------------------


def test_several_samples_are_a_list_of_known_length_in_a_trace() -> None:
    @function
    def program(s: ProgramState, topic: str) -> list[str]:
        first = gen("name", n=3)
        s += topic + first
        for each in s["name"]:
            s += f"or {each}? "
        s += gen("end")
        return [*s.text("name"), str(s[first][2])]

    trace = program.trace()
    assert trace.is_straight, trace.stop
    answers = ["a", "b", "c", "d"]
    plain = program.run("x", backend=MockBackend(answers))
    fast = program.compile().run("x", backend=MockBackend(answers))
    assert fast.return_value == plain.return_value == ["a", "b", "c", "c"]
    assert fast.text() == plain.text() == "xaor a? or b? or c? d"
