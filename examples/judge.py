"""A model as a judge: ``select`` compares whole continuations and says how sure it is.

python examples/judge.py
"""

from __future__ import annotations

from trellis import ProgramState, function, select, set_default_backend

SHOTS = [
    ("What is 2 + 2?", "4", "correct"),
    ("Which animal barks?", "The cat barks.", "wrong"),
    ("What colour is the sky?", "The sky is blue.", "correct"),
    ("Who wrote Hamlet?", "No idea.", "wrong"),
]
QUESTION = "How many legs does a spider have?"
ANSWERS = ["A spider has eight legs.", "Bananas are yellow.", "Look it up yourself."]


@function
def judge(s: ProgramState, question: str, answer: str) -> None:
    for shot_question, shot_answer, verdict in SHOTS:
        s += f"Question: {shot_question}\nAnswer: {shot_answer}\nVerdict: {verdict}\n\n"
    # The blank belongs to the options: words begin with it in the model's vocabulary.
    s += f"Question: {question}\nAnswer: {answer}\nVerdict:" + select("verdict", [" correct", " wrong"])


def main() -> list[ProgramState]:
    states = judge.run_batch([{"question": QUESTION, "answer": answer} for answer in ANSWERS])
    print(QUESTION)
    for answer, state in zip(ANSWERS, states, strict=True):
        meta = state.meta("verdict")
        chances = ", ".join(
            f"{o.strip()} {p:.0%}" for o, p in zip(meta.choices, meta.probabilities, strict=True)
        )
        print(f"  {answer:26}{state['verdict'].strip():9}({chances})")
    return states


if __name__ == "__main__":
    from common import choose_backend

    with choose_backend() as backend:
        set_default_backend(backend)
        main()
