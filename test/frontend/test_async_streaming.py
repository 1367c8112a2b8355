"""Text of programs as it comes, read by coroutines."""

from __future__ import annotations

import asyncio

import pytest

from trellis.errors import ProgramError
from trellis.frontend import AsyncProgramState, MockAnswer, MockBackend, function, gen

pytestmark = pytest.mark.timeout(60)


def test_pieces_come_while_the_program_runs() -> None:
    @function
    async def program(s):
        s += "Say: " + gen("x")
        pieces = [piece async for piece in s.text_iter("x")]
        s += f" ({len(pieces)} pieces)"

    async def main():
        state = await program.run_async(backend=MockBackend("one two three"), stream=True)
        assert isinstance(state, AsyncProgramState)
        pieces = [piece async for piece in state.text_iter()]
        assert await state["x"] == "one two three"
        return pieces

    assert asyncio.run(main()) == ["Say: ", "one", " two", " three", " (3 pieces)"]


def test_a_plain_program_is_streamed_to_async_code_too() -> None:
    @function
    def program(s):
        s += "Say: " + gen("x")
        s += f" {len(s['x'])}"

    async def main():
        state = await program.run_async(backend=MockBackend("one two"), stream=True)
        return [piece async for piece in state.text_iter()]

    assert asyncio.run(main()) == ["Say: ", "one", " two", " 7"]


def test_leaving_the_block_of_a_stream_cancels_the_program(assert_settled) -> None:
    backend = MockBackend(MockAnswer(latency=float("inf")))

    @function
    async def program(s):
        s += "begin " + gen("x")
        await asyncio.Event().wait()

    async def main():
        async with await program.run_async(backend=backend, stream=True) as state:
            async for piece in state.text_iter():
                assert piece == "begin "
                while not backend.active:
                    await asyncio.sleep(0.001)
                break
        with pytest.raises(ProgramError, match="block was left"):
            await state["x"]

    asyncio.run(main())
    assert_settled(backend)
    assert backend.cancelled == 1


def test_the_error_of_a_streamed_body_comes_from_its_readers() -> None:
    @function
    async def program(s):
        s += "a"
        raise LookupError("mine")

    async def main():
        state = await program.run_async(backend=MockBackend(), stream=True)
        with pytest.raises(ProgramError, match="LookupError: mine"):
            async for _ in state.text_iter():
                pass
        assert isinstance((await state.error()).__cause__, LookupError)

    asyncio.run(main())
