"""``async def`` programs: what their state reads and says, and the event loops they run in."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from trellis.errors import InvalidRequestError, ProgramError
from trellis.frontend import (
    AsyncProgramState,
    MockAnswer,
    MockBackend,
    ProgramState,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)
from trellis.frontend.defaults import DEFAULTS

pytestmark = pytest.mark.timeout(60)


@function
async def talk(s: AsyncProgramState, topic: str, tone: str = "plain") -> str:
    """Talks."""
    s += system("Be brief.") + user(f"{topic} ({tone})")
    async with s.assistant():
        s += gen("answer")
    with s.user():
        s += "sure? " + select("sure", ["yes", "no"])
    return f"{await s['answer']}, {await s['sure']}"


def test_run_gives_a_state_that_is_complete() -> None:
    state = talk.run("tea", backend=MockBackend("good"))
    assert isinstance(state, ProgramState)
    assert (state["answer"], state["sure"], state.return_value) == ("good", "yes", "good, yes")
    assert [m["role"] for m in state.messages()] == ["system", "user", "assistant", "user"]
    assert talk.is_async
    assert talk.__doc__ == "Talks."


def test_run_async_gives_a_state_that_is_complete() -> None:
    async def main() -> ProgramState:
        return await talk.run_async("tea", tone="kind", backend=MockBackend("good"))

    state = asyncio.run(main())
    assert state["answer"] == "good"
    assert "tea (kind)" in state.text()


def test_every_read_of_the_state_is_awaited() -> None:
    seen = {}

    @function
    async def program(s: AsyncProgramState) -> None:
        s += user("q") + assistant("A: " + gen("x"))
        s.set("y", 3)
        s["z"] = 4
        seen["value"] = await s["x"]
        seen["text"] = await s.text("x")
        seen["whole"] = await s.text()
        seen["tokens"] = (await s.meta("x")).counts.sampled_tokens
        seen["messages"] = [m["content"] for m in await s.messages()]
        seen["error"] = await s.error()
        seen["rows"] = len((await s.report()).rows)
        seen["set"] = (await s["y"], await s["z"])
        assert await s.sync() is None
        assert "x" in s
        assert s.variables() == ["x", "y", "z"]
        assert s.partial_text() == await s.text()
        assert "AsyncProgramState of 'program': running" in repr(s)

    program.run(backend=MockBackend("a"))
    assert seen.pop("whole").endswith("A: a\n")
    assert seen == {
        "value": "a",
        "text": "a",
        "tokens": 1,
        "messages": ["q", "A: a"],
        "error": None,
        "rows": 1,
        "set": (3, 4),
    }


@pytest.mark.parametrize(
    "use",
    [
        lambda s: f"{s['x']}",
        lambda s: str(s["x"]),
        lambda s: bool(s["x"] == "a"),
        lambda s: "yes" if s["x"] else "no",
        lambda s: s.__iadd__(s["x"]),
        lambda s: s.set("y", s["x"]),
        lambda s: f"{s.text('x')}",
        lambda s: s["x"] + "b",
        lambda s: "b" + s["x"],
        lambda s: s["x"] < 3,
        lambda s: "b" in s["x"],
        lambda s: len(s["x"]),
        lambda s: int(s["x"]),
        lambda s: s["x"][0],
        lambda s: list(s["x"]),
        lambda s: [*s["x"]],
    ],
)
def test_a_forgotten_await_is_an_error_that_says_so(use) -> None:
    @function
    async def program(s):
        s += gen("x")
        use(s)

    with pytest.raises(TypeError, match=r"read with await: await s"):
        program.run(backend=MockBackend("a"))


def test_a_fork_in_a_plain_with_says_that_it_wants_async_with() -> None:
    @function
    async def program(s):
        with s.fork(2):
            pass

    with pytest.raises(TypeError, match=r"async with s\.fork"):
        program.run(backend=MockBackend("a"))


def test_a_variable_that_is_never_set_is_a_key_error() -> None:
    @function
    async def program(s):
        s += gen("x")
        with pytest.raises(KeyError, match="has no variable 'z'; it has: x"):
            await s["z"]

    assert program.run(backend=MockBackend("a"))["x"] == "a"


# -- forking -------------------------------------------------------------------------------------------------------


def test_branches_run_side_by_side_and_join_into_lists() -> None:
    backend = MockBackend(lambda r: r.prompt[0].split()[-1])

    @function
    async def program(s):
        s += "prefix "
        branches = await s.fork(3)
        assert await s.text() == "prefix "
        for index, branch in enumerate(branches):
            branch += f"b{index}" + gen("x")
        branches[1] += "!"
        assert await branches[2]["x"] == "b2"
        assert len(branches[:2]) == 2
        assert await branches.join() is s
        s.set("list", await s["x"])
        inner = s.copy()
        inner += gen("inner")
        s.set("copied", await inner["inner"])

    state = program.run(backend=backend)
    assert state["list"] == ["b0", "b1", "b2"]
    assert state["copied"] == "prefix"


def test_leaving_the_block_of_a_fork_joins_its_branches() -> None:
    @function
    async def program(s):
        async with s.fork(2) as branches:
            branches += lambda i: f"{i}" + gen("x")
        return await s["x"]

    assert program.run(backend=MockBackend("a")).return_value == ["a", "a"]


def test_an_error_in_the_block_of_a_fork_cancels_its_branches(assert_settled) -> None:
    backend = MockBackend(MockAnswer(latency=float("inf")))

    @function
    async def program(s):
        async with s.fork(2) as branches:
            branches += gen("x")
            while backend.active < 2:
                await asyncio.sleep(0.001)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        program.run(backend=backend)
    assert_settled(backend)
    assert backend.cancelled == 2


def test_join_as_the_caller_says() -> None:
    backend = MockBackend(lambda r: ValueError("bad") if "b1" in r.prompt[0] else "good")

    @function
    async def program(s, **how):
        branches = s.fork(3)
        branches += lambda i: f"b{i} " + gen("x")
        await branches.join(**how)

    with pytest.raises(ProgramError, match="branch 1: ValueError: bad") as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, ValueError)
    values = program.run(on_error="return", backend=backend)["x"]
    assert [type(value) for value in values] == [str, ProgramError, str]
    state = program.run(mode="concatenate", on_error="return", backend=backend)
    assert state.text() == "b0 goodb2 good"
    with pytest.raises(InvalidRequestError, match="mode"):
        program.run(mode="sideways", backend=backend)


def test_reads_of_several_branches_can_be_gathered() -> None:
    backend = MockBackend(lambda r: ValueError("bad") if "b1" in r.prompt[0] else "good")

    @function
    async def program(s):
        branches = s.fork(3)
        branches += lambda i: f"b{i} " + gen("x")
        found = await asyncio.gather(*(branch["x"] for branch in branches), return_exceptions=True)
        assert [str(each) for each in (found[0], found[2])] == ["good", "good"]
        assert isinstance(found[1], ProgramError)
        await asyncio.gather(*(branch["x"] for branch in branches))

    with pytest.raises(ProgramError, match="variable 'x': ValueError: bad"):
        program.run(backend=backend)


def test_a_stream_may_be_read_from_plain_code() -> None:
    state = talk.run("tea", backend=MockBackend("very good"), stream=True)
    assert list(state.text_iter("answer")) == ["very", " good"]
    assert state["sure"] == "yes"


# -- loops ---------------------------------------------------------------------------------------------------------


def test_the_body_runs_in_the_loop_of_its_caller() -> None:
    where = []

    @function
    async def program(s, event):
        where.append((threading.current_thread(), asyncio.get_running_loop()))
        s += gen("x")
        event.set()
        await event.wait()

    async def main():
        await program.run_async(event=asyncio.Event(), backend=MockBackend())
        assert where == [(threading.current_thread(), asyncio.get_running_loop())]

    asyncio.run(main())


def test_the_body_runs_in_the_loop_of_all_states_when_plain_code_calls() -> None:
    where = []

    @function
    async def program(s):
        s += gen("x")
        where.append(asyncio.get_running_loop())

    program.run(backend=MockBackend())
    program.run_batch([(), ()], backend=MockBackend())
    assert where == [DEFAULTS.loop.loop] * 3


@pytest.mark.parametrize("how", ["run", "run_batch"])
def test_plain_calls_work_while_an_event_loop_runs(how) -> None:
    """As in a notebook, whose cells are run by a loop."""

    @function
    def plain(s):
        s += "p" + gen("x")

    async def cell():
        backend = MockBackend("a")
        if how == "run":
            return talk.run("tea", backend=backend)["answer"], plain.run(backend=backend)["x"]
        [one], [two] = talk.run_batch([("tea",)], backend=backend), plain.run_batch([()], backend=backend)
        return one["answer"], two["x"]

    assert asyncio.run(cell()) == ("a", "a")


def test_a_body_that_would_block_the_loop_of_all_states_is_told_what_to_write() -> None:
    @function
    def plain(s):
        s += "p" + gen("x")
        s.set("y", s["x"])

    @function
    async def program(s, other):
        s += "a"
        other.run(**({"topic": "tea"} if other is talk else {}), backend=MockBackend())

    for other in (plain, talk):
        with pytest.raises(RuntimeError, match=r"await program\.run_async"):
            program.run(other=other, backend=MockBackend())


def test_programs_may_await_other_programs_of_either_kind() -> None:
    @function
    def plain(s):
        s += "p" + gen("x")
        s.set("y", s["x"] + "!")

    @function
    async def program(s):
        one, two = await asyncio.gather(
            plain.run_async(backend=backend), talk.run_async("tea", backend=backend)
        )
        s += one["y"] + two["answer"]

    backend = MockBackend("a")
    assert program.run(backend=backend).text() == "a!a"
    assert asyncio.run(program.run_async(backend=backend)).text() == "a!a"


def test_a_plain_program_does_not_hold_up_the_loop_that_awaits_it() -> None:
    released = threading.Event()

    @function
    def program(s):
        assert released.wait(30)
        s += gen("x")

    async def main():
        running = asyncio.create_task(program.run_async(backend=MockBackend("a")))
        await asyncio.sleep(0)
        released.set()  # only a loop that goes on gets here
        return (await running)["x"]

    assert asyncio.run(main()) == "a"


def test_bodies_see_the_context_variables_of_the_caller() -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")
    tenant.set("acme")

    @function
    def plain(s):
        s += tenant.get()

    @function
    async def program(s):
        s += tenant.get()

    async def main():
        return [
            (await plain.run_async(backend=backend)).text(),
            (await program.run_async(backend=backend)).text(),
            *[s.text() for s in await plain.run_batch_async([()], backend=backend)],
            *[s.text() for s in await program.run_batch_async([()], backend=backend)],
        ]

    backend = MockBackend()
    assert asyncio.run(main()) == ["acme"] * 4
    assert program.run(backend=backend).text() == "acme"
    assert [s.text() for s in program.run_batch([()], backend=backend)] == ["acme"]
