"""``run_batch`` of async programs, and ``run_batch_async`` of programs of either kind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trellis.errors import InvalidRequestError, ProgramError
from trellis.frontend import MockAnswer, MockBackend, function, gen

pytestmark = pytest.mark.timeout(60)


def in_async_code(program, items, **options):
    return asyncio.run(program.run_batch_async(items, **options))


def in_plain_code(program, items, **options):
    return program.run_batch(items, **options)


@function
async def echo(s, word):
    s += f"{word} " + gen("x")
    s += " " + gen("y")
    return await s["y"]


@function
def plain_echo(s, word):
    s += f"{word} " + gen("x")
    s += " " + gen("y")
    return s["y"]


def first_word(request):
    return request.prompt[0].split()[0]


EVERY_BATCH = pytest.mark.parametrize(
    ("program", "run_batch"),
    [(echo, in_plain_code), (echo, in_async_code), (plain_echo, in_async_code)],
    ids=["async-plain", "async-async", "plain-async"],
)


@EVERY_BATCH
def test_a_batch_keeps_the_order_of_its_items(program, run_batch, assert_settled, capsys) -> None:
    backend = MockBackend(first_word)
    items = [(f"w{i}",) if i % 2 else {"word": f"w{i}"} for i in range(60)]
    states = run_batch(program, items, backend=backend, progress_bar=True)
    assert [s.return_value for s in states] == [f"w{i}" for i in range(60)]
    assert "60/60" in capsys.readouterr().err
    assert run_batch(program, [], backend=backend) == []
    assert_settled(backend)


@EVERY_BATCH
def test_a_bound_on_the_bodies_at_work(program, run_batch) -> None:
    backend = MockBackend(first_word, latency=0.001)
    run_batch(program, [(f"w{i}",) for i in range(20)], backend=backend, num_threads=3)
    assert 1 <= backend.peak <= 3


@EVERY_BATCH
def test_errors_of_a_batch_as_the_caller_says(program, run_batch, assert_settled) -> None:
    def answer(request):
        hangs = MockAnswer(latency=float("inf"))
        return ValueError("bad") if request.prompt[0].startswith("w3") else hangs if forever else "good"

    items = [(f"w{i}",) for i in range(6)]
    forever, backend = False, MockBackend(answer)
    states = run_batch(program, items, backend=backend, on_error="return")
    assert [s.error() is None for s in states] == [i != 3 for i in range(6)]
    assert isinstance(states[3].error().__cause__, ValueError)
    forever = True
    with pytest.raises(ProgramError, match="variable 'x': ValueError: bad"):
        run_batch(program, items, backend=backend)
    assert_settled(backend)


@EVERY_BATCH
def test_wrong_arguments_of_a_batch_are_refused_before_it_starts(program, run_batch) -> None:
    backend = MockBackend()
    with pytest.raises(TypeError, match="item 1"):
        run_batch(program, [("a",), ()], backend=backend)
    with pytest.raises(InvalidRequestError, match=r"run_batch\.batch_timeout"):
        run_batch(program, [("a",)], backend=backend, batch_timeout=0)
    with pytest.raises(InvalidRequestError, match=r"run_batch\.num_threads"):
        run_batch(program, [("a",)], backend=backend, num_threads=0)
    assert backend.requests == []


def test_bodies_of_async_programs_run_at_the_same_time_without_a_thread_each(assert_settled) -> None:
    count, threads = 1000, []
    gate = asyncio.Event()

    async def answer(_request):
        if backend.active == count:
            threads.append(threading.active_count())
            gate.set()
        await gate.wait()
        return "a"

    backend = MockBackend(answer)
    before = threading.active_count()
    states = echo.run_batch([(f"w{i}",) for i in range(count)], backend=backend)
    assert [s["y"] for s in states] == ["a"] * count
    assert backend.peak == count
    assert threads[0] <= before + 1
    assert_settled(backend)
