"""A conversation. Every turn finds all turns before it in the cache.

python examples/multi_turn_chat.py
"""

from __future__ import annotations

from trellis import ProgramState, assistant, function, gen, set_default_backend, system, user

QUESTIONS = [
    "What is a trellis?",
    "Which plants grow on one?",
    "How high can they get?",
]


@function
def chat(s: ProgramState, questions: list[str]) -> None:
    s += system("You are a gardener. You answer in one sentence.")
    for turn, question in enumerate(questions):
        s += user(question)
        s += assistant(gen(f"answer{turn}", max_tokens=36, stop="\n"))


def main() -> ProgramState:
    state = chat.run(QUESTIONS, temperature=0)
    for message in state.messages():
        print(f"{message['role']}: {message['content']}")
    print()
    for turn in range(len(QUESTIONS)):
        counts = state.meta(f"answer{turn}").counts
        print(
            f"turn {turn}: {counts.cached_tokens} of {counts.prompt_tokens} prompt tokens came from the cache"
        )
    return state


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
