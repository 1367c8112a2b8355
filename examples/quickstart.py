"""One program with everything: roles, free text, two branches at once, a choice, and JSON that always parses.

python examples/quickstart.py
"""

from __future__ import annotations

import json
import sys
import time

from trellis import (
    Meta,
    ProgramState,
    SelectMeta,
    assistant,
    function,
    gen,
    select,
    set_default_backend,
    system,
    user,
)

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


STEPS = {
    "begin": "free text",
    "tip": "two branches side by side",
    "better": "a choice between A and B",
    "card": "JSON that matches a pattern; in «» what the pattern left no choice about",
}


def show(step: str, meta: Meta) -> None:
    """The text of one step, with its forced parts marked, and where its tokens came from."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    text = "".join(f"{dim}«{part}»{plain}" if origin == "forced" else part for part, origin in meta.pieces)
    print(f"{step:>9} | " + text.strip().replace("\n", "\n          | "))
    if isinstance(meta, SelectMeta):
        chances = zip(meta.choices, meta.probabilities, strict=True)
        print("          | " + ", ".join(f"{option} {chance:.0%}" for option, chance in chances))
    counts = meta.counts
    print(
        f"          | prompt: {counts.cached_tokens} tokens cached, "
        f"{counts.prompt_tokens - counts.cached_tokens} computed; "
        f"output: {counts.sampled_tokens} sampled, {counts.forced_tokens} forced; {meta.seconds:.2f} s",
        flush=True,
    )


def main() -> ProgramState:
    started = time.perf_counter()
    state = guide.run("learn to juggle", temperature=0, stream=True)  # returns at once
    for name, what in STEPS.items():
        print(f"\n{name}: {what}", flush=True)
        metas = state.meta(name)  # waits for this step alone
        for index, meta in enumerate(metas if isinstance(metas, list) else [metas]):
            show(f"branch {index}" if isinstance(metas, list) else name, meta)
    print("\nparsed:", json.loads(state["card"]))
    seconds = time.perf_counter() - started

    # Where every token came from: computed before (cached), written by the model (sampled) or the only possible
    # one (forced).
    print(f"\n{state.report()}")
    print(f"\n{seconds:.2f} s in all")
    return state


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
