"""One program with everything: roles, free text, two branches at once, a choice, and JSON that always parses.

python examples/quickstart.py
"""

from __future__ import annotations

import json
import time

from trellis import ProgramState, assistant, function, gen, select, set_default_backend, system, user

CARD = (
    r'\{"title": "[A-Z][A-Za-z]+( [A-Za-z]+){1,4}", "minutes": [1-9][0-9]?, "level": "(easy|medium|hard)"\}'
)


@function
def guide(s: ProgramState, wish: str) -> None:
    s += system("You are a helpful assistant. You answer in one short sentence.")
    s += user(f"I want to {wish}. Where do I begin?")
    s += assistant(gen("begin", max_tokens=32, stop=[".", "\n"]) + ".")

    # Two branches run at the same time. What they have in common is computed once.
    branches = s.fork(2)
    for branch, where in zip(branches, ("at home", "outdoors"), strict=True):
        branch += user(f"Give me one tip for practising {where}.")
        branch += assistant(gen("tip", max_tokens=32, stop=[".", "\n"]) + ".")
    branches.join()

    first, second = s["tip"]  # variables of the branches are lists now
    s += user(f"A: {first}\nB: {second}\nWhich of these is better for a beginner?")
    s += assistant("I would choose " + select("better", ["A", "B"]) + ".")

    # The model can only write what matches; what has no alternative is not sampled at all.
    s += user("Write a plan for the first lesson as JSON, with title, minutes and level.")
    s += assistant(gen("card", regex=CARD, max_tokens=60))


def main() -> ProgramState:
    started = time.perf_counter()
    state = guide.run("learn to juggle", temperature=0)
    seconds = time.perf_counter() - started

    for message in state.messages():
        print(f"{message['role']:>9} | {message['content']}".replace("\n", "\n          | "))
    for index, tip in enumerate(state["tip"]):
        print(f" branch {index} | {tip}")
    print("     JSON |", json.loads(state["card"]))
    chances = state.meta("better").probabilities
    print(f"   choice | A {chances[0]:.0%}, B {chances[1]:.0%}\n")

    # Where every token came from: computed before (cached), written by the model (sampled) or the only possible
    # one (forced).
    print(state.report())
    print(f"\n{seconds:.2f} s in all")
    return state


if __name__ == "__main__":
    from common import choose_backend

    print("Loading the model ...", flush=True)
    with choose_backend() as backend:
        set_default_backend(backend)
        main()
