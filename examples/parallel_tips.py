"""Ask for several things at the same time and use all of the answers: fork and join.

python examples/parallel_tips.py
"""

from __future__ import annotations

import time

from trellis import ProgramState, assistant, function, gen, set_default_backend, system, user

TOPICS = ["food", "sleep", "exercise"]


@function
def advice(s: ProgramState) -> None:
    s += system("You are a doctor. You answer in one sentence.")
    s += user("How do I stay healthy?")
    s += assistant("By looking after your food, your sleep and your exercise.")

    branches = s.fork(len(TOPICS))  # three states that go on from here, side by side
    for branch, topic in zip(branches, TOPICS, strict=True):
        branch += user(f"What is your best advice on {topic}?")
        branch += assistant(gen("tip", max_tokens=40, stop=[".", "\n"]) + ".")
    branches.join()  # s["tip"] is a list of three now

    s += user("So: " + ". ".join(s["tip"]) + ". Which of these comes first?")
    s += assistant(gen("summary", max_tokens=40, stop=[".", "\n"]) + ".")


def main() -> ProgramState:
    started = time.perf_counter()
    state = advice.run(temperature=0)
    seconds = time.perf_counter() - started
    for topic, tip in zip(TOPICS, state["tip"], strict=True):
        print(f"{topic}: {tip}")
    print(f"first: {state['summary']}\n")
    print(state.report())
    print(
        f"\nthe gens' own times add up to {sum(row.seconds for row in state.report().rows):.2f} s; ", end=""
    )
    print(f"the program took {seconds:.2f} s, as the tips were written at the same time")
    return state


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
