"""Every kind of fault at every operation of a program that has them all: it ends with the real cause, in time."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from trellis.errors import BackendError, ProgramError, RequestAborted
from trellis.frontend import AsyncProgramState, ProgramState, assistant, function, gen, select, system, user
from trellis.frontend.defaults import DEFAULTS

pytestmark = pytest.mark.timeout(60)

NAMES = {None, "first", "part", "sure", "inner", "sub", "left", "right", "last", "end"}


@function
def ask(s: ProgramState, name: str) -> None:
    s += user(f"{name}?") + assistant(gen(name))
    s.sync()


@function
async def ask_async(s: AsyncProgramState, name: str) -> None:
    s += user(f"{name}?") + assistant(gen(name))
    await s.sync()


@function
def plain(s: ProgramState) -> str:
    s += system("Be brief.") + user("one")
    s += assistant("A: " + gen("first"))
    with s.fork(3) as branches:
        branches += lambda i: user(f"branch {i}") + assistant(gen("part"))
        branches += lambda i: select("sure", [f"yes{i}", f"no{i}"])
    with s.user():
        s += f"so: {len(s['part'])}"
    for _ in s.text_iter("first"):
        pass
    inner = s.copy()
    inner += assistant(gen("inner"))
    s.set("copied", inner["inner"])
    with s.var_scope("scope"):
        s.run(ask, "sub")
    s.gather(left=ask.bind(name="left"), right=ask.bind(name="right"))
    s += assistant(gen("last", n=2) + select("end", ["a", "b"]))
    return str(s["end"])


@function
async def coroutine(s: AsyncProgramState) -> str:
    s += system("Be brief.") + user("one")
    s += assistant("A: " + gen("first"))
    async with s.fork(3) as branches:
        branches += lambda i: user(f"branch {i}") + assistant(gen("part"))
        branches += lambda i: select("sure", [f"yes{i}", f"no{i}"])
    async with s.user():
        s += f"so: {len(await s['part'])}"
    async for _ in s.text_iter("first"):
        pass
    inner = s.copy()
    inner += assistant(gen("inner"))
    s.set("copied", await inner["inner"])
    async with s.var_scope("scope"):
        await s.run(ask_async, "sub")
    await s.gather(left=ask_async.bind(name="left"), right=ask.bind(name="right"))
    s += assistant(gen("last", n=2) + select("end", ["a", "b"]))
    return str(await s["end"])


# Model info; first; three branches of gen and select; the copy; the sub-program; two gathered; two samples; end.
OPERATIONS = 1 + 1 + 6 + 1 + 1 + 2 + 2 + 1
STREAMED = {1, 2, 3, 4, 8, 9, 10, 11, 12, 13}  # of these, the gens
TIMEOUT = 0.3


def from_plain_code(program, backend, stream, **options):
    state = program.run(backend=backend, stream=stream, **options)
    return list(state.text_iter()) if stream else state


def from_async_code(program, backend, stream, **options):
    async def main():
        state = await program.run_async(backend=backend, stream=stream, **options)
        if stream:
            async for _ in state.text_iter():
                pass
        assert len(asyncio.all_tasks()) <= 2  # this one, and a driver that is just ending
        return state

    return asyncio.run(main())


WAYS = list(itertools.product([plain, coroutine], [from_plain_code, from_async_code], [False, True]))
EVERY_WAY = pytest.mark.parametrize(
    ("program", "call", "stream"),
    WAYS,
    ids=[f"{p.name}-{c.__name__}-{'stream' if s else 'whole'}" for p, c, s in WAYS],
)


@pytest.fixture
def leaves_nothing(assert_settled):
    """Threads, tasks and requests are as before."""
    loop = DEFAULTS.loop.loop  # its thread is there for all of the process
    before = threading.active_count()

    def check(backend) -> None:
        assert_settled(backend)
        deadline = time.monotonic() + 10
        while (threading.active_count() > before or asyncio.all_tasks(loop)) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert threading.active_count() <= before
        assert not asyncio.all_tasks(loop)

    return check


@EVERY_WAY
def test_without_a_fault_the_program_ends(program, call, stream, faulty, leaves_nothing) -> None:
    backend = faulty(-1, "error")
    call(program, backend, stream, timeout=30)
    assert backend.operations == OPERATIONS
    leaves_nothing(backend)


@EVERY_WAY
@pytest.mark.parametrize("fault", ["error", "disconnect", "nothing", "garbage", "cut"])
def test_a_fault_at_any_operation_ends_with_the_real_cause(
    program, call, stream, fault, faulty, leaves_nothing
) -> None:
    for operation in range(OPERATIONS):
        backend = faulty(operation, fault)
        with pytest.raises(ProgramError) as caught:
            call(program, backend, stream, timeout=30)
        error = caught.value
        assert backend.hit.is_set()
        assert error.program == program.name
        assert error.variable in NAMES
        assert isinstance(error.__cause__, BackendError)
        broken_stream = stream and fault == "cut" and operation in STREAMED
        if fault in ("error", "disconnect", "cut") and not broken_stream:
            assert error.__cause__ is faulty.CAUSE
        leaves_nothing(backend)


@EVERY_WAY
def test_a_hang_at_any_operation_ends_with_the_programs_timeout(
    program, call, stream, faulty, leaves_nothing
) -> None:
    backends = [faulty(operation, "hang") for operation in range(OPERATIONS)]

    def error_of(backend) -> ProgramError:
        with pytest.raises(ProgramError, match="not done within its timeout") as caught:
            call(program, backend, stream, timeout=TIMEOUT)
        return caught.value

    with ThreadPoolExecutor(OPERATIONS) as pool:  # at the same time, since each takes all of its timeout
        for error in pool.map(error_of, backends):
            assert isinstance(error.__cause__, TimeoutError)
    for backend in backends:
        leaves_nothing(backend)


@pytest.mark.parametrize("program", [plain, coroutine], ids=lambda p: p.name)
@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_at_any_operation_wakes_everybody(program, stream, faulty, leaves_nothing) -> None:
    for operation in range(OPERATIONS):
        backend = faulty(operation, "hang")
        states, errors = [], []

        def body(s, states=states):
            states.append(s)
            return program.body(s)

        if program.is_async:

            async def async_body(s, body=body):
                return await body(s)

            watched = function(async_body)
        else:
            watched = function(body)

        def read(watched=watched, backend=backend, errors=errors) -> None:
            try:
                list(watched.run(backend=backend, stream=stream).text_iter())
            except ProgramError as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert backend.hit.wait(10)
        states[0].cancel("not needed any more")
        reader.join(10)
        assert not reader.is_alive()
        assert isinstance(errors[0].__cause__, RequestAborted)
        assert "not needed any more" in str(errors[0])
        leaves_nothing(backend)


@EVERY_WAY
def test_a_slow_answer_changes_nothing(program, call, stream, faulty, leaves_nothing) -> None:
    for operation in (0, 1, 3, OPERATIONS - 1):
        backend = faulty(operation, "slow")
        call(program, backend, stream, timeout=30)
        assert backend.operations == OPERATIONS
        leaves_nothing(backend)


@pytest.mark.parametrize("program", [plain, coroutine], ids=lambda p: p.name)
@pytest.mark.parametrize("fault", ["error", "disconnect", "hang", "nothing"])
def test_a_batch_that_returns_errors_tells_the_faulty_item(program, fault, faulty, leaves_nothing) -> None:
    backend = faulty(OPERATIONS + 4, fault)
    states = program.run_batch([()] * 3, backend=backend, on_error="return", timeout=1.0, num_threads=3)
    failed = [state.error() for state in states if state.error() is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].__cause__, TimeoutError if fault == "hang" else BackendError)
    assert [state.return_value for state in states].count("a") == 2
    leaves_nothing(backend)


@pytest.mark.parametrize("program", [plain, coroutine], ids=lambda p: p.name)
@pytest.mark.parametrize("fault", ["error", "disconnect", "nothing"])
def test_a_batch_that_raises_ends_the_other_items(program, fault, faulty, leaves_nothing) -> None:
    backend = faulty(OPERATIONS + 4, fault)
    with pytest.raises(ProgramError) as caught:
        program.run_batch([()] * 5, backend=backend, timeout=30, num_threads=2)
    assert isinstance(caught.value.__cause__, BackendError)
    leaves_nothing(backend)


@pytest.mark.parametrize("program", [plain, coroutine], ids=lambda p: p.name)
def test_the_timeout_of_a_batch_ends_what_is_not_done(program, faulty, leaves_nothing) -> None:
    backend = faulty(OPERATIONS * 2, "hang")
    states = program.run_batch([()] * 4, backend=backend, on_error="return", num_threads=1, batch_timeout=0.8)
    errors = [state.error() for state in states]
    assert errors[:2] == [None, None]
    for error in errors[2:]:
        assert "the batch was not done within its timeout of 0.8 s" in str(error)
        assert isinstance(error.__cause__, TimeoutError)
    assert backend.operations == OPERATIONS * 2 + 1  # the last one was never begun
    leaves_nothing(backend)
    with pytest.raises(ProgramError, match="the batch was not done"):
        program.run_batch([()], backend=faulty(0, "hang"), batch_timeout=0.05)
