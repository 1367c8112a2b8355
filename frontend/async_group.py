"""Forked states of an async program, and how they are joined."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NoReturn, overload

from trellis.frontend.async_state import AsyncProgramState, Read
from trellis.frontend.expressions import Appendable
from trellis.frontend.feed import Release
from trellis.frontend.group import Each, ProgramStateGroup


class AsyncProgramStateGroup(Sequence[AsyncProgramState]):
    """The branches of one fork. ``async with s.fork(3) as branches:`` joins them at its end, and cancels them if
    the block raises. ``await s.fork(3)`` gives the same branches once the state has reached the fork."""

    def __init__(self, parent: AsyncProgramState, group: ProgramStateGroup) -> None:
        self._parent = parent
        self._group = group
        self._states = [AsyncProgramState(state) for state in group]

    def __await__(self) -> Generator[Any, None, AsyncProgramStateGroup]:
        yield from self._parent.sync().__await__()
        return self

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> AsyncProgramState: ...
    @overload
    def __getitem__(self, index: slice) -> list[AsyncProgramState]: ...
    def __getitem__(self, index: int | slice) -> AsyncProgramState | list[AsyncProgramState]:
        return self._states[index]

    def __setitem__(self, index: int, state: AsyncProgramState) -> None:
        if self._states[index] is not state:
            raise TypeError("a branch cannot be replaced; append to it with branches[i] += ...")

    def __iter__(self) -> Iterator[AsyncProgramState]:
        return iter(self._states)

    def __iadd__(self, what: Appendable | Each) -> AsyncProgramStateGroup:
        """Append to every branch, as ``ProgramStateGroup`` does."""
        self._group.__iadd__(what)
        return self

    def join(self, mode: str = "gather", on_error: str = "raise") -> Read[AsyncProgramState]:
        """``await branches.join()``: wait for the branches and bring them into the parent, which it gives. mode
        and on_error as in ``ProgramStateGroup.join``."""

        def joined() -> AsyncProgramState:
            self._group.join(mode, on_error)
            return self._parent

        return Read("branches.join()", lambda: self._ended(on_error == "raise"), joined)

    async def _ended(self, stop_at_failure: bool) -> None:
        """Until every branch is idle, or the first has failed: then the join itself never waits."""
        loop = asyncio.get_running_loop()
        gate: asyncio.Future[None] = loop.create_future()
        self._group._watch(Release(loop, gate), stop_at_failure)
        await gate

    def cancel(self, reason: str = "cancelled by the program") -> None:
        """End every branch that is still at work."""
        self._group.cancel(reason)

    async def __aenter__(self) -> AsyncProgramStateGroup:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.join()
        else:
            self.cancel("the async with block of its fork was left by an error")

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "the branches of an async program are joined with async with: async with s.fork(n) as ..."
        )

    def __exit__(self, *_: object) -> None:
        """Never reached: ``__enter__`` raises."""

    def __repr__(self) -> str:
        return f"<AsyncProgramStateGroup of {len(self)} branches of {self._parent!r}>"
