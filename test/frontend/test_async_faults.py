"""Whatever ends an async program: its requests are aborted, the cause is kept, the event loops go on."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time

import pytest

from trellis.errors import ProgramError, RequestAborted
from trellis.frontend import MockAnswer, MockBackend, function, gen
from trellis.frontend.defaults import DEFAULTS
from trellis.frontend.loop import LoopThread

pytestmark = pytest.mark.timeout(60)
HANGS = MockAnswer(latency=float("inf"))


@function
async def forks(s):
    s += "a"
    branches = s.fork(2)
    branches += gen("x")
    await branches.join()


@function
def plain_forks(s):
    s += "a"
    branches = s.fork(2)
    branches += gen("x")
    branches.join()


@function
async def waits_elsewhere(s):
    """At work on something that is none of the language's."""
    s += "a" + gen("x")
    await asyncio.Event().wait()


async def until_active(backend, count) -> None:
    while backend.active < count:
        await asyncio.sleep(0.001)


def called(program, call: str, **options):
    """One run of the program, by a method of this name."""
    result = getattr(program, call)(*([()],) if "batch" in call else (), **options)
    return asyncio.run(result) if "async" in call else result


BOTH = pytest.mark.parametrize("program", [forks, plain_forks], ids=lambda p: p.name)


@BOTH
@pytest.mark.parametrize("batch", [False, True])
def test_cancelling_the_task_aborts_the_requests(program, batch, assert_settled) -> None:
    backend = MockBackend(HANGS)

    async def main():
        work = (
            program.run_batch_async([()] * 3, backend=backend)
            if batch
            else program.run_async(backend=backend)
        )
        task = asyncio.create_task(work)
        await until_active(backend, 6 if batch else 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert_settled(backend)
    assert backend.cancelled == (6 if batch else 2)


@BOTH
def test_a_deadline_of_asyncio_aborts_the_requests(program, assert_settled) -> None:
    backend = MockBackend(HANGS)

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(program.run_async(backend=backend), timeout=0.1)

    asyncio.run(main())
    assert_settled(backend)
    assert backend.cancelled == len(backend.requests)


def test_an_error_in_a_group_of_tasks_ends_the_programs_of_the_others(assert_settled) -> None:
    backend = MockBackend(lambda r: ValueError("bad") if "wrong" in r.prompt[0] else HANGS)

    @function
    async def program(s, word):
        s += word + gen("x")
        await s["x"]

    async def main():
        tasks = [
            asyncio.create_task(program.run_async(w, backend=backend)) for w in ("fine", "fine", "wrong")
        ]
        with pytest.raises(ProgramError, match="bad"):
            await asyncio.gather(*tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    assert_settled(backend)


@pytest.mark.parametrize("call", ["run", "run_async"])
def test_the_programs_timeout_ends_a_body_that_waits_elsewhere(call, assert_settled) -> None:
    backend = MockBackend(HANGS)
    with pytest.raises(ProgramError, match=r"timeout of 0\.1 s") as caught:
        called(waits_elsewhere, call, backend=backend, timeout=0.1)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert_settled(backend)


def test_cancel_ends_a_body_that_waits_elsewhere(assert_settled) -> None:
    backend = MockBackend(HANGS)
    state = waits_elsewhere.run(backend=backend, stream=True)
    while not backend.active:
        time.sleep(0.001)
    state.cancel("not needed")
    with pytest.raises(ProgramError, match="not needed"):
        state.sync()
    assert_settled(backend)
    assert backend.cancelled == 1


def test_a_body_that_cancels_its_own_state_gets_the_error_from_its_next_read(assert_settled) -> None:
    backend = MockBackend(HANGS)

    @function
    async def program(s):
        s += gen("x")
        s.cancel("enough")
        with pytest.raises(ProgramError, match="enough"):
            await s["x"]
        with pytest.raises(ProgramError, match="enough"):
            s += "more"
        return "cleaned up"

    with pytest.raises(ProgramError, match="enough") as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, RequestAborted)
    assert_settled(backend)


def test_a_cancelled_branch_leaves_the_others_alone(assert_settled) -> None:
    backend = MockBackend(lambda r: HANGS if "b1" in r.prompt[0] else "good")

    @function
    async def program(s):
        branches = s.fork(3)
        branches += lambda i: f"b{i} " + gen("x")
        branches[1].cancel()
        await branches.join(on_error="return")

    values = program.run(backend=backend)["x"]
    assert [type(value) for value in values] == [str, ProgramError, str]
    assert_settled(backend)


def test_the_error_of_a_branch_can_be_caught_and_the_program_goes_on() -> None:
    backend = MockBackend(lambda r: ValueError("bad") if "b1" in r.prompt[0] else "good")

    @function
    async def program(s):
        branches = s.fork(2)
        branches += lambda i: f"b{i} " + gen("x")
        try:
            await branches.join()
        except ProgramError as error:
            s += f"({error.__cause__}) "
        s += gen("y")

    state = program.run(backend=backend)
    assert (state.text(), state["y"]) == ("(bad) good", "good")


@pytest.mark.parametrize("call", ["run", "run_async", "run_batch", "run_batch_async"])
def test_what_the_body_raises_comes_out_unchanged(call, assert_settled) -> None:
    error = LookupError("mine")
    backend = MockBackend(HANGS)

    @function
    async def program(s):
        s += gen("x")
        await until_active(backend, 1)
        raise error

    with pytest.raises(LookupError) as caught:
        called(program, call, backend=backend)
    assert caught.value is error
    assert_settled(backend)
    assert backend.cancelled == 1


def test_a_body_that_cancels_itself_is_a_program_error() -> None:
    @function
    async def program(s):
        s += "a"
        raise asyncio.CancelledError

    with pytest.raises(ProgramError, match="the body of the program was cancelled"):
        program.run(backend=MockBackend())
    with pytest.raises(ProgramError, match="the body of the program was cancelled"):
        asyncio.run(program.run_async(backend=MockBackend()))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_an_exit_in_a_body_reaches_its_caller_and_not_the_loop(error, assert_settled) -> None:
    backend = MockBackend(HANGS)

    @function
    async def program(s):
        s += gen("x")
        await until_active(backend, 1)
        raise error

    for call in (program.run, lambda **options: program.run_batch([()], **options)):
        with pytest.raises(type(error)):
            call(backend=backend)
        assert_settled(backend)
    with pytest.raises(type(error)):
        asyncio.run(program.run_async(backend=backend))
    assert_settled(backend)
    state = program.run(backend=backend, stream=True)
    assert isinstance(state.error().__cause__, type(error))
    assert DEFAULTS.loop.call(asyncio.sleep(0, "alive")).result(10) == "alive"


def test_an_exit_in_a_backend_fails_the_state_and_not_the_loop() -> None:
    @function
    def program(s):
        s += gen("x")

    with pytest.raises(ProgramError, match="variable 'x': SystemExit: 3") as caught:
        program.run(backend=MockBackend(lambda _request: sys.exit(3)))
    assert isinstance(caught.value.__cause__, SystemExit)
    assert DEFAULTS.loop.call(asyncio.sleep(0, "alive")).result(10) == "alive"


@pytest.mark.parametrize("call", ["run", "run_batch"])
def test_ctrl_c_aborts_what_is_under_way(call, assert_settled) -> None:
    backend = MockBackend(HANGS)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while backend.active < 2:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        called(forks, call, backend=backend)
    presser.join()
    assert_settled(backend)
    assert backend.cancelled == 2


def test_a_loop_that_is_closed_ends_the_bodies_that_it_runs() -> None:
    loop = LoopThread()
    ended = threading.Event()

    async def body() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):  # cleaning up takes some turns of the loop
                await asyncio.sleep(0)
            ended.set()

    running = loop.call(body())
    loop.call(asyncio.sleep(0)).result(10)
    loop.close()
    assert ended.is_set()
    assert running.cancelled()


def test_what_is_posted_runs_in_order_in_the_context_of_its_caller_and_may_fail() -> None:
    loop, seen = LoopThread(), []
    reported = []
    loop.loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))

    def fail() -> None:
        raise LookupError("mine")

    for index in range(100):
        loop.post(lambda index=index: seen.append(index))
        if index == 50:
            loop.post(fail)
    loop.call(asyncio.sleep(0)).result(10)
    assert seen == list(range(100))
    assert [type(error) for error in reported] == [LookupError]
    loop.close()


def test_ctrl_c_while_the_loop_is_woken_does_not_leave_it_asleep(monkeypatch) -> None:
    loop, seen = LoopThread(), []

    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop.loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.post(lambda: seen.append("first"))
    loop.post(lambda: seen.append("second"))
    loop.call(asyncio.sleep(0)).result(10)
    assert seen == ["first", "second"]
    loop.close()


def test_the_timeout_of_a_gen_names_its_variable(assert_settled) -> None:
    backend = MockBackend(HANGS)

    @function
    async def program(s):
        s += "a" + gen("slow", timeout=0.05)
        with pytest.raises(ProgramError, match=r"variable 'slow'.*timeout of 0\.05 s"):
            await s["slow"]
        await s.text()

    with pytest.raises(ProgramError, match="variable 'slow'") as caught:
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert_settled(backend)
    assert backend.cancelled == 1


def test_a_reader_that_gives_up_is_forgotten() -> None:
    backend = MockBackend(HANGS)

    @function
    async def program(s):
        s += gen("x")
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(s["x"], timeout=0.001)
        assert len(s._state._executor.variables["x"].feed._waiters) == 0
        s.cancel()

    with pytest.raises(ProgramError, match="cancelled by the program"):
        program.run(backend=backend)
