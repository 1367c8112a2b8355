"""Whatever fails, wherever: the program ends with the real cause, everybody who waits is told, nothing is left."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from trellis.errors import BackendError, ConstraintError, ProgramError, RequestAborted
from trellis.frontend import MockAnswer, MockBackend, function, gen, select

pytestmark = pytest.mark.timeout(60)
HANGS = MockAnswer(latency=float("inf"))


def failing(*answers):
    return MockBackend(list(answers))


def test_every_accessor_raises_the_cause_and_names_program_and_variable() -> None:
    @function
    def program(s):
        s += "a" + gen("good") + gen("bad") + gen("never")

    backend = failing("fine", ConstraintError("regex", "limit", "position 3", "too big"))
    [state] = program.run_batch([()], backend=backend, on_error="return")

    def read_all(name):
        return [
            lambda: state[name],
            lambda: state.text(name),
            lambda: state.meta(name),
            lambda: list(state.text_iter(name)),
        ]

    reads = [
        *read_all("bad"),
        *read_all("never"),
        *read_all("good"),
        *read_all("unknown"),
        state.text,
        state.messages,
        state.sync,
        lambda: list(state.text_iter()),
        lambda: state.fork(2),
        state.copy,
        lambda: state.__iadd__("more"),
        lambda: state.set("x", 1),
        lambda: state.user("x"),
    ]
    for read in reads:
        with pytest.raises(ProgramError, match="too big") as caught:
            read()
        assert (caught.value.program, caught.value.variable) == ("program", "bad")
        assert isinstance(caught.value.__cause__, ConstraintError)
    assert isinstance(state.error(), ProgramError)
    assert len(backend.requests) == 2


def test_each_reader_gets_an_exception_of_its_own() -> None:
    [state] = function(lambda s: s.__iadd__(gen("x")) and None).run_batch(
        [()], backend=failing(ValueError("no")), on_error="return"
    )
    first, second = state.error(), state.error()
    assert first is not second
    assert first.__cause__ is second.__cause__  # type: ignore[union-attr]


def test_appending_after_a_failure_raises_at_once() -> None:
    @function
    def program(s):
        s += gen("x")
        with pytest.raises(ProgramError):
            s.sync()
        with pytest.raises(ProgramError, match="no luck"):
            s += "more"
        with pytest.raises(ProgramError, match="no luck"), s.user():
            pass

    with pytest.raises(ProgramError, match="no luck"):
        program.run(backend=failing(ValueError("no luck")))


def test_an_exception_of_the_body_leaves_run_unchanged_and_aborts_what_is_under_way(assert_settled) -> None:
    error = LookupError("mine")
    backend = MockBackend(HANGS)

    @function
    def program(s):
        branches = s.fork(2)
        branches += "x" + gen("y")
        while backend.active < 2:
            time.sleep(0.001)
        raise error

    with pytest.raises(LookupError) as caught:
        program.run(backend=backend)
    assert caught.value is error
    assert_settled(backend)
    assert backend.cancelled == 2


def test_the_timeout_of_a_gen_names_its_variable(assert_settled) -> None:
    backend = MockBackend(HANGS)

    @function
    def program(s):
        s += "a" + gen("slow", timeout=0.05)
        return s["slow"]

    with pytest.raises(ProgramError, match=r"variable 'slow'.*timeout of 0\.05 s") as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert_settled(backend)
    assert backend.cancelled == 1


def test_the_timeout_of_a_select() -> None:
    async def never(_prompt, _options):
        await asyncio.Event().wait()

    @function
    def program(s):
        s += "a" + select("slow", ["x", "y"], timeout=0.05)

    with pytest.raises(ProgramError, match="variable 'slow'"):
        program.run(backend=MockBackend(scores=never))


def test_a_timeout_that_is_kept_changes_nothing() -> None:
    @function
    def program(s):
        s += "a" + gen("x", timeout=30)

    state = program.run(backend=MockBackend("b"), timeout=30)
    assert state["x"] == "b"
    assert state.error() is None


def test_a_timeout_wakes_a_program_even_if_the_backend_ignores_cancellation() -> None:
    release = threading.Event()

    async def stubborn(_request):
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "too late"

    @function
    def program(s):
        s += "a" + gen("x", timeout=0.05)
        return s["x"]

    backend = MockBackend(stubborn)
    with pytest.raises(ProgramError, match="timeout"):
        program.run(backend=backend)
    assert backend.active == 1  # it still runs, and nobody waits for it
    release.set()


def test_cancelling_a_branch_leaves_the_others_alone() -> None:
    backend = MockBackend(lambda r: HANGS if r.prompt[0].startswith("b1") else "fine")

    @function
    def program(s):
        branches = s.fork(3)
        branches += lambda i: f"b{i}" + gen("x")
        branches[1].cancel()
        branches.join(on_error="return")

    values = program.run(backend=backend)["x"]
    assert (values[0], values[2]) == ("fine", "fine")
    assert isinstance(values[1].__cause__, RequestAborted)


def test_cancelling_what_has_ended_changes_nothing() -> None:
    state = function(lambda s: s.__iadd__(gen("x")) and None).run(backend=MockBackend("a"))
    state.cancel()
    assert state["x"] == "a"


def test_ctrl_c_aborts_what_is_under_way(assert_settled) -> None:
    backend = MockBackend(HANGS)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt():
        while backend.active < 2:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    @function
    def program(s):
        branches = s.fork(2)
        branches += "x" + gen("y")
        branches.join()

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    presser.join()
    assert_settled(backend)
    assert backend.cancelled == 2


def test_ctrl_c_ends_a_batch(assert_settled) -> None:
    backend = MockBackend(HANGS)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt():
        while backend.active < 3:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    @function
    def program(s, i):
        s += f"{i}" + gen("y")
        return s["y"]

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        program.run_batch([(i,) for i in range(6)], num_threads=3, backend=backend)
    presser.join()
    assert_settled(backend)
    assert len(backend.requests) == 3


def test_a_wrong_number_of_scores_is_an_error_of_the_backend() -> None:
    @function
    def program(s):
        s += "a" + select("x", ["a", "b"])

    with pytest.raises(ProgramError, match="2 options were sent, 1 came back") as caught:
        program.run(backend=MockBackend(scores=lambda _p, _o: [[-1.0]]))
    assert isinstance(caught.value.__cause__, BackendError)


def test_reading_a_state_on_the_loops_own_thread_is_refused_instead_of_waiting_for_ever() -> None:
    states = []

    def answer(_request):
        return states[0].text()

    @function
    def program(s):
        states.append(s)
        s += "a" + gen("x")

    with pytest.raises(ProgramError, match="read inside a backend callback"):
        program.run(backend=MockBackend(answer))
