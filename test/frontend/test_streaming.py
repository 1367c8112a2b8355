"""text_iter and text_async_iter: what comes, when it ends, and what failures look like."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trellis.errors import BackendError, ProgramError, RequestAborted
from trellis.frontend import MockAnswer, MockBackend, assistant, function, gen, select, user
from trellis.frontend.backends.base import Chunk, Completion

HANGS = MockAnswer(latency=float("inf"))


@function
def chat(s, question):
    s += user(question)
    s += assistant(gen("answer", stop="!") + " " + select("sure", ["yes", "no"]))


def test_the_pieces_add_up_to_the_text() -> None:
    state = chat.run("hi", stream=True, backend=MockBackend("one two three! four"))
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text() == "USER: hi\nASSISTANT: one two three yes\n"
    assert [p for p in pieces if p.strip() in ("one", "two", "three")] == ["one", " two", " three"]
    assert list(state.text_iter("answer")) == ["one", " two", " three"]
    assert list(state.text_iter("sure")) == ["yes"]


def test_run_with_stream_returns_before_the_program_ends_and_text_comes_as_it_is_made() -> None:
    release = threading.Event()

    async def answer(request):
        if "second" in request.prompt[-1]:
            await asyncio.to_thread(release.wait)
        return "text"

    @function
    def program(s):
        s += "first " + gen("a") + " second " + gen("b")

    state = program.run(stream=True, backend=MockBackend(answer))
    pieces = state.text_iter()
    assert [next(pieces), next(pieces), next(pieces)] == ["first ", "text", " second "]
    assert "running" in repr(state)
    release.set()
    assert list(pieces) == ["text"]
    assert "done" in repr(state)


def test_a_variable_can_be_read_before_the_program_has_reached_it() -> None:
    release = threading.Event()

    @function
    def program(s):
        release.wait()
        s += "a" + gen("late")

    state = program.run(stream=True, backend=MockBackend("x y"))
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(state.text_iter("late")))
    reader.start()
    release.set()
    reader.join(10)
    assert found == ["x", " y"]
    assert state["late"] == "x y"


def test_a_variable_that_the_program_never_sets_ends_with_a_key_error() -> None:
    state = chat.run("hi", stream=True, backend=MockBackend("a"))
    with pytest.raises(KeyError, match="no variable 'anser'"):
        list(state.text_iter("anser"))
    with pytest.raises(KeyError):
        state["anser"]


def test_a_state_that_did_not_stream_yields_its_text_as_well() -> None:
    state = chat.run("hi", backend=MockBackend("one two"))
    assert "".join(state.text_iter()) == state.text()
    assert list(state.text_iter("answer")) == ["one two"]


def test_several_readers_see_everything() -> None:
    state = chat.run("hi", stream=True, backend=MockBackend("a b c d", latency=0.01))
    found: list[list[str]] = [[], [], []]
    threads = [threading.Thread(target=lambda mine=mine: mine.extend(state.text_iter())) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found[0] == found[1] == found[2]
    assert "".join(found[0]) == state.text()


def test_a_body_may_stream_its_own_state() -> None:
    seen: list[str] = []

    @function
    def program(s):
        s += "go: " + gen("x")
        seen.extend(s.text_iter())
        seen.append("|")
        seen.extend(s.text_iter("x"))
        s += " end"

    state = program.run(stream=True, backend=MockBackend("a b"))
    assert state.text() == "go: a b end"
    assert seen == ["go: ", "a", " b", "|", "a", " b"]


def test_branches_stream_what_their_parent_said_and_what_they_add() -> None:
    seen: list[str] = []

    @function
    def program(s):
        s += "start "
        branches = s.fork(2)
        branches += lambda i: f"b{i}: " + gen("x")
        seen.append("".join(branches[1].text_iter()))
        branches.join("concatenate")

    state = program.run(stream=True, backend=MockBackend("a b"))
    assert "".join(state.text_iter()) == "start b0: a bb1: a b"
    assert seen == ["start b1: a b"]


def test_async_iteration() -> None:
    async def main():
        state = chat.run("hi", stream=True, backend=MockBackend("one two", latency=0.01))
        whole = [piece async for piece in state.text_async_iter()]
        answer = [piece async for piece in state.text_async_iter("answer")]
        with pytest.raises(KeyError):
            _ = [piece async for piece in state.text_async_iter("nothing")]
        return "".join(whole), answer, state.text()

    whole, answer, text = asyncio.run(main())
    assert whole == text
    assert answer == ["one", " two"]


def test_many_states_are_streamed_in_one_event_loop() -> None:
    async def read(i):
        state = chat.run(f"q{i}", stream=True, backend=backend)
        return "".join([piece async for piece in state.text_async_iter()])

    async def main():
        return await asyncio.gather(*(read(i) for i in range(20)))

    backend = MockBackend(lambda r: "re " + r.prompt[0].split()[1], latency=0.005)
    assert asyncio.run(main()) == [f"USER: q{i}\nASSISTANT: re q{i} yes\n" for i in range(20)]


def test_a_reader_whose_event_loop_is_gone_does_no_harm() -> None:
    release = threading.Event()

    async def answer(_request):
        await asyncio.to_thread(release.wait)
        return "a"

    state = chat.run("hi", stream=True, backend=MockBackend(answer))

    async def give_up():
        async def read():
            return [piece async for piece in state.text_async_iter("answer")]

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(), 0.05)

    asyncio.run(give_up())
    release.set()
    assert state["answer"] == "a"


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_stream_that_breaks_shows_its_text_and_then_raises() -> None:
    backend = MockBackend(MockAnswer("half of", error=BackendError("connection lost")))
    state = chat.run("hi", stream=True, backend=backend)
    seen: list[str] = []
    with pytest.raises(ProgramError, match="connection lost") as caught:
        seen.extend(state.text_iter())
    assert isinstance(caught.value.__cause__, BackendError)
    with pytest.raises(ProgramError, match="connection lost"):
        seen.extend(state.text_iter("answer"))
    assert state.partial_text() == "USER: hi\nASSISTANT: half of"


def test_a_body_that_raises_surfaces_in_every_reader() -> None:
    @function
    def program(s):
        s += "text " + gen("x")
        s.sync()
        raise LookupError("in the body")

    state = program.run(stream=True, backend=MockBackend("a"))
    seen: list[str] = []
    with pytest.raises(ProgramError, match="in the body") as caught:
        seen.extend(state.text_iter())
    assert isinstance(caught.value.__cause__, LookupError)
    assert seen == ["text ", "a"]
    for read in (state.text, state.messages, lambda: state["y"], lambda: list(state.text_iter("y"))):
        with pytest.raises(ProgramError, match="in the body"):
            read()

    async def main():
        with pytest.raises(ProgramError, match="in the body"):
            _ = [piece async for piece in state.text_async_iter()]

    asyncio.run(main())


def test_leaving_a_with_block_cancels_what_is_unfinished(assert_settled) -> None:
    backend = MockBackend(HANGS)
    with chat.run("hi", stream=True, backend=backend) as state:
        assert next(state.text_iter()).startswith("USER")
    with pytest.raises(ProgramError, match="with block was left") as caught:
        state.text()
    assert isinstance(caught.value.__cause__, RequestAborted)
    assert_settled(backend)
    with chat.run("hi", stream=True, backend=MockBackend("a")) as state:
        state.sync()
    assert state["answer"] == "a"


def test_what_is_read_from_outside_waits_for_the_programs_end() -> None:
    release = threading.Event()

    @function
    def program(s):
        release.wait()
        s += user("hi") + gen("x")
        s += "."
        return "value"

    state = program.run(stream=True, backend=MockBackend("a"))
    threading.Timer(0.05, release.set).start()
    assert state.text() == "USER: hi\na."
    assert len(state.messages()) == 1
    assert state.return_value == "value"


def test_a_body_may_read_its_state_in_threads_of_its_own() -> None:
    @function
    def program(s):
        branches = s.fork(2)
        branches += lambda i: f"b{i} " + gen("x")
        with ThreadPoolExecutor() as pool:
            s += "+".join(pool.map(lambda branch: branch.text(), branches))

    assert program.run(stream=True, backend=MockBackend("a")).text() == "b0 a+b1 a"


class Odd(MockBackend):
    def __init__(self, chunks):
        super().__init__()
        self.chunks = chunks

    async def stream(self, _request):
        for chunk in self.chunks:
            yield chunk


def test_a_stream_without_an_end_is_an_error_of_the_backend() -> None:
    state = chat.run("hi", stream=True, backend=Odd([Chunk("a")]))
    with pytest.raises(ProgramError, match="ended before the answer was complete"):
        state.text()


def test_pieces_that_contradict_the_final_text_are_an_error_of_the_backend() -> None:
    state = chat.run("hi", stream=True, backend=Odd([Chunk("a"), Chunk("", Completion("b"))]))
    with pytest.raises(ProgramError, match="do not add up"):
        state.text()


def test_text_that_comes_only_with_the_end_is_shown_too() -> None:
    state = chat.run("hi", stream=True, backend=Odd([Chunk("a"), Chunk("", Completion("abc"))]))
    assert list(state.text_iter("answer")) == ["a", "bc"]
