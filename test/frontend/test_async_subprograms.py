"""Programs that run inside an async one, typed reads, scopes."""

from __future__ import annotations

import asyncio

import pytest

from trellis.errors import InvalidRequestError, ProgramError, RequestAborted
from trellis.frontend import MockAnswer, MockBackend, function, gen, select

pytestmark = pytest.mark.timeout(60)
HANGS = MockAnswer(latency=float("inf"))


@function
def plain(s, word):
    s += f" {word} " + gen(word)
    return f"plain {s[word]}"


@function
async def coroutine(s, word):
    s += f" {word} " + gen(word)
    return f"async {await s[word]}"


def last_word(request):
    return request.prompt[-1].split()[-1]


def run(program, **options):
    """In the loop of all states, and in one of its own."""
    first = program.run(**options)
    second = asyncio.run(program.run_async(**options))
    assert first.text() == second.text()
    return first


def test_programs_of_either_kind_run_on_the_state_of_an_async_one() -> None:
    @function
    async def program(s):
        s += "a"
        found = [await s.run(plain, "one"), await s.run(coroutine, word="two", temperature=0)]
        assert await s["one"] == "one"
        return found

    backend = MockBackend(last_word)
    state = run(program, backend=backend, temperature=0.5)
    assert state.text() == "a one one two two"
    assert state.return_value == ["plain one", "async two"]
    assert (state["one"], state["two"]) == ("one", "two")
    assert [r.sampling.temperature for r in backend.requests] == [0.5, 0.0] * 2


def test_a_plain_program_cannot_await_an_async_one() -> None:
    @function
    def program(s):
        s.run(coroutine, "one")

    with pytest.raises(TypeError, match="async def"):
        program.run(backend=MockBackend())


def test_programs_are_gathered_side_by_side() -> None:
    @function
    async def program(s):
        s += "a"
        found = await s.gather(first=plain.bind(word="one"), second=coroutine.bind(word="two"))
        assert (await s["first"])["one"] == "one"
        return found

    state = run(program, backend=MockBackend(last_word))
    assert state.return_value == {"first": "plain one", "second": "async two"}
    assert state["second"] == {"two": "two"}
    assert state.text() == "a"


@pytest.mark.parametrize("bad", [plain, coroutine], ids=lambda p: p.name)
def test_an_error_in_one_of_them_ends_the_others(bad, assert_settled) -> None:
    backend = MockBackend(lambda r: ValueError("no") if "bad" in r.prompt[0] else HANGS)

    @function
    async def waits(s):
        s += gen("x")
        await asyncio.Event().wait()

    @function
    async def program(s):
        await s.gather(good=coroutine.bind(word="good"), bad=bad.bind(word="bad"), waits=waits)

    with pytest.raises(ProgramError, match="gather 'bad': ValueError: no") as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, ValueError)
    assert_settled(backend)


def test_errors_of_gathered_programs_may_stand_in_their_places() -> None:
    backend = MockBackend(lambda r: ValueError("no") if "bad" in r.prompt[0] else "fine")

    @function
    async def program(s):
        return await s.gather("return", good=coroutine.bind(word="good"), bad=coroutine.bind(word="bad"))

    state = program.run(backend=backend)
    assert state["good"] == {"good": "fine"}
    assert isinstance(state.return_value["bad"], ProgramError)
    with pytest.raises(InvalidRequestError, match=r"gather\.on_error"):
        function(_gathers_wrongly).run(backend=backend)


async def _gathers_wrongly(s):
    await s.gather("ignore", good=coroutine.bind(word="good"))


@pytest.mark.parametrize("child", [plain, coroutine], ids=lambda p: p.name)
@pytest.mark.parametrize("gathered", [False, True])
def test_cancelling_the_task_ends_the_programs_inside(child, gathered, assert_settled) -> None:
    backend = MockBackend(HANGS)

    @function
    async def program(s):
        s += "a"
        if gathered:
            await s.gather(one=child.bind(word="one"), two=child.bind(word="two"))
        else:
            await s.run(child, "one")

    async def main():
        task = asyncio.create_task(program.run_async(backend=backend))
        while backend.active < (2 if gathered else 1):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert_settled(backend)
    assert backend.cancelled == (2 if gathered else 1)


def test_a_deadline_on_a_program_inside_ends_the_state_that_it_writes_to(assert_settled) -> None:
    backend = MockBackend(HANGS)

    @function
    async def program(s):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(s.run(plain, "one"), timeout=0.05)
        with pytest.raises(ProgramError):
            await s["one"]

    with pytest.raises(ProgramError) as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, RequestAborted)
    assert_settled(backend)


def test_typed_reads_samples_and_scopes() -> None:
    seen = []

    @function
    async def program(s):
        number, verdict = gen("number", type=int), select("verdict", ["yes", "no"])
        async with s.var_scope("all"):
            s += "n: " + number
        s += verdict
        seen.append((await s[number] + 1, await s.get("number", int), await s[verdict], await s["all"]))
        assert number in s
        with pytest.raises(TypeError, match="str"):
            await s.get("number", str)
        s += " " + gen("many", n=2)
        seen.append(await s["many"])
        seen.append([piece async for piece in s.text_iter("many", sample=1)])

    run(program, backend=MockBackend("7"))
    assert seen[:3] == [(8, 7, "yes", "n: 7"), ["7", "7"], ["7"]]


def test_a_scope_that_is_read_inside_itself_does_not_wait_for_ever() -> None:
    @function
    async def program(s):
        with s.var_scope("all"):
            s += "a"
            await s["all"]

    with pytest.raises(RuntimeError, match="inside its own var_scope"):
        program.run(backend=MockBackend())
