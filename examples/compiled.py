"""A program's graph, and the program run from it: gens that do not depend on each other are sent together.

python examples/compiled.py
"""

from __future__ import annotations

import time

from trellis import Program, ProgramState, function, gen, set_default_backend

POINTS = 6


@function
def notes(s: ProgramState, topic: str) -> None:
    s += f"Notes on {topic}.\n"
    with s.fork(POINTS) as branches:
        for number, branch in enumerate(branches, 1):
            branch += f"Point {number}:" + gen("point", max_tokens=12, stop="\n")
            # Reading waits: as written, the next branch begins only when this point is there.
            branch += f"\nIn other words, {branch['point'].strip()} means" + gen(
                "words", max_tokens=12, stop="\n"
            )


def main(topic: str = "rivers") -> tuple[ProgramState, ProgramState]:
    print(notes.graph())
    compiled = notes.compile()  # raises, and names the line, if the program were not straight-line
    print(f"in the cache before the topic is known: {compiled.cache()!r}")
    return timed("as written", notes, topic), timed("compiled", compiled, topic)


def timed(what: str, program: Program, topic: str) -> ProgramState:
    begin = time.perf_counter()
    state = program.run(topic, temperature=0)
    print(f"{what:11}{time.perf_counter() - begin:6.2f} s")
    return state


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
