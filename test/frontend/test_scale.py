"""Thousands of states: no thread each, everything sent at once, nothing left behind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trellis.frontend import MockBackend, function, gen
from trellis.frontend.defaults import DEFAULTS
from trellis.frontend.loop import LoopThread

pytestmark = pytest.mark.timeout(120)


def test_a_thousand_branches_wait_at_the_same_time_on_one_thread(assert_settled) -> None:
    count, gate = 1000, asyncio.Event()
    threads = []

    async def answer(_request):
        if backend.active == count:
            threads.append(threading.active_count())
            gate.set()
        await gate.wait()
        return "a"

    backend = MockBackend(answer)

    @function
    def program(s):
        s += "prefix "
        branches = s.fork(count)
        branches += lambda i: f"{i} " + gen("x") + " then " + gen("y")
        branches.join()

    before = threading.active_count()
    state = program.run(backend=backend)
    assert len(state["y"]) == count
    assert backend.peak == count
    assert threads[0] <= before + 1
    assert_settled(backend)


def test_a_batch_of_a_thousand_programs(assert_settled) -> None:
    @function
    def program(s, i):
        s += f"{i} " + gen("x")
        s += f" {s['x']} " + gen("y")
        branches = s.fork(2)
        branches += gen("z")
        branches.join()

    backend = MockBackend(lambda r: r.prompt[0].split()[0])
    states = program.run_batch([(i,) for i in range(1000)], backend=backend)
    assert [s["y"] for s in states] == [str(i) for i in range(1000)]
    assert [s["z"] for s in states] == [[str(i)] * 2 for i in range(1000)]
    assert len(backend.requests) == 4000
    assert_settled(backend)


def test_branches_that_nobody_holds_are_not_kept() -> None:
    kept = []

    @function
    def program(s):
        for _ in range(200):
            branch = s.copy()
            branch += "b" + gen("x")
            branch.sync()
            del branch
        kept.append(s)

    program.run(backend=MockBackend("a"))
    assert len(list(kept[0]._executor.family())) < 20


def test_a_loop_that_is_closed_ends_its_tasks_and_can_start_again() -> None:
    loop = LoopThread()
    started, cancelled = threading.Event(), threading.Event()

    async def work():
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    loop.post(lambda: loop.spawn(work()))
    assert started.wait(10)
    loop.close()
    loop.close()
    assert cancelled.is_set()

    async def value():
        return 7

    assert loop.call(value()).result(10) == 7
    loop.close()
    assert DEFAULTS.loop is not loop
