"""Text on the screen while the model writes it.

python examples/streaming.py
"""

from __future__ import annotations

import asyncio

from trellis import ProgramState, assistant, function, gen, set_default_backend, user


@function
def story(s: ProgramState, hero: str) -> None:
    s += user(f"Write a very short story about {hero}.")
    s += assistant(gen("story", max_tokens=40))
    s += user("Give it a title.")
    s += assistant(gen("title", max_tokens=12, stop="\n"))


async def race(heroes: list[str]) -> list[str]:
    """Several states in one event loop."""

    async def read(hero: str) -> str:
        state = story.run(hero, stream=True, temperature=0)
        pieces = 0
        async for _ in state.text_async_iter("story"):
            pieces += 1
        print(f"{hero}: a story in {pieces} pieces, {state['title'].strip()!r}")
        text: str = state["story"]
        return text

    return list(await asyncio.gather(*map(read, heroes)))


def main() -> ProgramState:
    state = story.run("a snail", stream=True, temperature=0)  # returns at once
    for piece in state.text_iter("story"):  # one variable; text_iter() is everything
        print(piece, end="", flush=True)
    print(f"\n\ntitle: {state['title']}\n")
    asyncio.run(race(["a fox", "an owl"]))
    return state


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
